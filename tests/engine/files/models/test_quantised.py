"""Folders of 8-bit floats against torch: the values of codes, scales of every shape, whole models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import convert, open_source
from cflow.engine.files.formats.safetensors import E4M3
from oracles import running, tiny

PROMPT = [(i * i + 3 * i) % tiny.VOCAB_SIZE for i in range(40)]
BLOCK = (48, 40)  # neither divides the 96 columns or 160 rows of the tiny model twice over
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
SCHEMES: dict[str, tuple[dict[str, Any], str, str]] = {  # config, suffix of scales, their shape
    "block": ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, "_scale_inv", "block"),
    "tensor": ({"quant_method": "fp8"}, "_scale_inv", "tensor"),
    "channel": (COMPRESSED, "_scale", "channel"),
    "compressed block": (
        COMPRESSED | {"config_groups": {"g": {"weights": {"block_structure": list(BLOCK)}}}},
        "_scale",
        "block",
    ),
}


def test_codes_are_torchs() -> None:
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, want)


def quantised(weight: torch.Tensor, kind: str, exact: bool) -> tuple[torch.Tensor, ...]:
    """Codes, scales, and the values that they stand for, in f32."""
    n_rows, n_cols = weight.shape
    rows, cols = {"block": BLOCK, "tensor": (n_rows, n_cols), "channel": (1, n_cols)}[kind]
    scales = torch.empty(-(-n_rows // rows), -(-n_cols // cols))
    codes = torch.empty(n_rows, n_cols, dtype=torch.float8_e4m3fn)
    back = torch.empty(n_rows, n_cols)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            scale = weight[part].abs().max() / 448
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if exact else scale
            codes[part] = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[i, j], back[part] = scale, codes[part].float() * scale
    return codes, scales.reshape(()) if kind == "tensor" else scales, back


def folder_of(scheme: str, folder: Path, exact: bool = False) -> Any:
    """Writes a folder whose projections but those of layer 1 are quantised; returns the torch model
    with their values."""
    config, suffix, kind = SCHEMES[scheme]
    model = tiny.build("llama")
    tiny.save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [n for n in tensors if "_proj.weight" in n and "layers.1." not in n]:
        codes, scales, back = quantised(tensors[name].float(), kind, exact)
        tensors |= {name: codes, name + suffix: scales}
        tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        parameters[name].data.copy_(back)
    save_file(tensors, folder / "model.safetensors")
    configure(folder, config)
    return model


def configure(folder: Path, config: Any) -> None:
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_dequantised_model(scheme: str, tmp_path: Path) -> None:
    model = folder_of(scheme, tmp_path / "hf")
    said: list[str] = []
    convert(str(tmp_path / "hf"), tmp_path / "m.cflow", quant="f32", say=said.append)
    want, _ = tiny.logits_and_routing(model, PROMPT)
    with running.opened(tmp_path / "m.cflow", as_f32=True) as context:
        got = running.logits(context, PROMPT)
    assert running.relative_error(got, want.numpy()).max() < 1e-3
    assert any("rounded to bf16" in note for note in said)


@pytest.mark.parametrize("scheme", ["block", "tensor"])
def test_scales_that_are_powers_of_two_are_exact_in_bf16(scheme: str, tmp_path: Path) -> None:
    model = folder_of(scheme, tmp_path, exact=True)
    source = open_source(tmp_path)
    try:
        matrix = source.weights.find("down", 2, (96, 160))
        assert matrix.encoding == "bf16"
        stored = matrix.rows(37, 30, "bf16").codes
        assert any("exactly" in note for note in source.notes)
    finally:
        source.close()
    want = model.model.layers[2].mlp.down_proj.weight.detach()[37:67].numpy()
    np.testing.assert_array_equal((stored.astype(np.uint32) << 16).view(np.float32), want)


REFUSED: dict[str, tuple[Any, str]] = {
    "awq": ({"quant_method": "awq"}, "method 'awq'; supported: fp8, and compressed-tensors"),
    "packed": (COMPRESSED | {"format": "pack-quantized"}, "format 'pack-quantized'; supported"),
    "none": ({}, "method None"),
    "a list": ([8], "is not an object"),
    "block of words": ({"quant_method": "fp8", "weight_block_size": ["a", 1]}, "two counts"),
    "block of 0": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two counts"),
    "other blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        r"does not fit \[\d+, \d+\] in blocks of \[128, 128\]",
    ),
    "no blocks": ({"quant_method": "fp8"}, r"in blocks of \[0, 0\]"),
    "two sizes": (
        COMPRESSED
        | {"config_groups": {str(n): {"weights": {"block_structure": [n, n]}} for n in (8, 16)}},
        "several shapes",
    ),
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    folder_of("block", folder)
    return folder


@pytest.mark.parametrize("fault", REFUSED)
def test_other_schemes_and_shapes_are_refused(fault: str, blocks: Path) -> None:
    config, message = REFUSED[fault]
    configure(blocks, config)
    with pytest.raises(ModelError, match=message):
        open_source(blocks)


def test_a_matrix_without_a_scale_is_refused(tmp_path: Path) -> None:
    folder_of("block", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.weight is F8_E4M3.*weight_scale_inv"):
        open_source(tmp_path)


def test_a_scale_of_a_matrix_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    folder_of("block", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"known role: .*layers\.1\.mlp\.up_proj\.weight_scale_inv"
    ):
        convert(str(tmp_path / "hf"), tmp_path / "out.cflow")


def test_scales_without_a_config_are_refused(blocks: Path, tmp_path: Path) -> None:
    """Otherwise the codes alone would be the weights."""
    configure(blocks, None)
    with pytest.raises(ModelError, match="without a known role"):
        convert(str(blocks), tmp_path / "out.cflow")
