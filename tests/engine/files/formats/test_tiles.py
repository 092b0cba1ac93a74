"""pack against the index arithmetic of oracles.tiles, for every encoding and awkward shapes."""

import numpy as np
import pytest

from cflow.engine.files.formats.quantise import values
from cflow.engine.files.formats.tiles import (
    FORMS,
    Planes,
    n_stripes,
    pack,
    stripe_bytes,
    stripe_rows,
)
from oracles.tiles import unpack

SHAPES = [(16, 32), (1, 64), (17, 40), (128, 256), (130, 300), (192, 512), (576, 96)]


def random_planes(encoding: str, n_rows: int, n_cols: int) -> Planes:
    rng = np.random.default_rng(n_rows * 1000 + n_cols)
    form = FORMS[encoding]
    n_blocks, n_tiles = -(-n_cols // form.cols) * form.cols // 32, -(-n_cols // 256)

    def field(name: str, n: int) -> np.ndarray:
        if name in ("s", "t"):
            return rng.integers(0, 256, (n_rows, n), np.uint8)
        if name in ("s0", "s1"):
            return rng.integers(-128, 128, (n_rows, n), np.int8)
        return rng.standard_normal((n_rows, n)).astype(np.float16)

    fields = {name: field(name, n_blocks) for name in form.block_fields}
    fields |= {name: field(name, n_tiles) for name in form.tile_fields}
    if encoding in ("f32", "f16"):
        dtype = np.float32 if encoding == "f32" else np.float16
        return Planes(encoding, rng.standard_normal((n_rows, n_cols)).astype(dtype), fields)
    if encoding == "bf16":
        floats = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
        return Planes(encoding, (floats.view(np.uint32) >> 16).astype(np.uint16), fields)
    codes = rng.integers(0, 1 << form.bits, (n_rows, n_cols)).astype(np.uint8)
    return Planes(encoding, codes, fields)


def scalar(planes: Planes, row: int, col: int) -> float:
    """One value by the formulas of docs/format.md, in Python floats."""
    code, f = planes.codes[row, col], planes.fields
    if planes.encoding in ("f32", "f16"):
        return float(code)
    if planes.encoding == "bf16":
        return float(np.array([int(code) << 16], np.uint32).view(np.float32)[0])
    block, q = col // 32, int(code)

    def at(name: str, index: int = block) -> float:
        return float(f[name][row, index])

    match planes.encoding:
        case "q4_0":
            return at("d") * (q - 8)
        case "q4_1":
            return at("d") * q + at("m")
        case "q8_0":
            return at("d") * (q - 128)
        case "q8_1":
            return at("d") * (q - 128) + at("m")
        case "q4_k":
            return at("d", col // 256) * at("s") * q - at("dmin", col // 256) * at("t")
        case "q6_k":
            return at("d", col // 256) * at(("s0", "s1")[col % 32 // 16]) * (q - 32)
    raise AssertionError(planes.encoding)


@pytest.mark.parametrize("encoding", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_stripes_hold_every_value_where_the_format_says(
    encoding: str, shape: tuple[int, int]
) -> None:
    planes = random_planes(encoding, *shape)
    rows = stripe_rows(shape[0])
    stripes = pack(planes, rows)
    assert stripes.shape == (n_stripes(shape[0]), stripe_bytes(encoding, *shape))
    want = [[scalar(planes, r, c) for c in range(shape[1])] for r in range(shape[0])]
    flat = stripes.reshape(-1)
    got = unpack(flat, encoding, shape, rows, stripes.shape[1])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("encoding", FORMS)
def test_values_follow_the_formulas(encoding: str) -> None:
    planes = random_planes(encoding, 3, 300)
    want = [[scalar(planes, r, c) for c in range(300)] for r in range(3)]
    np.testing.assert_allclose(values(planes), want, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("encoding", FORMS)
def test_padding_rows_and_columns_are_zero(encoding: str) -> None:
    planes = random_planes(encoding, 33, 32)
    stripes = pack(planes, 64)
    n_cols = FORMS[encoding].cols
    padded = unpack(stripes.reshape(-1), encoding, (64, n_cols), 64, stripes.shape[1])
    assert np.all(padded[33:] == 0)
    if encoding not in ("q4_k", "q6_k"):
        assert np.any(padded[:33])


@pytest.mark.parametrize(
    ("n_rows", "want"),
    [
        (1, 32),
        (32, 32),
        (64, 64),
        (96, 96),
        (128, 128),
        (576, 96),
        (1536, 128),
        (192, 96),
        (160, 32),
    ],
)
def test_stripe_rows_are_the_largest_that_divide(n_rows: int, want: int) -> None:
    assert stripe_rows(n_rows) == want
