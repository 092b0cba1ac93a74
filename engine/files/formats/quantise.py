"""Planes to numbers and back. q4_0, q4_1 and q8_0 round as GGML's reference quantisers do."""

from __future__ import annotations

import numpy as np

from cflow.engine.files.formats.tiles import BLOCK_COLS, TILE_COLS, Array, Floats, Planes


def values(planes: Planes) -> Floats:
    """The numbers (n_rows, n_cols) of planes, by the formulas of docs/format.md."""
    codes = planes.codes
    if planes.encoding in ("f32", "f16"):
        return codes.astype(np.float32)
    if planes.encoding == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    n_cols = codes.shape[1]
    numbers = codes.astype(np.float32)

    def spread(name: str, cols: int) -> Floats:
        return planes.fields[name].astype(np.float32).repeat(cols, axis=1)[:, :n_cols]

    if planes.encoding == "q4_k":
        d, dmin = spread("d", TILE_COLS), spread("dmin", TILE_COLS)
        return d * spread("s", BLOCK_COLS) * numbers - dmin * spread("t", BLOCK_COLS)
    if planes.encoding == "q6_k":
        halves = np.stack([planes.fields["s0"], planes.fields["s1"]], axis=2)
        scales = halves.reshape(len(codes), -1).astype(np.float32).repeat(16, axis=1)
        return spread("d", TILE_COLS) * scales[:, :n_cols] * (numbers - 32)
    bias = {"q4_0": 8, "q4_1": 0, "q8_0": 128, "q8_1": 128}[planes.encoding]
    out = spread("d", BLOCK_COLS) * (numbers - bias)
    return out + spread("m", BLOCK_COLS) if "m" in planes.fields else out


def encode(planes: Planes, encoding: str) -> Planes:
    """Planes in another encoding, one of target.QUANTS but "keep"; unchanged if they are in it already. Values that
    are too large become infinite."""
    if planes.encoding == encoding:
        return planes
    numbers = values(planes)
    if encoding == "f32":
        return Planes("f32", numbers, {})
    if encoding == "bf16":
        return Planes("bf16", _bf16(numbers), {})
    with np.errstate(over="ignore", invalid="ignore"):
        if encoding == "f16":
            return Planes("f16", numbers.astype(np.float16), {})
        return _quantised(numbers, encoding)


def _quantised(numbers: Floats, encoding: str) -> Planes:
    n_rows, n_cols = numbers.shape
    n_blocks = -(-n_cols // BLOCK_COLS)
    numbers = np.pad(numbers, ((0, 0), (0, n_blocks * BLOCK_COLS - n_cols)))
    quantiser = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0}[encoding]
    codes, fields = quantiser(numbers.reshape(n_rows, n_blocks, BLOCK_COLS))
    halves = {name: field.astype(np.float16) for name, field in fields.items()}
    return Planes(encoding, codes.reshape(n_rows, -1)[:, :n_cols], halves)


def _bf16(numbers: Floats) -> Array:
    """Round to nearest, ties to even. Values must not be NaN."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, or 0 if that is not finite."""
    usable = np.abs(scale) >= np.finfo(np.float32).tiny
    return (usable / np.where(usable, scale, np.float32(1)))[..., None].astype(np.float32)


def _q4_0(blocks: Floats) -> tuple[Array, dict[str, Floats]]:
    """q4_0: the value of the largest magnitude becomes code 0."""
    index = np.abs(blocks).argmax(axis=2, keepdims=True)
    scale = np.take_along_axis(blocks, index, axis=2)[..., 0] / np.float32(-8)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).clip(0, 15)
    return codes.astype(np.uint8), {"d": scale}


def _q4_1(blocks: Floats) -> tuple[Array, dict[str, Floats]]:
    low = blocks.min(axis=2)
    scale = (blocks.max(axis=2) - low) / np.float32(15)
    codes = np.trunc((blocks - low[..., None]) * _inverse(scale) + np.float32(0.5)).clip(0, 15)
    return codes.astype(np.uint8), {"d": scale, "m": low}


def _q8_0(blocks: Floats) -> tuple[Array, dict[str, Floats]]:
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    scaled = blocks * _inverse(scale)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return (rounded + 128).astype(np.uint8), {"d": scale}
