"""Each architecture against a tiny random model of transformers, built offline."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from transformers import PreTrainedModel

from cflow.engine.files.convert import convert
from oracles import llama_converter, running, tiny
from oracles.forward import Forward
from oracles.model_file import ModelFile

PROMPTS = [
    [7],
    [1, 5, 7, 200, 33, 8, 8, 8],
    [(i * i + 3 * i) % tiny.VOCAB_SIZE for i in range(90)],  # longer than the llama3 rope's 64
]


class Case(NamedTuple):
    model: PreTrainedModel
    path: Path


@pytest.fixture(scope="module", params=tiny.MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.build(request.param)
    path = folder / "model.cflow"
    convert(str(tiny.save(model, folder / "hf")), path, quant="f32")
    return Case(model, path)


def test_logits_equal_transformers(case: Case) -> None:
    with running.opened(case.path, as_f32=True) as context:
        for prompt in PROMPTS:
            want, _ = tiny.logits_and_routing(case.model, prompt)
            got = running.logits(context, prompt)
            assert running.relative_error(got, want.numpy()).max() < 1e-3


# The models whose keys GGUF can express, each geometry of a family.
GGUF = (
    *("gemma2", "gemma3", "phi3", "phi3-partial", "ministral3", "llama-yarn", "llama-mlp-bias"),
    *("smollm3", "granite", "olmo2", "olmo3", "glm4", "cohere2", "exaone4", "exaone4-no-window"),
    *("seed_oss", "seed_oss-out-bias", "ernie4_5", "ernie4_5-bias", "starcoder2-no-bias"),
    *("hunyuan-dense", "hunyuan-dense-alpha"),
)


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Made by llama.cpp's converter, all in one process."""
    root = tmp_path_factory.mktemp("gguf")
    models = {name: tiny.build(name) for name in GGUF}
    for name, model in models.items():
        tiny.save(model, root / name)
    llama_converter.convert({root / name: root / f"{name}.gguf" for name in GGUF})
    return {name: Case(model, root / f"{name}.gguf") for name, model in models.items()}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_logits_equal_transformers(
    name: str, gguf_files: dict[str, Case], tmp_path: Path
) -> None:
    """The converter drops rows of the embedding that have no token (Gemma)."""
    case, prompt = gguf_files[name], [token % 256 for token in PROMPTS[2]]
    convert(str(case.path), tmp_path / "model.cflow", quant="f32")
    want, _ = tiny.logits_and_routing(case.model, prompt)
    with running.opened(tmp_path / "model.cflow", as_f32=True) as context:
        got = running.logits(context, prompt)
    assert running.relative_error(got, want.numpy()[:, : got.shape[1]]).max() < 1e-3


@pytest.mark.parametrize(("context", "prompt"), [(64, PROMPTS[1]), (128, PROMPTS[2])])
def test_longrope_is_chosen_by_the_context_served(
    context: int, prompt: list[int], tmp_path: Path
) -> None:
    """transformers chooses by the length so far: short up to the original 64 positions, then long."""
    model = tiny.of("Phi3", rope_parameters=tiny.longrope(8), **tiny.LONG)
    tiny.randomise(model.float().eval(), 0)
    path = tmp_path / "model.cflow"
    convert(str(tiny.save(model, tmp_path / "hf")), path, quant="f32")
    with running.opened(path, as_f32=True, max_context=context) as opened:
        want, _ = tiny.logits_and_routing(model, prompt)
        got = running.logits(opened, prompt)
    assert running.relative_error(got, want.numpy()).max() < 1e-3


def test_the_numpy_forward_equals_transformers(case: Case) -> None:
    file = ModelFile(case.path)
    for prompt in PROMPTS:
        want, _ = tiny.logits_and_routing(case.model, prompt)
        assert running.relative_error(Forward(file, prompt).logits, want.numpy()).max() < 1e-4


def test_routed_experts_equal_transformers(case: Case) -> None:
    top_k = getattr(case.model.config, "num_experts_per_tok", None)
    if top_k is None:
        return
    prompt = PROMPTS[1]
    _, routers = tiny.logits_and_routing(case.model, prompt)
    with running.opened(case.path, as_f32=True, keep_values=True) as context:
        running.logits(context, prompt)
        for layer, scores in enumerate(routers):
            want = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :top_k]
            got = running.values(context, [f"L{layer}.routed"], len(prompt))
            np.testing.assert_array_equal(got[f"L{layer}.routed"], want)
