"""Real models against transformers in f32 over the same dequantised weights, on WikiText-2."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from oracles import gguf_model, running
from oracles.model_file import ModelFile
from oracles.real_models import RealModel

WINDOW = 512
CI_WINDOWS = 2
F32_TOKENS = 256  # of the first window
TEXT_BYTES = 64 << 10

Logits = NDArray[np.float32]


class Bounds(NamedTuple):
    """Largest error of the int8 path's mean-centred logits. ci_tokens: of a window, in CI; the
    vocabulary of Gemma is large."""

    median: float
    p90: float
    ci_tokens: int = WINDOW


BOUNDS = {
    "smollm2-135m": Bounds(0.04, 0.06),
    "qwen2.5-coder-0.5b": Bounds(0.03, 0.04),
    "gemma3-270m": Bounds(0.03, 0.04, ci_tokens=128),
}


class Case(NamedTuple):
    model: RealModel
    oracle: PreTrainedModel
    windows: list[list[int]]
    first: Logits  # of the oracle, in the first window


@pytest.fixture(scope="module", params=BOUNDS)
def case(request: pytest.FixtureRequest, data: Path) -> Case:
    model = RealModel.fetch(request.param)
    text = (data / "wikitext2" / "wiki.test.raw").read_bytes()[:TEXT_BYTES]
    file = ModelFile(model.cflow)
    tokenizer = tokenizers.Tokenizer.from_str(file.tokenizer)
    first = [file.metadata["bos_id"]] if file.metadata["add_bos"] else []
    ids = tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False).ids
    size = WINDOW - len(first)
    windows = [first + ids[i : i + size] for i in range(0, len(ids), size)]
    if os.environ.get("CFLOW_TEST_WINDOWS") != "all":
        windows = [w[: BOUNDS[request.param].ci_tokens] for w in windows[:CI_WINDOWS]]
    oracle = gguf_model.load(model.gguf)
    return Case(model, oracle, windows, oracle_logits(oracle, windows[0]))


def oracle_logits(oracle: PreTrainedModel, window: list[int]) -> Logits:
    with torch.no_grad():
        return np.asarray(oracle(torch.tensor([window])).logits[0].numpy())


def log_loss(logits: Logits, window: list[int]) -> float:
    """Sum of -log p over all tokens but the first."""
    scores = torch.log_softmax(torch.from_numpy(logits[:-1]), dim=-1)
    return float(-scores[range(len(window) - 1), window[1:]].double().sum())


def test_f32_logits_equal_transformers(case: Case) -> None:
    with running.opened(case.model.cflow, as_f32=True) as context:
        got = running.logits(context, case.windows[0][:F32_TOKENS])
    assert running.relative_error(got, case.first[:F32_TOKENS]).max() < 1e-3


def test_int8_logits_and_perplexity(case: Case) -> None:
    errors, got_loss, want_loss, n_scored = [], 0.0, 0.0, 0
    with running.opened(case.model.cflow) as context:
        for i, window in enumerate(case.windows):
            got = running.logits(context, window)
            want = oracle_logits(case.oracle, window) if i else case.first
            errors.append(running.centred_error(got, want))
            got_loss, want_loss = (
                got_loss + log_loss(got, window),
                want_loss + log_loss(want, window),
            )
            n_scored += len(window) - 1
    median, p90 = np.percentile(np.concatenate(errors), [50, 90])
    ratio = np.exp((got_loss - want_loss) / n_scored)
    print(f"{case.model.name}: median {median:.4f} p90 {p90:.4f}", end=" ")
    print(f"perplexity {np.exp(want_loss / n_scored):.3f} x {ratio:.4f}")
    bounds = BOUNDS[case.model.name]
    assert median <= bounds.median
    assert p90 <= bounds.p90
    assert abs(ratio - 1) <= 0.01
