"""Every GGML type we read, on random blocks, against gguf-py's dequantisation."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from cflow.engine.files.formats.blocks import BLOCK_TYPES
from cflow.engine.files.formats.quantise import values

ROUNDED_SCALES = ("Q5_K", "IQ4_XS", "IQ2_XXS", "IQ3_XXS")
ROUNDED = ("Q2_K", "IQ2_XS", "IQ2_S")
EXACT = [name for name in BLOCK_TYPES if name not in (*ROUNDED_SCALES, *ROUNDED)]
# Where f16 scales lie in a block; elsewhere they come first.
STARTS = {
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)},
}


def random_blocks(name: str, n_rows: int = 5, n_blocks: int = 7) -> np.ndarray:
    """Random bytes, with f16 scales that are finite."""
    rng = np.random.default_rng(1)
    block = BLOCK_TYPES[name]
    raw = rng.integers(0, 256, (n_rows, n_blocks, block.n_bytes), np.uint8)
    if name in ("F32", "F16", "BF16"):
        floats = rng.standard_normal((n_rows, n_blocks)).astype(np.float32)
        if name == "BF16":
            floats = (floats.view(np.uint32) >> 16).astype(np.uint16)
        return floats.astype({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[name])[..., None].view(
            np.uint8
        )
    if name == "MXFP4":
        raw[..., 0] = rng.integers(104, 144, raw.shape[:2])  # scales that f16 holds
        return raw
    if name == "IQ1_M":
        bits = (rng.standard_normal(raw.shape[:2]).astype(np.float16)).view(np.uint16)
        nibbles = (bits[..., None] >> np.array([0, 4, 8, 12], np.uint16)) & 15
        words = (raw[..., 48:].copy().view(np.uint16) & 0x0FFF) | (nibbles << 12).astype(np.uint16)
        raw[..., 48:] = words.view(np.uint8)
        return raw
    for start in STARTS.get(name, (0,)):
        scales = rng.standard_normal((n_rows, n_blocks, 1)).astype(np.float16)
        raw[..., start : start + 2] = scales.view(np.uint8)
    return raw


def reference(name: str, raw: np.ndarray) -> np.ndarray:
    return dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[name])


@pytest.mark.parametrize("name", EXACT)
def test_blocks_are_read_exactly(name: str) -> None:
    raw = random_blocks(name)
    planes = BLOCK_TYPES[name].planes(raw)
    assert planes.encoding == BLOCK_TYPES[name].encoding
    np.testing.assert_array_equal(values(planes), reference(name, raw))


def test_q5_k_rounds_scale_and_minimum_to_f16() -> None:
    raw = random_blocks("Q5_K")
    want = reference("Q5_K", raw)
    got = values(BLOCK_TYPES["Q5_K"].planes(raw))
    # |d s q| <= 31 d s and |dmin m|, each wrong by at most 2^-11 of itself.
    d, dmin = (np.abs(raw[..., i : i + 2].view(np.float16).astype(np.float64)) for i in (0, 2))
    bound = ((31 * 63 * d + 63 * dmin) * 2.0**-11).repeat(256, axis=2).reshape(want.shape)
    assert np.all(np.abs(got - want) <= bound)
    assert np.median(np.abs(got - want)) < 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", ["IQ4_XS", "IQ2_XXS", "IQ3_XXS"])
def test_scales_are_rounded_to_f16(name: str) -> None:
    raw = random_blocks(name)
    want, got = reference(name, raw), values(BLOCK_TYPES[name].planes(raw))
    np.testing.assert_allclose(got, want, rtol=2.0**-11)


@pytest.mark.parametrize("name", ROUNDED)
def test_types_without_an_encoding_are_rounded_to_8_bits(name: str) -> None:
    raw = random_blocks(name)
    want, got = reference(name, raw), values(BLOCK_TYPES[name].planes(raw))
    largest = np.abs(want).reshape(len(want), -1, 32).max(-1, keepdims=True)
    error = np.abs(got - want).reshape(largest.shape[0], -1, 32)
    assert np.all(error <= largest * (0.5 / 127 + 2.0**-11))


def test_mxfp4_scales_beyond_f16_are_zero_or_refused() -> None:
    raw = random_blocks("MXFP4")
    raw[0, 0, 0] = 0
    assert not np.any(values(BLOCK_TYPES["MXFP4"].planes(raw))[0, :32])
    raw[1, 0, 0] = 200
    assert not BLOCK_TYPES["MXFP4"].planes(raw).is_finite()


@pytest.mark.parametrize("name", [n for n in BLOCK_TYPES if n[0] in "QIT" and n != "IQ1_M"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_seen(name: str, scale: float) -> None:
    raw = random_blocks(name)
    at = STARTS.get(name, (0,))[0]
    raw[3, 2, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    assert BLOCK_TYPES[name].planes(random_blocks(name)).is_finite()
    assert not BLOCK_TYPES[name].planes(raw).is_finite()
