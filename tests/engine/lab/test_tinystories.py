"""The bundled model against PyTorch over the very weights of its file, on text it was not trained on."""

import lzma

import numpy as np
import pytest
import tokenizers
import torch
from torch.nn import functional as F

from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.lab import corpus
from cflow.engine.lab.architectures import Pipeline, build
from cflow.engine.lab.arms import ARMS, Shape
from oracles import running
from oracles.model_file import MODEL_LEVEL, ModelFile

N_WINDOWS = 12
GLOBAL = {"embedding.weight": "embedding", "head.weight": "head", "final_norm.weight": "final_norm"}
BLOCK = {
    "norm1.weight": "norm1", "norm2.weight": "norm2", "attention.q.weight": "q",
    "attention.k.weight": "k", "attention.v.weight": "v", "attention.o.weight": "o",
    "dense.gate": "gate", "dense.up": "up", "dense.down": "down", "experts.router": "router",
}  # fmt: skip


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return ModelFile(BUNDLED_FILE)


@pytest.fixture(scope="module")
def model(file: ModelFile) -> Pipeline:
    head, layer = file.header, file.layers[0]
    shape = Shape(
        head["vocab_size"], head["d_model"], head["n_layers"], layer["n_heads"], layer["d_ff"],
        layer["n_experts"], layer["top_k"], layer["d_expert"], head["context"],
    )  # fmt: skip
    model = build(ARMS["arch2_4_combined"], shape)
    state = {name: file.weight(MODEL_LEVEL, role) for name, role in GLOBAL.items()}
    for block in range(head["n_blocks"]):
        for name, role in BLOCK.items():
            state[f"blocks.{block}.{name}"] = file.weight(block, role)
        for part in ("gate", "up", "down"):
            experts = [file.weight(block, f"expert_{part}", e) for e in range(shape.n_experts)]
            state[f"blocks.{block}.experts.{part}"] = np.stack(experts)
    model.load_state_dict(
        {name: torch.from_numpy(np.array(w)).float() for name, w in state.items()}
    )
    return model.eval()


@pytest.fixture(scope="module")
def windows(file: ModelFile) -> list[list[int]]:
    text = lzma.decompress((corpus.BUNDLED / "valid.txt.xz").read_bytes()).decode()[:40_000]
    ids = tokenizers.Tokenizer.from_str(file.tokenizer).encode(text).ids
    size = file.header["context"]
    return [ids[i * size : (i + 1) * size] for i in range(N_WINDOWS)]


def losses(logits: np.ndarray, window: list[int]) -> torch.Tensor:
    scores = torch.from_numpy(logits[:-1]).double()
    return F.cross_entropy(scores, torch.tensor(window[1:]), reduction="none")


def test_it_is_small_and_says_where_it_comes_from(file: ModelFile) -> None:
    assert BUNDLED_FILE.stat().st_size <= 12 << 20
    assert file.metadata["name"] == "tinystories"
    assert "CDLA-Sharing-1.0" in file.metadata["licence"]
    assert {layer["expert_delay"] for layer in file.layers} == {2}


def test_f32_equals_pytorch(model: Pipeline, windows: list[list[int]]) -> None:
    with running.opened(BUNDLED_FILE, as_f32=True) as context, torch.no_grad():
        for window in windows[:2]:
            got, want = running.logits(context, window), model(torch.tensor([window])).logits[0]
            assert running.relative_error(got, want.numpy()).max() < 6e-5
            np.testing.assert_array_equal(got.argmax(1), want.numpy().argmax(1))


def test_int8_is_near_pytorch_and_scores_as_well(model: Pipeline, windows: list[list[int]]) -> None:
    errors, got_loss, want_loss = [], [], []
    with running.opened(BUNDLED_FILE) as context, torch.no_grad():
        for window in windows:
            want = model(torch.tensor([window])).logits[0].numpy()
            got = running.logits(context, window)
            errors.append(running.relative_error(got, want))
            got_loss.append(losses(got, window))
            want_loss.append(losses(want, window))
    median = float(np.median(np.concatenate(errors)))
    ratio = float((torch.cat(got_loss).mean() - torch.cat(want_loss).mean()).exp())
    perplexity = float(torch.cat(want_loss).mean().exp())
    print(f"median {median:.4f}, perplexity {perplexity:.3f} x {ratio:.4f}")
    assert median <= 0.03
    assert abs(ratio - 1) <= 0.005
    assert perplexity < 20
