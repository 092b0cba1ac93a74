"""Every GGML type we read, on random blocks, against gguf-py's dequantisation."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from cflow.engine.files.formats.blocks import BLOCK_TYPES
from cflow.engine.files.formats.quantise import values

EXACT = [name for name in BLOCK_TYPES if name != "Q5_K"]


def random_blocks(name: str, n_rows: int = 5, n_blocks: int = 7) -> np.ndarray:
    """Random bytes, with f16 scales that are finite."""
    rng = np.random.default_rng(1)
    block = BLOCK_TYPES[name]
    raw = rng.integers(0, 256, (n_rows, n_blocks, block.n_bytes), np.uint8)
    starts = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    if name in ("F32", "F16", "BF16"):
        floats = rng.standard_normal((n_rows, n_blocks)).astype(np.float32)
        if name == "BF16":
            floats = (floats.view(np.uint32) >> 16).astype(np.uint16)
        return floats.astype({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[name])[..., None].view(
            np.uint8
        )
    for start in starts.get(name, (0,)):
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


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name.startswith("Q")])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_seen(name: str, scale: float) -> None:
    raw = random_blocks(name)
    at = 208 if name == "Q6_K" else 0
    raw[3, 2, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    assert BLOCK_TYPES[name].planes(random_blocks(name)).is_finite()
    assert not BLOCK_TYPES[name].planes(raw).is_finite()
