"""Matrices as stripes: the bit layout of docs/format.md, in numpy.

Rows are Planes: one array for each field of an encoding, each with n_rows rows. `pack` lays them out;
`values` and `encode` (quantise.py) turn them into numbers and other encodings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

STRIPE_ROWS = (128, 96, 64, 32)
GROUP_ROWS = 16
BLOCK_COLS = 32
TILE_COLS = 256


@dataclass(frozen=True)
class Form:
    """How an encoding stores a group of 16 rows and 32 columns.

    bits: of a code. zero: code of padding values. block_fields: fields of each row in a block, in file
    order, after the codes. tile_fields: fields of each row per 256 columns.
    """

    bits: int
    zero: int = 0
    block_fields: tuple[str, ...] = ()
    tile_fields: tuple[str, ...] = ()
    block_field_bytes: int = 2

    @property
    def cols(self) -> int:
        """Columns are padded to a multiple of this number."""
        return TILE_COLS if self.tile_fields else BLOCK_COLS

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row, padding columns included."""
        n_units = -(-n_cols // self.cols)
        block = self.bits * BLOCK_COLS // 8 + self.block_field_bytes * len(self.block_fields)
        return n_units * (self.cols // BLOCK_COLS * block + 2 * len(self.tile_fields))


FORMS = {
    "f32": Form(32),
    "f16": Form(16),
    "bf16": Form(16),
    "q4_0": Form(4, 8, ("d",)),
    "q4_1": Form(4, 0, ("d", "m")),
    "q8_0": Form(8, 128, ("d",)),
    "q8_1": Form(8, 128, ("d", "m")),
    "q4_k": Form(4, 0, ("s", "t"), ("d", "dmin"), 1),
    "q6_k": Form(6, 32, ("s0", "s1"), ("d",), 1),
}


@dataclass(frozen=True)
class Planes:
    """Rows of a matrix in one encoding.

    codes: (n_rows, n_cols) f32, f16, uint16 holding bf16, or uint8 codes. fields: per name
    (n_rows, ceil(n_cols / 32)) for block fields: d, m f16, s, t uint8, s0, s1 int8; per 256 columns
    for tile fields d, dmin, f16.
    """

    encoding: str
    codes: Array
    fields: dict[str, Array]

    def is_finite(self) -> bool:
        """Whether every value and scale is finite."""
        if self.encoding == "bf16":
            return not bool(np.any((self.codes & 0x7F80) == 0x7F80))
        floats = [a for a in (self.codes, *self.fields.values()) if a.dtype.kind == "f"]
        return all(bool(np.isfinite(a).all()) for a in floats)


def stripe_rows(n_rows: int) -> int:
    """The largest of 128, 96, 64, 32 that divides n_rows rounded up to 32."""
    padded = -(-n_rows // 32) * 32
    return next(rows for rows in STRIPE_ROWS if padded % rows == 0)


def n_stripes(n_rows: int) -> int:
    return -(-n_rows // stripe_rows(n_rows))


def stripe_bytes(encoding: str, n_rows: int, n_cols: int) -> int:
    """Bytes of one stripe of an (n_rows, n_cols) matrix."""
    return stripe_rows(n_rows) * FORMS[encoding].row_bytes(n_cols)


def pack(planes: Planes, rows: int) -> Bytes:
    """The planes as stripes of `rows` rows: bytes (ceil(n_rows / rows), bytes of a stripe)."""
    form = FORMS[planes.encoding]
    n_rows, n_cols = planes.codes.shape
    n = -(-n_rows // rows)
    n_units = -(-n_cols // form.cols)
    codes = _padded(planes.codes, n * rows, n_units * form.cols, form.zero)
    n_blocks = codes.shape[1] // BLOCK_COLS
    grid = codes.reshape(n, rows // GROUP_ROWS, GROUP_ROWS, n_blocks, BLOCK_COLS)
    parts = _codes(grid, form.bits)
    for name in form.block_fields:
        parts.append(_field(planes.fields[name], n, rows, n_blocks))
    blocks = np.concatenate(parts, axis=2)
    if not form.tile_fields:
        return blocks.reshape(n, -1)
    heads = [_field(planes.fields[name], n, rows, n_units) for name in form.tile_fields]
    return np.concatenate([*heads, blocks.reshape(n, n_units, -1)], axis=2).reshape(n, -1)


def _padded(values: Array, n_rows: int, n_cols: int, fill: int) -> Array:
    if values.shape == (n_rows, n_cols):
        return np.ascontiguousarray(values)
    out = np.full((n_rows, n_cols), fill, values.dtype)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _flat(grid: Array) -> Bytes:
    """(n, blocks, ...) of any type to bytes (n, blocks, bytes)."""
    flat = np.ascontiguousarray(grid).reshape(*grid.shape[:2], -1)
    return flat.view(np.uint8)


def _field(values: Array, n: int, rows: int, n_units: int) -> Bytes:
    """One value per row and block (or tile): (n, n_units, rows), as bytes."""
    padded = _padded(values, n * rows, n_units, 0)
    return _flat(padded.reshape(n, rows, n_units).transpose(0, 2, 1))


def _codes(grid: Array, bits: int) -> list[Bytes]:
    """The code fields of grid (n, groups, 16 rows, blocks, 32 columns)."""
    if bits >= 16:
        return [_flat(grid.transpose(0, 3, 1, 4, 2))]
    quads = grid.view(np.uint32)  # 4 columns of a row: (n, groups, 16, blocks, 8)
    if bits == 8:
        return [_flat(quads.transpose(0, 3, 1, 4, 2))]
    low, high = quads[..., 0::2], quads[..., 1::2]
    nibbles = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
    parts = [_flat(nibbles.transpose(0, 3, 1, 4, 2))]
    if bits == 6:
        upper = (quads >> 4) & 0x03030303
        upper = upper.reshape(*upper.shape[:-1], 2, 4)
        pairs = sum(upper[..., k] << (2 * k) for k in range(4))
        parts.append(_flat(np.asarray(pairs, np.uint32).transpose(0, 3, 1, 4, 2)))
    return parts
