"""How a model for embeddings makes one vector of its rows, if a source says that it is one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cflow.engine.base.errors import ModelError
from cflow.engine.base.metadata import POOLINGS
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.formats.safetensors import SafetensorsFolder, parse_json
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.hf_model import BARE

MODULES = "modules.json"  # of sentence-transformers: the steps from tokens to a vector
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODE = "pooling_mode_"
_GGUF_KINDS = {1: "mean", 3: "last"}  # llama.cpp's enum llama_pooling_type; 0: none


@dataclass(frozen=True)
class Pooling:
    """kind: one of POOLINGS; None: the model is not for embeddings. normalise: to length 1."""

    kind: str | None = None
    normalise: bool = False

    def metadata(self) -> dict[str, Any]:
        assert self.kind is None or self.kind in POOLINGS
        return {"pooling": self.kind, "normalise": self.normalise}


def of_folder(folder: SafetensorsFolder) -> Pooling:
    """By the modules of sentence-transformers. ModelError for a module or mode that is not
    supported."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        if BARE in folder.tensors:
            raise ModelError(
                f"{folder.path}: the model has no head, and no {MODULES} says how to pool its rows"
            )
        return Pooling()
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{folder.path / MODULES}: the modules are {', '.join(kinds)[:80]}; "
            "Transformer, Pooling and, at the end, Normalize are supported"
        )
    return Pooling(_kind(folder, modules[1][1]), kinds[-1] == "Normalize")


def of_gguf(file: GgufFile, architecture: str) -> Pooling:
    """GGUF does not say whether vectors have length 1; llama.cpp normalises them, and so do we."""
    keys = Fields(file.metadata, str(file.path), f"{architecture}.")
    kind = keys.count("pooling_type", 0)
    if kind == 0:
        return Pooling()
    if kind not in _GGUF_KINDS:
        raise keys.error("pooling_type", f"is {kind}; 1 (mean) and 3 (last token) are supported")
    return Pooling(_GGUF_KINDS[kind], normalise=True)


def _modules(folder: SafetensorsFolder) -> list[tuple[str, str]]:
    """Class, without its package, and folder of each module."""
    data = folder.text(MODULES)
    if data is None:
        return []
    origin = folder.path / MODULES
    try:
        modules = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{origin} is not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ModelError(f"{origin} is not a list of objects")
    fields = [Fields(module, str(origin)) for module in modules]
    return [(module.text("type").rpartition(".")[2], module.text("path", "")) for module in fields]


def _kind(folder: SafetensorsFolder, place: str) -> str:
    origin = str(folder.path / place / "config.json")
    data = folder.text("config.json", place) if place else None
    if data is None:
        raise ModelError(f"{origin} is missing; {MODULES} names it")
    found = parse_json(data, origin)
    config = Fields(found, origin)
    chosen = [key for key in found if key.startswith(_MODE) and config.flag(key, False)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        what = ", ".join(chosen)[:80] or "no pooling mode"
        raise ModelError(f"{origin} chooses {what}; one of {', '.join(_MODES)} is supported")
    return _MODES[chosen[0]]
