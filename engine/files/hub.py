"""Model references: catalogue names, paths, hf:org/repo[:QUANT][@revision], and the bundled model.

`resolve` returns the .cflow file to run: other formats are converted once, into the cache
($XDG_CACHE_HOME/cflow). Names there contain a hash of the source's content, so a changed source is
converted again, and what it was before is removed. `found` gives the source itself, for `cflow convert`.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from cflow.engine.base.cache_folder import cache_folder
from cflow.engine.base.errors import ModelError, NoModelError
from cflow.engine.base.reports import Report, silent
from cflow.engine.files import catalogue
from cflow.engine.files.catalogue import Entry
from cflow.engine.files.formats.magic import MAGIC
from cflow.engine.files.formats.parts import first_part, gguf_in, parts_of

CONVERTER = 5  # raise it when the same source converts to another file
BUNDLED = "tinystories"
BUNDLED_FILE = Path(__file__).parent / "data" / "tinystories.cflow"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
FILES_BELOW = ("*_Pooling/config.json", "additional_chat_templates/*.jinja")  # read as well
HASH_CHUNK = 8 << 20


def resolve(reference: str, *, progress: Report = silent) -> Path:
    """The .cflow or .vflow file of a reference, downloaded and converted if necessary.

    Raises ModelError."""
    try:
        entry = catalogue.entries().get(reference)
        if entry is not None:
            return _from_catalogue(entry, progress)
        return _from_path(_locate(reference, progress), progress)
    except OSError as error:
        raise ModelError(f"cannot use the model {reference!r}: {error}") from error


@contextmanager
def found(reference: str, *, progress: Report = silent) -> Iterator[Path]:
    """The file or folder that a reference names, unconverted, downloaded if necessary.

    A checkpoint of the catalogue is kept only within this context. Raises ModelError."""
    entry = catalogue.entries().get(reference)
    with ExitStack() as stack:
        try:
            if entry is None:
                path = _locate(reference, progress)
            else:
                stack.enter_context(_lock(_catalogue_file(entry), progress))
                path = stack.enter_context(_fetched(entry, progress))
        except OSError as error:
            raise ModelError(f"cannot use the model {reference!r}: {error}") from error
        yield path


def _locate(reference: str, report: Report) -> Path:
    """The file or folder of a reference that is not in the catalogue."""
    if reference == BUNDLED:
        return BUNDLED_FILE
    if reference.startswith("hf:"):
        return _from_hub(reference.removeprefix("hf:"), report)
    path = Path(os.path.expanduser(reference))
    if not path.exists():
        known = ", ".join([*catalogue.entries(), BUNDLED])
        raise NoModelError(
            f"no model {reference!r}: not a file or folder here, not hf:org/repo, and not in the "
            f"catalogue ({known})"
        )
    return path


def _from_path(path: Path, report: Report) -> Path:
    if path.is_file() and (path.suffix in (".cflow", ".vflow") or _begins(path, MAGIC)):
        return path
    converts = path.suffix in (".gguf", ".safetensors")  # the converter says what is wrong
    if path.is_file() and not converts and not _begins(path, b"GGUF"):
        raise ModelError(
            f"{path} is not a model file; .cflow, .vflow, .gguf and Hugging Face folders are supported"
        )
    if path.is_dir():
        path = gguf_in(path) or path
    target = _Source.of(path).target(report)
    with _locked(target, report) as is_done:
        if not is_done:
            _convert(path, target, report)
    return target


def _convert(source: Path, target: Path, report: Report) -> None:
    from cflow.engine.files.convert import convert  # brings numpy and the C library

    what = f"converting {source.name}"
    convert(
        str(source),
        target,
        progress=lambda done, total: report(what, done, total),
        say=lambda note: report(note, 0, 0),
    )


def _begins(path: Path, magic: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class _Source:
    """What is known of a source in the cache: the file `record` holds {"path", "target", "files"};
    files: name to [device, inode, size, mtime, ctime, SHA-256].

    A conversion belongs to the content. The first five figures only save hashing again."""

    path: Path
    record: Path

    @classmethod
    def of(cls, path: Path) -> _Source:
        parts = parts_of(path)
        # The parts of a model are found by their names, which links have and what they lead to has not.
        path = path.resolve() if len(parts) == 1 else parts[0].absolute()
        key = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return cls(path, cache_folder() / f"{key}.source.json")

    def target(self, report: Report) -> Path:
        """The conversion of what the source holds now. Removes the one of what it held before."""
        known = self._read()
        files = parts_of(self.path)
        if self.path.is_dir():
            below = (self.path.glob(pattern) for pattern in FILES_BELOW)
            found = (*self.path.iterdir(), *chain.from_iterable(below))
            files = sorted(p for p in found if p.is_file() and _is_read(p.name))
        old = known.get("files", {})
        now = {
            name: _known_or_hashed(file, old.get(name), report)
            for file in files
            for name in [str(file.relative_to(self.path)) if self.path.is_dir() else file.name]
        }
        lines = [str(CONVERTER), self.path.name, *(f"{name}\0{now[name][-1]}" for name in now)]
        identity = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
        stem = re.sub(r"[^\w.-]", "_", self.path.name.removesuffix(".gguf"))[:100]
        target = self.record.with_name(f"{stem}-{identity[:16]}.cflow")
        fresh = {"path": os.fsdecode(self.path), "target": target.name, "files": now}
        if fresh != known:
            with contextlib.suppress(OSError):  # a cache that cannot be written still serves
                self._write(fresh)
                self._remove(known.get("target"), target.name)
        return target

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.record.read_bytes())
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(known, dict) and isinstance(known.get("files"), dict)
        return known if is_ours else {}

    def _write(self, known: dict[str, Any]) -> None:
        part = self.record.with_name(f".{self.record.name}.{secrets.token_hex(4)}.part")
        part.write_text(json.dumps(known))
        os.replace(part, self.record)

    def _remove(self, old: object, new: str) -> None:
        """Remove a superseded conversion, unless another source still has that content."""
        if not isinstance(old, str) or old == new or Path(old).name != old:
            return
        others = self.record.parent.glob("*.source.json")
        if not any(_Source(self.path, other)._read().get("target") == old for other in others):
            self.record.with_name(old).unlink(missing_ok=True)


def _is_read(name: str) -> bool:
    """Whether conversion reads a file of this name in a folder."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in HUB_FILES)


def _known_or_hashed(file: Path, known: object, report: Report) -> list[Any]:
    figures = _figures(file)
    if isinstance(known, list) and known[:-1] == figures:
        return known
    with open(file, "rb") as opened:
        digest = _sha256(opened, lambda done: report(f"hashing {file.name}", done, figures[2]))
    if _figures(file) != figures:
        raise ModelError(f"{file} changed while it was read; try again when it is complete")
    return [*figures, digest]


def _figures(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _sha256(file: BinaryIO, progress: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(HASH_CHUNK):
        digest.update(chunk)
        done += len(chunk)
        progress(done)
    return digest.hexdigest()


@contextmanager
def _locked(target: Path, report: Report) -> Iterator[bool]:
    """Hold the lock for making `target`; yields whether another process has made it already."""
    if target.exists():
        yield True
        return
    with _lock(target, report):
        yield target.exists()


@contextmanager
def _lock(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock for making `target`; removes the leftovers of killed processes first."""
    path = target.with_suffix(".lock")
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(path, "w"))
            _take(lock, path, report)
        except OSError as error:
            raise ModelError(
                f"cannot use the model: cannot lock {path} ({error.strerror}); remove that file if "
                "another user left it, or set XDG_CACHE_HOME to a local folder that can be written"
            ) from error
        _clear(target)
        yield


def _take(lock: IO[str], path: Path, report: Report) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"waiting for another cflow process, which holds {path}", 0, 0)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _clear(target: Path) -> None:
    """Remove partial files left by processes that were killed while making `target`."""
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def has_made(name: str) -> bool:
    """Whether this catalogue model is in the cache, converted."""
    entry = catalogue.entries().get(name)
    return entry is not None and _catalogue_file(entry).exists()


def _catalogue_file(entry: Entry) -> Path:
    return cache_folder() / f"{entry.name}-{entry.sha256[:12]}-{CONVERTER}.cflow"


def _from_catalogue(entry: Entry, report: Report) -> Path:
    target = _catalogue_file(entry)
    with _locked(target, report) as is_done:
        if not is_done:
            with _fetched(entry, report) as checkpoint:
                _convert(checkpoint, target, report)
    return target


@contextmanager
def _fetched(entry: Entry, report: Report) -> Iterator[Path]:
    """The checkpoint of an entry, downloaded, and removed at the end of this context."""
    target = _catalogue_file(entry)
    _need_space(entry, target.parent)
    prefix, suffix = f".{target.name}.", ".part"  # for _clear
    with tempfile.TemporaryDirectory(suffix, prefix, target.parent) as folder:
        checkpoint = Path(folder) / f"{entry.name}.gguf"
        catalogue.fetch(entry, checkpoint, report)
        yield checkpoint


def _need_space(entry: Entry, folder: Path) -> None:
    """Raise ModelError unless the disk holds the checkpoint, its last part and the converted file,
    which may be a third larger."""
    need = entry.bytes * (1 + 4 / 3) + entry.bytes / len(entry.parts)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"{entry.name} needs {need / 1e9:.1f} GB of free space in {folder} while it is fetched, "
            f"but only {free / 1e9:.1f} GB are free; set XDG_CACHE_HOME to a folder on a larger disk"
        )


def _from_hub(reference: str, report: Report) -> Path:
    """Download org/repo[:QUANT][@revision], or find it in the hub's own cache: the GGUF file of that
    quantisation, its first part if it is split, or a folder with safetensors."""
    import huggingface_hub  # slow to import and seldom needed
    from huggingface_hub import errors

    known, _, revision = reference.partition("@")
    name, _, quant = known.partition(":")
    report(f"fetching {name}", 0, 0)
    try:
        names = _names_on_hub(name, revision or None)
        gguf = _choose(names, quant, f"hf:{name}")
        wanted = list(HUB_FILES) if gguf is None else [glob.escape(str(path)) for path in gguf]
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"hf:{name} is gated: accept its licence on its page, and set HF_TOKEN to a token of that "
            "account"
        ) from error
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot fetch hf:{reference} ({first}); check the network with `hf download {name}`, and "
            "HF_TOKEN if the repository is private"
        ) from error
    return Path(folder) if gguf is None else Path(folder) / gguf[0]


def _names_on_hub(name: str, revision: str | None) -> list[str]:
    """The files of a repository; without a network, those in the hub's cache."""
    import httpx2  # the hub's library lets its errors through
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision)
        return [sibling.rfilename for sibling in info.siblings or []]
    except errors.HfHubHTTPError:
        raise  # the hub's answer
    except (OSError, httpx2.HTTPError) as error:
        names = _cached_names(name, revision or "main")
        if not names:
            raise OSError(str(error)) from error
        return names


def _cached_names(name: str, revision: str) -> list[str]:
    """What the hub's cache holds of a repository, perhaps not all of it."""
    import huggingface_hub

    with contextlib.suppress(huggingface_hub.CacheNotFound):
        for repository in huggingface_hub.scan_cache_dir().repos:
            if (repository.repo_id, repository.repo_type) != (name, "model"):
                continue
            for cached in repository.revisions:
                if revision in (*cached.refs, cached.commit_hash):
                    root = cached.snapshot_path
                    return [str(file.file_path.relative_to(root)) for file in cached.files]
    return []


def _choose(names: list[str], quant: str, origin: str) -> list[PurePosixPath] | None:
    """The GGUF files of a quantisation; None for a repository with safetensors. A quantisation is a word
    in a file's path, such as Q4_K_M. Raises ModelError with what there is."""
    paths = [PurePosixPath(name) for name in names if name.endswith(".gguf")]
    models: dict[PurePosixPath, list[PurePosixPath]] = {}
    for path in sorted(path for path in paths if not path.name.startswith("mmproj")):
        models.setdefault(first_part(path), []).append(path)
    if not quant and (not models or ("config.json" in names and _has_safetensors(names))):
        return None
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [model for model in models if word.search(str(model)) or not quant]
    if len(found) == 1:
        return models[found[0]]
    there = ", ".join(str(model) for model in (found or models)) or "none"
    fault = f"{len(found)} GGUF models" if found else "no GGUF model"
    what = f" of {quant}" if quant else ""
    raise ModelError(
        f"{origin} has {fault}{what}; name a quantisation as in {origin}:Q4_K_M. There: {there}"
    )


def _has_safetensors(names: list[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names)
