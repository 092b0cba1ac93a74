"""Models for embeddings: what sentence-transformers' files and GGUF keys say reaches the header."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine import native
from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import convert
from makefiles.gguf_file import tiny_llama
from makefiles.safetensors_file import tiny_folder, tiny_tensors

PACKAGE = "sentence_transformers.models."


def embedding_folder(path: Path, *modules: str, place: str = "1_Pooling", **modes: bool) -> Path:
    """A bare Qwen3Model, as Qwen3-Embedding is stored: names without "model.", no head."""
    names = {name.removeprefix("model."): value for name, value in tiny_tensors().items()}
    names |= {f"layers.0.self_attn.{x}_norm.weight": np.ones(16, np.float32) for x in "qk"}
    tiny_folder(path, names, architectures=["Qwen3Model"], tie_word_embeddings=False)
    entries = [{"type": PACKAGE + m, "path": place if m == "Pooling" else ""} for m in modules]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return path


def metadata(source: Path, out: Path) -> dict[str, Any]:
    convert(str(source), out)
    return native.Model(str(out), header_only=True).metadata


@pytest.mark.parametrize(("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean")])
@pytest.mark.parametrize("end", [(), ("Normalize",)])
def test_a_folder_says_how_rows_become_a_vector(
    mode: str, kind: str, end: tuple[str, ...], tmp_path: Path
) -> None:
    modes: dict[str, Any] = {"pooling_mode_cls_token": False, f"pooling_mode_{mode}": True}
    folder = embedding_folder(tmp_path / "m", "Transformer", "Pooling", *end, **modes)
    found = metadata(folder, tmp_path / "m.cflow")
    assert (found["pooling"], found["normalise"]) == (kind, bool(end))


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "cls": (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "cls_token"),
    "no head, no pooling": (("Transformer",), {}, "has no head"),
    "none": (("Transformer", "Pooling"), {}, "no pooling mode"),
    "dense": (("Transformer", "Pooling", "Dense"), {}, "Dense"),
    "outside": (("Transformer", "Pooling"), {"place": "../m/1_Pooling"}, "not a plain file name"),
    "absent": (("Transformer", "Pooling"), {"place": "2_Pooling"}, "is missing"),
    "a number": (("Transformer", "Pooling"), {"pooling_mode_lasttoken": 1}, "true or false"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_pooling_we_cannot_do_is_refused(fault: str, tmp_path: Path) -> None:
    modules, settings, message = REFUSED[fault]
    folder = embedding_folder(tmp_path / "m", *modules, **settings)
    with pytest.raises(ModelError, match=message):
        convert(str(folder), tmp_path / "m.cflow")


@pytest.mark.parametrize(("kind", "pooling"), [(0, None), (1, "mean"), (3, "last")])
def test_a_gguf_file_says_it_too(kind: int, pooling: str | None, tmp_path: Path) -> None:
    builder = tiny_llama()
    builder.keys.append(("llama.pooling_type", "I", kind))
    (tmp_path / "m.gguf").write_bytes(builder.build())
    found = metadata(tmp_path / "m.gguf", tmp_path / "m.cflow")
    assert (found["pooling"], found["normalise"]) == (pooling, pooling is not None)


def test_cls_pooling_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    builder = tiny_llama()
    builder.keys.append(("llama.pooling_type", "I", 2))
    (tmp_path / "m.gguf").write_bytes(builder.build())
    with pytest.raises(ModelError, match="pooling_type is 2"):
        convert(str(tmp_path / "m.gguf"), tmp_path / "m.cflow")
