"""The metadata that running a model depends on, checked. docs/format.md lists the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cflow.engine.base.errors import ModelError

# Generation defaults that a file may have, and the values that the sampler accepts.
GENERATION_RANGES = {
    "temperature": (0, 100),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


# How a model for embeddings makes one vector of the rows of a text.
POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True)
class Metadata:
    name: str
    bos_id: int | None
    add_bos: bool
    end_id: int | None  # behind a text to embed
    eos_ids: tuple[int, ...]
    chat_template: str | None
    tool_template: str | None  # for requests with tools; None: chat_template
    pooling: str | None  # one of POOLINGS; None: the model is not for embeddings
    normalise: bool  # embeddings have length 1


def parse_metadata(metadata: Mapping[str, Any], n_tokens: int) -> Metadata:
    """ModelError names the key and the value. n_tokens: ids below it exist."""
    eos_ids = metadata.get("eos_ids", [])
    if not isinstance(eos_ids, list):
        raise _wrong("eos_ids", eos_ids, "a list of token ids")
    for token in eos_ids:
        _check_token("eos_ids", token, n_tokens)
    _check_generation(_get(metadata, "generation", dict, {}))
    bos_id, end_id = metadata.get("bos_id"), metadata.get("end_id")
    for name, token in (("bos_id", bos_id), ("end_id", end_id)):
        if token is not None:
            _check_token(name, token, n_tokens)
    pooling = metadata.get("pooling")
    if pooling is not None and pooling not in POOLINGS:
        raise _wrong("pooling", pooling, f"one of {', '.join(POOLINGS)}, or null")
    return Metadata(
        name=_get(metadata, "name", str, "unnamed"),
        bos_id=bos_id,
        add_bos=_get(metadata, "add_bos", bool, False) and bos_id is not None,
        end_id=end_id,
        eos_ids=tuple(eos_ids),
        chat_template=_get(metadata, "chat_template", str, None),
        tool_template=_get(metadata, "tool_template", str, None),
        pooling=pooling,
        normalise=_get(metadata, "normalise", bool, False),
    )


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _wrong(key, value, kind.__name__)
    return value


def _check_token(key: str, token: object, n_tokens: int) -> None:
    if type(token) is not int or not 0 <= token < n_tokens:
        raise _wrong(key, token, f"a token id below {n_tokens}")


def _check_generation(generation: Mapping[str, Any]) -> None:
    for name, (low, high) in GENERATION_RANGES.items():
        value = generation.get(name, low)
        if type(value) not in (int, float) or not low <= value <= high:
            raise _wrong(f"generation {name}", value, f"a number from {low:g} to {high:g}")


def _wrong(key: str, value: object, wanted: str) -> ModelError:
    return ModelError(f"metadata {key} is {ascii(value)[:80]}; it must be {wanted}")
