"""GGML's quantised blocks as Planes. Every conversion is exact except Q5_K; see _q5_k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cflow.engine.files.formats.tiles import Array, Bytes, Planes


@dataclass(frozen=True)
class BlockType:
    """A GGML type: n_values in a block of n_bytes, and the encoding that holds it."""

    n_values: int
    n_bytes: int
    encoding: str
    planes: Callable[[Bytes], Planes]


def _half(raw: Bytes) -> Array:
    """(..., 2 bytes) to f16 (...)."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _rows(blocks: Array) -> Array:
    """(n_rows, n_blocks, values) to (n_rows, columns)."""
    return blocks.reshape(blocks.shape[0], -1)


def _nibbles(raw: Bytes) -> Bytes:
    """The low nibbles of the last axis, then its high nibbles."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _plain(encoding: str, dtype: type[np.generic]) -> Callable[[Bytes], Planes]:
    def planes(raw: Bytes) -> Planes:
        return Planes(encoding, _rows(np.ascontiguousarray(raw).view(dtype)), {})

    return planes


def _q4_0(raw: Bytes) -> Planes:
    return Planes("q4_0", _rows(_nibbles(raw[..., 2:])), {"d": _half(raw[..., :2])})


def _q4_1(raw: Bytes) -> Planes:
    fields = {"d": _half(raw[..., :2]), "m": _half(raw[..., 2:4])}
    return Planes("q4_1", _rows(_nibbles(raw[..., 4:])), fields)


def _q5_0(raw: Bytes) -> Planes:
    """Q5_0 as q8_0: codes 0..31, less 16."""
    high = np.unpackbits(raw[..., 2:6], axis=-1, bitorder="little")
    codes = (_nibbles(raw[..., 6:]) | (high << 4)) + np.uint8(128 - 16)
    return Planes("q8_0", _rows(codes), {"d": _half(raw[..., :2])})


def _q8_0(raw: Bytes) -> Planes:
    return Planes("q8_0", _rows(raw[..., 2:] ^ 0x80), {"d": _half(raw[..., :2])})


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and minimums from the 12 bytes of a Q4_K or Q5_K block."""
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scales, minimums


def _by_64(raw: Bytes) -> Bytes:
    """Codes of 128 bytes: each 32 bytes hold 32 columns in low nibbles, the next 32 in high ones."""
    return _nibbles(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], 256)


def _q4_k(raw: Bytes) -> Planes:
    scales, minimums = _k_scales(raw[..., 4:16])
    fields = {
        "d": _half(raw[..., :2]),
        "dmin": _half(raw[..., 2:4]),
        "s": _rows(scales),
        "t": _rows(minimums),
    }
    return Planes("q4_k", _rows(_by_64(raw[..., 16:])), fields)


def _q5_k(raw: Bytes) -> Planes:
    """Q5_K as q8_1, which rounds d * scale and dmin * minimum to f16: a relative error of 2^-11."""
    scales, minimums = _k_scales(raw[..., 4:16])
    d, dmin = (_half(raw[..., i : i + 2]).astype(np.float32)[..., None] for i in (0, 2))
    with np.errstate(over="ignore", invalid="ignore"):  # infinite results are rejected later
        fields = {
            "d": _rows((d * scales).astype(np.float16)),
            "m": _rows((-dmin * minimums).astype(np.float16)),
        }
    bits = (raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _by_64(raw[..., 48:]) | (bits.reshape(*raw.shape[:-1], 256) << 4)
    return Planes("q8_1", _rows(codes + np.uint8(128)), fields)


def _q6_k(raw: Bytes) -> Planes:
    """Q6_K: per 128 columns 64 bytes of low nibbles, then 32 bytes of high bit pairs."""
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 64)
    pairs = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = _nibbles(low) | (high.reshape(*raw.shape[:-1], 2, 128) << 4)
    scales = _rows(raw[..., 192:208].view(np.int8))
    fields = {"d": _half(raw[..., 208:210]), "s0": scales[:, 0::2], "s1": scales[:, 1::2]}
    return Planes("q6_k", _rows(codes), fields)


BLOCK_TYPES = {
    "F32": BlockType(1, 4, "f32", _plain("f32", np.float32)),
    "F16": BlockType(1, 2, "f16", _plain("f16", np.float16)),
    "BF16": BlockType(1, 2, "bf16", _plain("bf16", np.uint16)),
    "Q4_0": BlockType(32, 18, "q4_0", _q4_0),
    "Q4_1": BlockType(32, 20, "q4_1", _q4_1),
    "Q5_0": BlockType(32, 22, "q8_0", _q5_0),
    "Q8_0": BlockType(32, 34, "q8_0", _q8_0),
    "Q4_K": BlockType(256, 144, "q4_k", _q4_k),
    "Q5_K": BlockType(256, 176, "q8_1", _q5_k),
    "Q6_K": BlockType(256, 210, "q6_k", _q6_k),
}
