"""Every arm that a file can describe: PyTorch against the engine, through export and convert."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import convert
from cflow.engine.lab.architectures import Output, Pipeline
from cflow.engine.lab.arms import ARMS, Arm
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.export import export
from oracles import pipelines, running, tiny
from oracles.forward import Forward
from oracles.model_file import ModelFile

PROMPT = pipelines.PROMPT
PUBLISHED = {name: (arm, False) for name, arm in ARMS.items() if arm.streams == "one"}
GRID = {  # what no published arm has
    "v_norm": (ARMS["arch2_4_combined"], True),
    "scaled_parallel": (Arm("x_in", "x_in", residual_scale=0.5**0.5), False),
    "late_sequential_experts": (Arm(expert_delay=2), False),
    "delayed_dense_anchor_post": (Arm("x_in_previous", "post_attention", 1), False),
    "beyond_the_end": (Arm("x_in", "x_in", 9), False),
    "shared_and_delayed": (Arm("x_in_previous", "x_in", 2, passes=2), False),
}


class Case(NamedTuple):
    model: Pipeline
    folder: Path
    path: Path


def make(folder: Path, arm: Arm, v_norm: bool = False) -> Case:
    model = pipelines.build(arm, replace(pipelines.SHAPE, v_norm=v_norm))
    export(model, folder / "hf", tiny.byte_tokenizer())
    convert(str(folder / "hf"), folder / "model.cflow", quant="f32")
    return Case(model, folder / "hf", folder / "model.cflow")


@pytest.fixture(scope="module", params=PUBLISHED | GRID)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(tmp_path_factory.mktemp(request.param), *(PUBLISHED | GRID)[request.param])


def torch_output(model: Pipeline) -> Output:
    with torch.no_grad():
        output: Output = model(torch.tensor([PROMPT]))
    return output


def torch_logits(model: Pipeline) -> NDArray[Any]:
    return np.asarray(torch_output(model).logits[0])


def test_prefill_in_any_chunks_equals_pytorch(case: Case) -> None:
    want = torch_logits(case.model)
    with running.opened(case.path, as_f32=True, max_context=128) as context:
        for chunk in (64, 7, 1):  # 1: as in decoding
            got = running.logits(context, PROMPT, chunk)
            assert running.relative_error(got, want).max() < 6e-5
            np.testing.assert_array_equal(got.argmax(1), want.argmax(1))


def test_routed_experts_equal_pytorch(case: Case) -> None:
    output = torch_output(case.model)
    with running.opened(case.path, as_f32=True, max_context=128, keep_values=True) as context:
        n = 48  # rows of one step
        running.logits(context, PROMPT[:n])
        for layer, routing in enumerate(output.routing):
            names = [f"L{layer}.routed"]
            got = running.values(context, names, n)[names[0]]
            np.testing.assert_array_equal(got, routing.experts[:n])


def test_the_numpy_forward_equals_pytorch(case: Case) -> None:
    got = Forward(ModelFile(case.path), PROMPT).logits
    assert running.relative_error(got, torch_logits(case.model)).max() < 1e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_int8_is_near_pytorch(name: str, tmp_path: Path) -> None:
    """All experts are chosen: with random weights rounding flips a near choice, and with it a row."""
    model = pipelines.build(PUBLISHED[name][0], replace(pipelines.SHAPE, top_k=8))
    export(model, tmp_path / "hf", tiny.byte_tokenizer())
    convert(str(tmp_path / "hf"), tmp_path / "q8.cflow", quant="q8_0")
    with running.opened(tmp_path / "q8.cflow", max_context=128) as context:
        error = running.relative_error(running.logits(context, PROMPT), torch_logits(model))
    assert np.median(error) < 0.15


def test_the_file_says_which_arm_it_is(tmp_path: Path) -> None:
    case = make(tmp_path, ARMS["arch2_4_combined"], v_norm=True)
    file = ModelFile(case.path)
    assert file.metadata["architecture"] == "cflow_pipeline"
    assert len(file.layers) == 6
    want = {
        "dense_source": 2, "expert_anchor": 1, "expert_delay": 2, "residual_scale": 1.0,
        "v_norm": 1, "activation": 1, "activation_on_up": 1, "renormalise": 1, "norms_shared": 1,
    }  # fmt: skip
    for layer in file.layers:
        assert {key: layer[key] for key in want} == want


def test_shared_blocks_are_stored_once(tmp_path: Path) -> None:
    once = make(tmp_path, ARMS["arch5"])
    file = ModelFile(once.path)
    assert [layer["block"] for layer in file.layers] == [0, 1, 0, 1, 0, 1]
    assert file.header["n_blocks"] == 2


@pytest.mark.parametrize("name", ["arch1", "arch3"])
def test_what_a_file_cannot_describe_is_not_exported(name: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="PyTorch only"):
        export(pipelines.build(ARMS[name]), tmp_path / "hf", tiny.byte_tokenizer())
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_source": "x_out"}, "dense_source is 'x_out'; supported: post_attention, x_in"),
        ({"expert_anchor": "x_in_previous"}, "expert_anchor is 'x_in_previous'"),
        ({"expert_delay": -1}, "expert_delay is -1"),
        ({"n_heads": 97}, "n_heads is 97, which does not divide d_model, 96"),
        ({"passes": 4}, "passes is 4, which does not divide 6 layers"),
        ({"passes": 2}, "tensors without a known role: blocks.3"),
        ({"d_expert": 64}, r"blocks.0.experts.gate has the shape"),
        ({"d_ff": None}, "d_ff is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    export(pipelines.build(Arm()), tmp_path, tiny.byte_tokenizer())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        convert(str(tmp_path), tmp_path / "out.cflow")
