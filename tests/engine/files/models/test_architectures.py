"""Each architecture against a tiny random model of transformers, built offline."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from transformers import PreTrainedModel

from cflow.engine.files.convert import convert
from oracles import running, tiny
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
