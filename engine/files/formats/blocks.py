"""GGML's quantised blocks as Planes. docs/models.md says which conversions are exact.

Types of codebooks are read through gguf-py: their numbers divided by their scales are small integers,
the codes of an encoding of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from cflow.engine.files.formats.quantise import encode
from cflow.engine.files.formats.tiles import Array, Bytes, Floats, Planes


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


def _q5_1(raw: Bytes) -> Planes:
    """Q5_1 as q8_1: codes 0..31, plus 128."""
    high = np.unpackbits(raw[..., 4:8], axis=-1, bitorder="little")
    codes = (_nibbles(raw[..., 8:]) | (high << 4)) + np.uint8(128)
    return Planes("q8_1", _rows(codes), {"d": _half(raw[..., :2]), "m": _half(raw[..., 2:4])})


def _numbers(kind: str, raw: Bytes) -> Floats:
    """The numbers (n_rows, columns) of blocks, by gguf-py."""
    with np.errstate(over="ignore", invalid="ignore"):  # not finite: rejected later
        return np.asarray(dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind]))


def _codes(numbers: Floats, scales: Array) -> Array:
    """numbers / scales, which are integers; 0 where a scale is 0. scales: for equal runs of columns."""
    spread = scales.repeat(numbers.shape[1] // scales.shape[1], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(spread == 0, 0, numbers / spread)
        return np.nan_to_num(np.rint(codes)).astype(np.int16)


def _by_block(
    kind: str, encoding: str, zero: int, scales_of: Callable[[Bytes], Array]
) -> Callable[[Bytes], Planes]:
    """A type with at most one scale for 32 columns. scales_of: blocks to the scales
    (n_rows, n_blocks, n), in f32. zero: the code of 0."""

    def planes(raw: Bytes) -> Planes:
        numbers, scales = _numbers(kind, raw), _rows(scales_of(raw))
        codes = _codes(numbers, scales) + zero
        with np.errstate(over="ignore"):
            d = scales.astype(np.float16).repeat(numbers.shape[1] // 32 // scales.shape[1], axis=1)
        return Planes(encoding, codes.astype(np.uint8), {"d": d})

    return planes


def _by_tile(
    kind: str, parts_of: Callable[[Bytes], tuple[Array, Array]]
) -> Callable[[Bytes], Planes]:
    """A type as q6_k. parts_of: blocks to d (n_rows, n_blocks), in f32, and to a small factor of it
    for each 16 columns, (n_rows, n_blocks, 16)."""

    def planes(raw: Bytes) -> Planes:
        d, factors = parts_of(raw)
        with np.errstate(invalid="ignore"):
            codes = _codes(_numbers(kind, raw), _rows(d[..., None] * factors)) + 32
        scales = _rows(factors.astype(np.int8))
        fields = {"d": d.astype(np.float16), "s0": scales[:, 0::2], "s1": scales[:, 1::2]}
        return Planes("q6_k", codes.astype(np.uint8), fields)

    return planes


def _rounded(kind: str) -> Callable[[Bytes], Planes]:
    """A type that no encoding holds, as q8_0: an error of at most 1/254 of a block's largest number."""

    def planes(raw: Bytes) -> Planes:
        return encode(Planes("f32", _numbers(kind, raw), {}), "q8_0")

    return planes


def _first_half(raw: Bytes) -> Array:
    return _half(raw[..., :2]).astype(np.float32)[..., None]


def _last_half(raw: Bytes) -> Array:
    return _half(raw[..., -2:]).astype(np.float32)[..., None]


def _mxfp4_scales(raw: Bytes) -> Array:
    """2^(e - 128). Below 2^-24, f16 and with it the block becomes 0."""
    return np.ldexp(np.float32(1), raw[..., :1].astype(np.int32) - 128)


def _iq4_xs_scales(raw: Bytes) -> Array:
    low = _by_pairs(raw[..., 4:8], (0, 4), 15)
    high = _by_pairs(raw[..., 2:4].view(np.uint16), range(0, 16, 2), 3)
    return np.asarray(_first_half(raw) * ((low | high << 4).astype(np.float32) - 32))


def _iq2_xxs_scales(raw: Bytes) -> Array:
    words = np.ascontiguousarray(raw[..., 2:]).view(np.uint32)[..., 1::2]
    return _first_half(raw) * (2 * (words >> 28) + 1).astype(np.float32) / 8


def _iq3_xxs_scales(raw: Bytes) -> Array:
    words = np.ascontiguousarray(raw[..., 66:]).view(np.uint32)
    return _first_half(raw) * (2 * (words >> 28) + 1).astype(np.float32) / 4


def _by_pairs(packed: Array, shifts: Iterable[int], mask: int) -> Array:
    """Small numbers packed into the elements of the last axis, those of an element together."""
    parts = np.ascontiguousarray(packed)[..., None] >> np.array([*shifts], packed.dtype)
    return np.asarray((parts & mask).reshape(*packed.shape[:-1], -1).astype(np.int32))


def _q3_k_parts(raw: Bytes) -> tuple[Array, Array]:
    packed = raw[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1).astype(np.int32)
    high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return _last_half(raw)[..., 0], (low | high.astype(np.int32) << 4) - 32


def _iq3_s_parts(raw: Bytes) -> tuple[Array, Array]:
    scales = _by_pairs(raw[..., 106:], (0, 4), 15)
    return _first_half(raw)[..., 0], (2 * scales + 1).repeat(2, axis=-1)


def _iq1_s_parts(raw: Bytes) -> tuple[Array, Array]:
    """Codes are 8 t or 8 t +- 1 for ternary t."""
    words = np.ascontiguousarray(raw[..., 34:]).view(np.uint16).astype(np.int32)
    return _first_half(raw)[..., 0] / 8, (2 * (words >> 12 & 7) + 1).repeat(2, axis=-1)


def _iq1_m_parts(raw: Bytes) -> tuple[Array, Array]:
    """d is spread over the top nibbles of four words."""
    words = np.ascontiguousarray(raw[..., 48:]).view(np.uint16)
    d = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=-1)
    return d.view(np.float16).astype(np.float32) / 8, 2 * _by_pairs(words, (0, 3, 6, 9), 7) + 1


BLOCK_TYPES = {
    "F32": BlockType(1, 4, "f32", _plain("f32", np.float32)),
    "F16": BlockType(1, 2, "f16", _plain("f16", np.float16)),
    "BF16": BlockType(1, 2, "bf16", _plain("bf16", np.uint16)),
    "Q4_0": BlockType(32, 18, "q4_0", _q4_0),
    "Q4_1": BlockType(32, 20, "q4_1", _q4_1),
    "Q5_0": BlockType(32, 22, "q8_0", _q5_0),
    "Q5_1": BlockType(32, 24, "q8_1", _q5_1),
    "Q8_0": BlockType(32, 34, "q8_0", _q8_0),
    "Q4_K": BlockType(256, 144, "q4_k", _q4_k),
    "Q5_K": BlockType(256, 176, "q8_1", _q5_k),
    "Q6_K": BlockType(256, 210, "q6_k", _q6_k),
    "Q2_K": BlockType(256, 84, "q8_0", _rounded("Q2_K")),
    "Q3_K": BlockType(256, 110, "q6_k", _by_tile("Q3_K", _q3_k_parts)),
    "IQ1_S": BlockType(256, 50, "q6_k", _by_tile("IQ1_S", _iq1_s_parts)),
    "IQ1_M": BlockType(256, 56, "q6_k", _by_tile("IQ1_M", _iq1_m_parts)),
    "IQ2_XXS": BlockType(256, 66, "q8_0", _by_block("IQ2_XXS", "q8_0", 128, _iq2_xxs_scales)),
    "IQ2_XS": BlockType(256, 74, "q8_0", _rounded("IQ2_XS")),
    "IQ2_S": BlockType(256, 82, "q8_0", _rounded("IQ2_S")),
    "IQ3_XXS": BlockType(256, 98, "q8_0", _by_block("IQ3_XXS", "q8_0", 128, _iq3_xxs_scales)),
    "IQ3_S": BlockType(256, 110, "q6_k", _by_tile("IQ3_S", _iq3_s_parts)),
    "IQ4_NL": BlockType(32, 18, "q8_0", _by_block("IQ4_NL", "q8_0", 128, _first_half)),
    "IQ4_XS": BlockType(256, 136, "q8_0", _by_block("IQ4_XS", "q8_0", 128, _iq4_xs_scales)),
    "TQ1_0": BlockType(256, 54, "q4_0", _by_block("TQ1_0", "q4_0", 8, _last_half)),
    "TQ2_0": BlockType(256, 66, "q4_0", _by_block("TQ2_0", "q4_0", 8, _last_half)),
    "MXFP4": BlockType(32, 17, "q8_0", _by_block("MXFP4", "q8_0", 128, _mxfp4_scales)),
}
