"""Every feature a layer record can name, also those only pipeline-native models use, against the
numpy forward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine.files.formats.cflow import Weight
from cflow.engine.native import Model, NativeError, const
from oracles import running
from oracles.forward import Forward
from oracles.model_file import ModelFile
from oracles.random_model import EXPERTS, VOCAB_SIZE, RandomModel

PROMPT = [(i * i + 5 * i + 2) % VOCAB_SIZE for i in range(60)]
POST_ATTENTION, X_IN, X_IN_PREVIOUS = range(3)
PARALLEL = {"dense_source": X_IN, "expert_anchor": X_IN}
DELAYED = {"dense_source": X_IN_PREVIOUS, "expert_anchor": X_IN, "expert_delay": 2}
SQRT_HALF = 0.5**0.5

FEATURES: dict[str, dict[str, Any]] = {
    "no rope": {"rope_kind": 0},
    "interleaved rope": {"rope_kind": 2},
    "partial rope": {"rope_dim": 8},
    "window": {"window": 17},
    "window of a block": {"window": 32},
    "v_norm": {"v_norm": 1},
    "qk_norm per head, offset": {"qk_norm": 1, "norm_offset": 1.0},
    "qk_norm over all": {"qk_norm": 2},
    "attention scale": {"attention_scale": 0.4},
    "one KV head": {"n_kv_heads": 1},
    "odd head": {"head_dim": 20, "rope_dim": 20},
    "gelu on up": {"activation": 1, "activation_on_up": 1},
    "gelu with erf": {"activation": 2},
    "qk_norm after rope, offset": {"qk_norm": 3, "norm_offset": 1.0},
    "norms after": {"norm_place": 1},
    "norms before and after, offset": {"norm_place": 2, "norm_offset": 1.0},
    "layer norms with biases": {"norm_kind": 1},
    "parallel dense": {"norm_kind": 1, "dense_source": X_IN},
    "FFN without a gate, biases": {"ungated": 1, "ffn_biases": 1, "activation": 1},
    "FFN with biases": {"ffn_biases": 1, "d_ff": 100},
    "capped scores": {"score_cap": 1.5, "attention_scale": 1.0},
    "rope divisors and gain": {"divisors": 1, "rope_gain": 1.2},
    "queries that grow": {"query_growth": 0.3, "query_period": 7, "query_start": 1},
    "experts alone": EXPERTS | {"d_ff": 0},
    "dense and experts share a norm": EXPERTS,
    "dense and experts, own norms": EXPERTS | {"norms_shared": 0},
    "expert scale, renormalised": EXPERTS | {"expert_scale": 2.5, "renormalise": 1},
    "all experts": EXPERTS | {"top_k": 6},
    "shared expert": EXPERTS | {"d_ff": 0, "d_shared": 40},
    "gated shared expert": EXPERTS | {"d_ff": 0, "d_shared": 40, "shared_gate": 1},
    "parallel block": EXPERTS | PARALLEL,
    "parallel block, halved": EXPERTS | PARALLEL | {"residual_scale": SQRT_HALF},
    "dense from the layer before": {"dense_source": X_IN_PREVIOUS},
    "experts before a sequential dense": EXPERTS | {"expert_anchor": X_IN, "expert_delay": 2},
    "experts one layer late": EXPERTS | {"expert_delay": 1},
    "arch2_4": EXPERTS | DELAYED,
    "arch2_4, own norms": EXPERTS | DELAYED | {"norms_shared": 0},
    "delay past the last layer": EXPERTS | {"expert_anchor": X_IN, "expert_delay": 9},
}


def check(model: RandomModel, path: Path, defer: int = 0) -> None:
    model.write(path)
    want = Forward(ModelFile(path), PROMPT, defer=defer)
    with running.opened(path, as_f32=True, defer_experts=defer) as context:
        got = running.logits(context, PROMPT)
    assert running.relative_error(got, want.logits).max() < 1e-4


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, tmp_path: Path) -> None:
    check(RandomModel([FEATURES[feature]] * 4), tmp_path / "model.cflow")


def test_layers_of_different_kinds(tmp_path: Path) -> None:
    layers = [FEATURES[name] for name in ("arch2_4", "window", "experts one layer late")]
    check(RandomModel([*layers, {}]), tmp_path / "model.cflow")


def test_layers_that_share_weights(tmp_path: Path) -> None:
    layers = [{"block": i % 2} | EXPERTS | DELAYED for i in range(6)]
    check(RandomModel(layers), tmp_path / "model.cflow")


@pytest.mark.parametrize("defer", [1, 3])
@pytest.mark.parametrize(
    "feature",
    ["experts alone", "gated shared expert", "expert scale, renormalised", "arch2_4"],
)
def test_deferred_experts(feature: str, defer: int, tmp_path: Path) -> None:
    layer = FEATURES[feature] | {"top_k": 4}
    check(RandomModel([layer] * 4), tmp_path / "model.cflow", defer)


def test_a_row_of_fewer_experts_defers_all_but_one(tmp_path: Path) -> None:
    """Of two experts, with three to defer, the better one stays."""
    layer = EXPERTS | {"top_k": 4, "d_ff": 0}
    path = RandomModel([layer] * 3).write(tmp_path / "model.cflow")
    two = ModelFile(path)
    for record in two.layers:
        record["top_k"] = 2
    want = Forward(two, PROMPT[:8], defer=1).logits
    with running.opened(path, as_f32=True, defer_experts=3) as context:
        batch = [row._replace(n_experts=2) for row in running.rows(PROMPT[:8])]
        got = running.step(context, batch)
    assert running.relative_error(got, want).max() < 1e-4


@pytest.mark.parametrize(
    ("layer", "defer", "text"),
    [
        (EXPERTS, 2, "a token has 2 experts, one of which must stay"),
        (EXPERTS, -1, "defer_experts is -1"),
        ({}, 1, "the model has no experts"),
    ],
)
def test_what_cannot_be_deferred(
    layer: dict[str, Any], defer: int, text: str, tmp_path: Path
) -> None:
    path = RandomModel([layer] * 2).write(tmp_path / "model.cflow")
    with pytest.raises(NativeError, match=text):
        Model(str(path), defer_experts=defer)


def test_scaled_tied_embedding_and_norm_offset(tmp_path: Path) -> None:
    model = RandomModel([{}] * 2, tied=1, embedding_scale=8.0, final_norm_offset=1.0)
    check(model, tmp_path / "model.cflow")


def test_layer_norm_scale_and_cap_of_the_head(tmp_path: Path) -> None:
    model = RandomModel([{}], final_norm_kind=1, logit_scale=3.0, logit_cap=2.0)
    check(model, tmp_path / "model.cflow")


def test_fewer_experts_for_one_row(tmp_path: Path) -> None:
    """A row that asks for one expert gets the best one only; the rest of its step is untouched."""
    layer = EXPERTS | {"renormalise": 1, "d_ff": 0}
    path = RandomModel([layer] * 2).write(tmp_path / "model.cflow")
    one = ModelFile(path)
    for record in one.layers:
        record["top_k"] = 1
    want_one, want_all = Forward(one, PROMPT[:8]).logits, Forward(ModelFile(path), PROMPT[:8])
    with running.opened(path, as_f32=True) as context:
        batch = running.rows(PROMPT[:8], sequence=0)
        batch = [row._replace(n_experts=1) for row in batch]
        batch += running.rows(PROMPT[:8], sequence=1)
        got = running.step(context, batch)
    assert running.relative_error(got[:8], want_one).max() < 1e-4
    assert running.relative_error(got[8:], want_all.logits).max() < 1e-4


class OneBadToken(RandomModel):
    """The embedding of token BAD begins with infinity."""

    BAD = 3

    def matrix(self, role: str, *args: Any, **kwargs: Any) -> Weight:
        weight = super().matrix(role, *args, **kwargs)
        if role == "embedding":
            stripes = weight.stripes(0, 1).copy()
            stripes.view("<f4")[0, self.BAD] = np.inf  # column 0 of the first 16 rows lies first
            rest = weight.stripes(1, weight.n_rows)
            packed = np.concatenate([stripes, rest])
            weight = replace(weight, stripes=lambda first, n: packed[first : first + n])
        return weight


@pytest.mark.parametrize("layer", [{}, EXPERTS, EXPERTS | {"top_k": 1}])
def test_a_row_that_fails_harms_none_that_follow(layer: dict[str, Any], tmp_path: Path) -> None:
    """Also where rows of buffers have padding: it must not keep what is not a number."""
    path = OneBadToken([layer] * 2, d_model=72).write(tmp_path / "model.cflow")
    with running.opened(path, as_f32=True) as context:
        want = running.logits(context, PROMPT[:8], sequence=0)
        bad = running.rows([OneBadToken.BAD] * 8, sequence=1)
        assert set(context.step(bad).status) == {const.Status.ENUMERIC}
        got = running.logits(context, PROMPT[:8], sequence=2)
    assert got.tobytes() == want.tobytes()
