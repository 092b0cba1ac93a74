"""Each op, fed the engine's own inputs, against its numpy twin."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracles import running
from oracles.forward import Forward
from oracles.model_file import ModelFile
from oracles.random_model import EXPERTS, VOCAB_SIZE, RandomModel
from oracles.tiles import ENCODINGS

PROMPT = [(i * i + 5 * i + 2) % VOCAB_SIZE for i in range(50)]
# A layer of each kind; d_ff and the head dimension are no multiples of a block.
LAYERS: list[dict[str, Any]] = [
    {"d_ff": 300, "rope_scaling": 2, "rope_factor": 8.0, "rope_original_context": 64},
    {"d_ff": 100, "qk_norm": 1, "head_dim": 20, "rope_dim": 20, "rope_kind": 2},
    EXPERTS | {"qk_norm": 2, "renormalise": 1, "norms_shared": 0},
    EXPERTS | {"d_ff": 0, "d_shared": 40, "shared_gate": 1, "v_norm": 1},
    # Dense and experts read other streams through the same norm.
    EXPERTS | {"dense_source": 2, "expert_anchor": 1, "expert_delay": 1},
]


def check_ops(path: Path, *, as_f32: bool) -> None:
    file = ModelFile(path)
    with running.opened(path, as_f32=as_f32, kv_type="f32", keep_values=True) as context:
        logits = running.logits(context, PROMPT)
        names = list(Forward(file, PROMPT).values)
        given = running.values(context, names, len(PROMPT))
    twin = Forward(file, PROMPT, given=given, int8=not as_f32)
    for name, want in twin.values.items():
        if name.endswith(".routed"):
            np.testing.assert_array_equal(given[name], want, name)
        else:
            if want.shape[1] == 1:  # one number, which may cancel: its scale is that of all rows
                given[name], want = given[name].T, want.T
            assert running.relative_error(given[name], want).max() < 1e-5, name
    assert running.relative_error(logits, twin.logits).max() < 1e-5


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ops_of_the_int8_path(encoding: str, tmp_path: Path) -> None:
    model = RandomModel(LAYERS, d_model=80)
    check_ops(model.write(tmp_path / "model.cflow", encoding), as_f32=False)


def test_ops_of_the_f32_path(tmp_path: Path) -> None:
    model = RandomModel(LAYERS, d_model=80)
    check_ops(model.write(tmp_path / "model.cflow", "q4_0"), as_f32=True)


def test_a_context_of_several_parts(tmp_path: Path) -> None:
    """Positions are attended to in parts of 1,024, here three, that one thread or several compute; the
    window begins inside of one."""
    prompt = [(i * i + 5 * i + 2) % VOCAB_SIZE for i in range(2300)]
    layers = [LAYERS[0], LAYERS[1] | {"window": 700}]
    path = RandomModel(layers, d_model=80).write(tmp_path / "model.cflow")
    with running.opened(path, as_f32=True, max_context=2304, n_sequences=1) as context:
        chunks = running.logits(context, prompt[:-1])
        alone = running.step(context, running.rows(prompt[-1:], first=len(prompt) - 1))
    want = Forward(ModelFile(path), prompt).logits
    assert running.relative_error(np.concatenate([chunks, alone]), want).max() < 1e-5


@pytest.mark.parametrize(
    ("kv_type", "bound"), [("f32", 1e-6), ("f16", 1.5e-3), ("bf16", 1e-2), ("q8", 3e-2)]
)
def test_rounding_of_kv(kv_type: str, bound: float, tmp_path: Path) -> None:
    """Attention differs from that over exact K and V by the rounding of the KV type, not more."""
    path = RandomModel(LAYERS[:2], d_model=80).write(tmp_path / "model.cflow")
    file, names = ModelFile(path), [f"L0.{what}" for what in ("q", "k", "v", "q_rot", "attention")]
    with running.opened(path, kv_type=kv_type, keep_values=True) as context:
        running.logits(context, PROMPT)
        given = running.values(context, names, len(PROMPT))
    want = Forward(file, PROMPT, given=given).values["L0.attention"]
    error = running.relative_error(given["L0.attention"], want)
    assert error.max() < bound
    assert kv_type == "f32" or np.median(error) > bound / 20
