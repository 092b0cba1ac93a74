"""`tokenizer.model`: SentencePiece's own file, a protocol buffer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cflow.engine.base.errors import ModelError
from cflow.engine.files.models.vocabulary import Kind

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type


@dataclass(frozen=True)
class SentencePieceFile:
    """texts, scores and kinds are by id. is_tidy: surplus spaces are removed. has_prefix: a space
    goes in front of the text."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    is_unigram: bool
    charsmap: bytes
    has_prefix: bool
    is_tidy: bool


def read(data: bytes, origin: str) -> SentencePieceFile:
    """Raises ModelError if the file is damaged or asks for what is not supported."""
    try:
        return _read(data, origin)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ModelError(f"{origin} is damaged: {error}") from error


def _read(data: bytes, origin: str) -> SentencePieceFile:
    """The fields that matter, by their numbers in sentencepiece_model.proto."""
    parts = list(_fields(data))
    pieces = [dict(_fields(value)) for number, value in parts if number == 1]
    trainer, normalizer = (
        dict(field for number, value in parts if number == wanted for field in _fields(value))
        for wanted in (2, 3)
    )
    kinds = [piece.get(3, int(Kind.NORMAL)) for piece in pieces]
    if not pieces or not set(kinds) <= set(Kind):
        raise ModelError(f"{origin}: no pieces, or pieces of an unknown type")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise ModelError(f"{origin}: model_type is {kind}; 1 (Unigram) and 2 (BPE) are supported")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise ModelError(f"{origin}: spaces behind words, or unescaped ones, are not supported")
    return SentencePieceFile(
        texts=[piece[1].decode() if 1 in piece else "" for piece in pieces],
        scores=[struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0 for piece in pieces],
        kinds=kinds,
        is_unigram=kind == UNIGRAM,
        charsmap=normalizer.get(2, b""),
        has_prefix=bool(normalizer.get(3, 1)),
        is_tidy=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        n_bytes = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            n_bytes, at = _varint(data, at)
        elif not n_bytes:
            raise IndexError(f"wire type {wire} at byte {at}")
        if n_bytes > len(data) - at:
            raise IndexError(f"a field of {n_bytes} bytes at byte {at}")
        yield key >> 3, data[at : at + n_bytes]
        at += n_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError(f"a number of more than ten bytes at byte {at}")
