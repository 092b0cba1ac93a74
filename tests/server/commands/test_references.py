"""Every command takes every kind of model reference."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cflow.engine.base.errors import CflowError
from cflow.engine.files import catalogue
from cflow.engine.files.catalogue import Entry
from cflow.engine.files.convert import convert
from cflow.server.commands.cli import app
from makefiles.gguf_file import tiny_llama
from makefiles.safetensors_file import tiny_folder
from oracles.model_file import ModelFile

runner = CliRunner()

# Command line by command, and the function that gets the model's file: as a path, or in its settings.
COMMANDS = {
    "serve": (["serve", "MODEL", "--port", "0"], "server.commands.serve.serve"),
    "run": (["run", "MODEL", "-p", "x"], "server.commands.conversation.run"),
    "chat": (["chat", "MODEL"], "server.commands.conversation.chat"),
    "bench": (["bench", "MODEL"], "engine.measure.bench.run"),
    "perplexity": (["perplexity", "MODEL", "text.txt"], "engine.measure.perplexity.run"),
    "plan": (["plan", "MODEL"], "engine.measure.plan.run"),
    "inspect": (["inspect", "MODEL"], "engine.files.inspect.run"),
}
KINDS = ("catalogue", "tinystories", ".cflow", ".vflow", ".gguf", "folder", "hf:")


@pytest.fixture
def references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A reference of each kind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(tiny_llama().build())
    folder = tiny_folder(tmp_path / "folder")
    ours = {suffix: tmp_path / f"ours{suffix}" for suffix in (".cflow", ".vflow")}
    for path in ours.values():
        convert(str(gguf), path)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    entry = Entry("tiny", "Tiny", "none", gguf.stat().st_size, digest, ["tiny-1"], "*")
    monkeypatch.setattr(catalogue, "entries", lambda: {"tiny": entry})
    monkeypatch.setattr(catalogue, "fetch", lambda _entry, out, _report: shutil.copy(gguf, out))
    files = [SimpleNamespace(rfilename=path.name) for path in folder.iterdir()]
    info = SimpleNamespace(siblings=files)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    return {
        "catalogue": "tiny",
        "tinystories": "tinystories",
        ".gguf": str(gguf),
        "folder": str(folder),
        "hf:": "hf:org/repo",
        **{suffix: str(path) for suffix, path in ours.items()},
    }


def spy(found: list[Path]) -> Callable[..., None]:
    """Keeps the path of the model and ends the command."""

    def run(first: Any, *_: Any, **__: Any) -> None:
        config = getattr(first, "engine", first)
        found.append(Path(getattr(config, "model", config)))
        raise CflowError("seen")

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_reference(
    command: str, kind: str, references: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, target = COMMANDS[command]
    found: list[Path] = []
    monkeypatch.setattr(f"cflow.{target}", spy(found))
    arguments = [references[kind] if word == "MODEL" else word for word in words]
    result = runner.invoke(app, arguments)
    assert str(result.exception) == "seen"
    assert ModelFile(found.pop()).metadata["name"]


@pytest.mark.parametrize("kind", ["catalogue", ".gguf", "folder", "hf:"])
def test_f02_convert_takes_a_reference(
    kind: str, references: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.cflow"
    result = runner.invoke(app, ["convert", references[kind], str(out), "--quant", "q8_0"])
    assert result.exit_code == 0, result.output
    assert ModelFile(out).metadata["quantisation"] == "q8_0"
    cache = tmp_path / "cache" / "cflow"
    assert not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir())


@pytest.mark.parametrize("kind", ["tinystories", ".cflow", ".vflow"])
def test_convert_says_what_a_file_of_ours_needs(
    kind: str, references: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.cflow"
    result = runner.invoke(app, ["convert", references[kind], str(out)])
    assert isinstance(result.exception, CflowError)
    assert "already in cflow's format; convert the GGUF file" in str(result.exception)
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "flags", "message"),
    [
        ("x.cflow", ["--quant", "q9"], "--quant q9 is not known"),
        ("x.cflow", ["--order", "none"], "--order none is not known"),
        ("x.cflow", ["--order", "stage"], r"must end in .vflow"),
    ],
)
def test_convert_checks_its_flags_before_a_download(
    out: str,
    flags: list[str],
    message: str,
    references: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "fetch", lambda *_: pytest.fail("downloaded"))
    result = runner.invoke(app, ["convert", references["catalogue"], out, *flags])
    assert isinstance(result.exception, CflowError)
    assert message in str(result.exception)
