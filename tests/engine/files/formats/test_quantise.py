"""Quantisers against gguf-py's reference and torch's bf16."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from cflow.engine.files.formats.quantise import encode, values
from cflow.engine.files.formats.tiles import Planes


def numbers(n_cols: int = 320) -> np.ndarray:
    rng = np.random.default_rng(3)
    out = rng.standard_normal((9, n_cols)).astype(np.float32)
    out[0] = 0
    out[1] *= 1e-6
    out[2] = 1.5
    return out


@pytest.mark.parametrize("encoding", ["q4_0", "q4_1", "q8_0"])
def test_quantisers_round_as_ggml_does(encoding: str) -> None:
    kind = GGMLQuantizationType[encoding.upper()]
    want = dequantize(quantize(numbers(), kind), kind)
    got = values(encode(Planes("f32", numbers(), {}), encoding))
    np.testing.assert_array_equal(got, want)


def test_bf16_rounds_to_nearest_even_as_torch_does() -> None:
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 1 << 32, 100_000, np.uint64).astype(np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF]  # ties, and beside them
    floats = bits.view(np.float32)[None]
    floats = floats[:, np.isfinite(floats[0])]
    got = encode(Planes("f32", floats, {}), "bf16").codes
    want = torch.from_numpy(floats).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("encoding", ["q4_0", "q4_1", "q8_0"])
def test_a_partial_last_block_keeps_its_values(encoding: str) -> None:
    full = values(encode(Planes("f32", numbers(64), {}), encoding))
    part = values(encode(Planes("f32", numbers(64)[:, :40], {}), encoding))
    assert part.shape == (9, 40)
    np.testing.assert_array_equal(part[:, :32], full[:, :32])
    step = np.abs(numbers(64)).max() / 7
    assert np.abs(part - numbers(64)[:, :40]).max() <= step


def test_an_encoding_that_already_fits_is_left_alone() -> None:
    planes = encode(Planes("f32", numbers(), {}), "q4_0")
    assert encode(planes, "q4_0") is planes


def test_what_overflows_f16_is_not_finite() -> None:
    big = np.full((1, 32), 1e30, np.float32)
    mixed = np.array([[3e38, -3e38] * 16], np.float32)
    for encoding in ("f16", "q4_0", "q4_1", "q8_0"):
        assert not encode(Planes("f32", big, {}), encoding).is_finite()
        assert not encode(Planes("f32", mixed, {}), encoding).is_finite()
