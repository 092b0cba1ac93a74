"""Unpacks matrices from stripes by index arithmetic, as docs/format.md describes them."""

from collections.abc import Callable
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

ENCODINGS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q8_1", "q4_k", "q6_k")

# Bytes of a group's fields in a block, and at the start of each tile of 256 columns.
BLOCK_FIELDS = {
    "f32": (2048,),
    "f16": (1024,),
    "bf16": (1024,),
    "q4_0": (256, 32),
    "q4_1": (256, 32, 32),
    "q8_0": (512, 32),
    "q8_1": (512, 32, 32),
    "q4_k": (256, 16, 16),
    "q6_k": (256, 128, 16, 16),
}
TILE_FIELDS = {"q4_k": (32, 32), "q6_k": (32,)}

Array = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]


class Stripe:
    """Index arrays: where the parts of every element (row, column) of a stripe lie.

    They are the same for all stripes of a matrix, so they are made once."""

    def __init__(self, encoding: str, stripe_rows: int, n_cols: int) -> None:
        self.groups, self.n_cols = stripe_rows // 16, n_cols
        self.block_fields = BLOCK_FIELDS[encoding]
        self.tile_fields = TILE_FIELDS.get(encoding, ())
        rows, columns = np.arange(stripe_rows)[:, None], np.arange(n_cols)[None, :]
        self.group, self.row = rows // 16, rows % 16
        self.block, self.column = columns // 32, columns % 32

    @cache  # noqa: B019 - lives as long as the matrix is read
    def block_field(self, field: int) -> Index:
        """Byte of this field of the element's group in the element's block."""
        before = self.groups * sum(self.block_fields[:field])
        start = self.block * self.groups * sum(self.block_fields)
        if self.tile_fields:
            start = start + (self.block // 8 + 1) * self.groups * sum(self.tile_fields)
        return np.asarray(start + before + self.group * self.block_fields[field])

    @cache  # noqa: B019
    def tile_field(self, field: int) -> Index:
        """Byte of this field of the element's group at the start of the element's tile."""
        tile_bytes = self.groups * (sum(self.tile_fields) + 8 * sum(self.block_fields))
        before = self.groups * sum(self.tile_fields[:field])
        return np.asarray(
            self.block // 8 * tile_bytes + before + self.group * self.tile_fields[field]
        )

    def f16(self, data: Bytes, start: Index) -> Array:
        """A value that the 32 columns of a block share."""
        values = halves(data, start[:, ::32] + 2 * self.row)
        return np.asarray(np.repeat(values, 32, axis=1)[:, : self.n_cols])

    @cached_property
    def nibble_at(self) -> Index:
        c = self.column
        return np.asarray(self.block_field(0) + 64 * (c // 8) + 4 * self.row + c % 4)

    def nibbles(self, data: Bytes) -> Array:
        shift = (4 * (self.column % 8 // 4)).astype(np.uint8)
        return np.asarray(data[self.nibble_at] >> shift & 15, np.float64)

    @cached_property
    def octet_at(self) -> Index:
        c = self.column
        return np.asarray(self.block_field(0) + 64 * (c // 4) + 4 * self.row + c % 4)

    def octets(self, data: Bytes) -> Array:
        return np.asarray(data[self.octet_at], np.float64)

    @cached_property
    def upper_pair_at(self) -> Index:
        c = self.column
        return np.asarray(self.block_field(1) + 64 * (c // 16) + 4 * self.row + c % 4)

    def upper_pairs(self, data: Bytes) -> Array:
        shift = (2 * (self.column % 16 // 4)).astype(np.uint8)
        return np.asarray(data[self.upper_pair_at] >> shift & 3, np.float64)


def halves(data: Bytes, at: Index) -> Array:
    both = data[at].astype(np.uint16) | data[at + 1].astype(np.uint16) << 8
    return both.view(np.float16).astype(np.float64)


def float_values(s: Stripe, data: Bytes, width: int) -> NDArray[np.uint32]:
    at = s.block_field(0) + width * (16 * s.column + s.row)
    parts = (data[at + i].astype(np.uint32) << 8 * i for i in range(width))
    return np.asarray(sum(parts), np.uint32)


def q4_k_values(s: Stripe, data: Bytes) -> Array:
    d, d_min = s.f16(data, s.tile_field(0)), s.f16(data, s.tile_field(1))
    scale, minimum = data[s.block_field(1) + s.row], data[s.block_field(2) + s.row]
    return np.asarray(d * scale * s.nibbles(data) - d_min * minimum)


def q6_k_values(s: Stripe, data: Bytes) -> Array:
    code = s.nibbles(data) + 16 * s.upper_pairs(data) - 32
    first, second = (data[s.block_field(f) + s.row].view(np.int8) for f in (2, 3))
    scale = np.where(s.column < 16, first, second)
    return np.asarray(s.f16(data, s.tile_field(0)) * scale * code)


VALUES: dict[str, Callable[[Stripe, Bytes], Array]] = {
    "f32": lambda s, b: float_values(s, b, 4).view(np.float32).astype(np.float64),
    "f16": lambda s, b: halves(b, s.block_field(0) + 2 * (16 * s.column + s.row)),
    "bf16": lambda s, b: (float_values(s, b, 2) << 16).view(np.float32).astype(np.float64),
    "q4_0": lambda s, b: s.f16(b, s.block_field(1)) * (s.nibbles(b) - 8),
    "q4_1": lambda s, b: s.f16(b, s.block_field(1)) * s.nibbles(b) + s.f16(b, s.block_field(2)),
    "q8_0": lambda s, b: s.f16(b, s.block_field(1)) * (s.octets(b) - 128),
    "q8_1": lambda s, b: (
        s.f16(b, s.block_field(1)) * (s.octets(b) - 128) + s.f16(b, s.block_field(2))
    ),
    "q4_k": q4_k_values,
    "q6_k": q6_k_values,
}


def unpack(
    data: Bytes, encoding: str, shape: tuple[int, int], stripe_rows: int, stride: int
) -> Array:
    """The f64 values of a matrix of `shape`; data starts with its first stripe."""
    n_rows, n_cols = shape
    stripe = Stripe(encoding, stripe_rows, n_cols)
    n_stripes = -(-n_rows // stripe_rows)
    parts = [VALUES[encoding](stripe, np.asarray(data[i * stride :])) for i in range(n_stripes)]
    return np.concatenate(parts)[:n_rows]
