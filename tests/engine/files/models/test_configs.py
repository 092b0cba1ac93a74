"""What GGUF keys and config.json mean for the layers of a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine.base.errors import ModelError
from makefiles.conversion import converted, gguf, keys
from makefiles.gguf_file import Tensor, tiny_llama
from makefiles.safetensors_file import tiny_folder, tiny_tensors


def test_llama_of_gguf_rotates_pairs_and_of_hf_halves(tmp_path: Path) -> None:
    assert converted(gguf(tmp_path, tiny_llama())).layers[0]["rope_kind"] == 2
    assert converted(tiny_folder(tmp_path / "m")).layers[0]["rope_kind"] == 1


def test_rope_freqs_are_the_divisors_of_the_frequencies(tmp_path: Path) -> None:
    builder = tiny_llama()
    factors = np.linspace(1, 5, 8, dtype=np.float32)
    builder.tensors.append(Tensor("rope_freqs.weight", [8], 0, factors.tobytes()))
    model = converted(gguf(tmp_path, builder))
    np.testing.assert_array_equal(model.weight(1, "rope_divisors"), factors)


@pytest.mark.parametrize("factors", [np.ones(7), np.zeros(8), np.full(8, np.nan)])
def test_rope_freqs_that_cannot_be_divisors_are_refused(factors: Any, tmp_path: Path) -> None:
    builder = tiny_llama()
    data = factors.astype(np.float32).tobytes()
    builder.tensors.append(Tensor("rope_freqs.weight", [len(factors)], 0, data))
    with pytest.raises(ModelError, match=r"frequency factor|NaN or infinite"):
        converted(gguf(tmp_path, builder))


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    builder = keys(
        tiny_llama(),
        ("llama.rope.scaling.type", "s", "linear"),
        ("llama.rope.scaling.factor", "f", 4.0),
    )
    layer = converted(gguf(tmp_path, builder)).layers[0]
    assert (layer["rope_scaling"], layer["rope_factor"]) == (1, 4.0)
    folder = tiny_folder(tmp_path / "m", rope_scaling={"type": "linear", "factor": 2.0})
    layer = converted(folder).layers[0]
    assert (layer["rope_scaling"], layer["rope_factor"]) == (1, 2.0)


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 32}, 0),
        (MISTRAL | {"sliding_window": 32}, 32),
        (MISTRAL | {"sliding_window": None}, 0),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": False}, 0),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, 0),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, 32),
        (
            QWEN2
            | {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"],
            },
            32,
        ),
    ],
)
def test_windows_are_those_of_the_class(
    config: dict[str, Any], window: int, tmp_path: Path
) -> None:
    tensors = dict(tiny_tensors())
    if config.get("architectures") == QWEN2["architectures"]:
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.0.self_attn.{name}.weight"] = np.ones(16, np.float32)
    file = converted(tiny_folder(tmp_path / "m", tensors, **config))
    assert file.layers[0]["window"] == window


def moe_tensors(prefix: str, names: tuple[str, str, str], router: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    tensors = {k: v for k, v in tiny_tensors().items() if ".mlp." not in k}
    tensors["model.layers.0." + router] = rng.standard_normal((3, 64), np.float32)
    for expert in range(3):
        for name, shape in zip(names, ((96, 64), (96, 64), (64, 96)), strict=True):
            key = f"model.layers.0.{prefix}.{expert}.{name}.weight"
            tensors[key] = rng.standard_normal(shape, np.float32)
    return tensors


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(("norm", "want"), [(None, 0), (False, 0), (True, 1)])
def test_norm_topk_prob_means_what_it_says(norm: bool | None, want: int, tmp_path: Path) -> None:
    tensors = moe_tensors("mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate.weight")
    for name in ("q_norm", "k_norm"):
        tensors[f"model.layers.0.self_attn.{name}.weight"] = np.ones(16, np.float32)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "norm_topk_prob": norm}
    file = converted(tiny_folder(tmp_path / "m", tensors, **MOE, **config))
    assert file.layers[0]["renormalise"] == want


def test_fused_experts_equal_separate_ones(tmp_path: Path) -> None:
    """transformers 5 keeps gate_up_proj (E, 2 d_expert, d); both forms are seen in files."""
    separate = moe_tensors("mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate.weight")
    fused = {k: v for k, v in separate.items() if ".experts." not in k}
    stem = "model.layers.0.mlp.experts."

    def stack(name: str) -> np.ndarray:
        return np.stack([separate[f"{stem}{e}.{name}.weight"] for e in range(3)])

    fused[stem + "gate_up_proj"] = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
    fused[stem + "down_proj"] = stack("down_proj")
    config = {"architectures": ["OlmoeForCausalLM"], "num_experts": 3} | MOE
    for tensors in (separate, fused):
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(64, np.float32)
        tensors["model.layers.0.self_attn.k_norm.weight"] = np.ones(32, np.float32)
    one, two = (
        converted(tiny_folder(tmp_path / name, tensors, **config))
        for name, tensors in (("a", separate), ("b", fused))
    )
    for role, name in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
        for expert in range(3):
            want = separate[f"{stem}{expert}.{name}.weight"]
            for file in (one, two):
                np.testing.assert_array_equal(file.weight(0, f"expert_{role}", expert), want)


def test_mixtral_renormalises_and_reads_w1_w3_w2(tmp_path: Path) -> None:
    tensors = moe_tensors(
        "block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight"
    )
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    file = converted(tiny_folder(tmp_path / "m", tensors, num_experts_per_tok=2, **config))
    layer = file.layers[0]
    assert (layer["renormalise"], layer["d_ff"], layer["d_expert"]) == (1, 0, 96)
    for role, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        want = tensors[f"model.layers.0.block_sparse_moe.experts.2.{name}.weight"]
        np.testing.assert_array_equal(file.weight(0, f"expert_{role}", 2), want)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = moe_tensors(
        "block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight"
    )
    del tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    path = tiny_folder(tmp_path / "m", tensors, num_experts_per_tok=2, **config)
    with pytest.raises(ModelError, match=r"experts\.2\.w3\.weight is missing"):
        converted(path)


def test_qwen2moe_of_gguf(tmp_path: Path) -> None:
    """Shared expert, its gate stored as a vector, stacked experts, biases, no renormalisation."""
    builder = tiny_llama(n_layers=1)
    rng = np.random.default_rng(3)

    def add(name: str, dims: list[int]) -> np.ndarray:
        values = rng.standard_normal(tuple(reversed(dims)), np.float32)
        builder.tensors.append(Tensor(f"blk.0.{name}", dims, 0, values.tobytes()))
        return values

    builder.tensors = [
        t
        for t in builder.tensors
        if not str(t.name).endswith(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"))
    ]
    for name, n in {"q": 64, "k": 32, "v": 32}.items():
        add(f"attn_{name}.bias", [n])
    add("ffn_gate_inp.weight", [64, 5])
    gates = add("ffn_gate_exps.weight", [64, 32, 5])
    add("ffn_up_exps.weight", [64, 32, 5])
    downs = add("ffn_down_exps.weight", [32, 64, 5])
    for name in ("gate", "up"):
        add(f"ffn_{name}_shexp.weight", [64, 48])
    add("ffn_down_shexp.weight", [48, 64])
    scale = add("ffn_gate_inp_shexp.weight", [64])
    builder.keys = [(key[0].replace("llama.", "qwen2moe."), *key[1:]) for key in builder.keys]
    keys(
        builder,
        ("general.architecture", "s", "qwen2moe"),
        ("qwen2moe.expert_count", "I", 5),
        ("qwen2moe.expert_used_count", "I", 2),
        ("qwen2moe.expert_feed_forward_length", "I", 32),
        ("qwen2moe.expert_shared_feed_forward_length", "I", 48),
    )
    file = converted(gguf(tmp_path, builder))
    layer = file.layers[0]
    assert (layer["rope_kind"], layer["renormalise"], layer["d_shared"]) == (1, 0, 48)
    assert (layer["n_experts"], layer["top_k"], layer["d_expert"]) == (5, 2, 32)
    assert layer["shared_gate"] == 1
    np.testing.assert_array_equal(file.weight(0, "shared_scale").reshape(-1), scale)
    for expert in range(5):
        np.testing.assert_array_equal(file.weight(0, "expert_gate", expert), gates[expert])
        np.testing.assert_array_equal(file.weight(0, "expert_down", expert), downs[expert])


def test_a_mean_shape_is_no_dense_ffn(tmp_path: Path) -> None:
    """qwen3moe: mlp_only_layers and decoder_sparse_step choose which layers are dense."""
    moe = moe_tensors("mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate.weight")
    tensors = dict(moe)
    for name, values in tiny_tensors(1).items():
        if ".layers.0." in name:
            tensors[name.replace(".0.", ".1.", 1)] = values
    for layer in (0, 1):
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(16, np.float32)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "mlp_only_layers": [1]}
    file = converted(tiny_folder(tmp_path / "m", tensors, num_hidden_layers=2, **MOE, **config))
    assert [(x["n_experts"], x["d_ff"], x["top_k"]) for x in file.layers] == [(3, 0, 2), (0, 96, 0)]
