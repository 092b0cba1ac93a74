"""A model from a Hugging Face folder: config.json to a ModelSpec, tensors by role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.quantise import values
from cflow.engine.files.formats.safetensors import SafetensorsFolder
from cflow.engine.files.models.architectures import Architecture, by_class
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.weights import Naming, Stacked, Weights

_BLOCK = "model.layers.{layer}."
_ATTENTION = _BLOCK + "self_attn."
_MLP = _BLOCK + "mlp."
_SHARED = _MLP + "shared_expert."
_MIXTRAL = _BLOCK + "block_sparse_moe."

NAMING = Naming(
    plain={
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "norm1": _BLOCK + "input_layernorm.weight",
        "norm2": _BLOCK + "post_attention_layernorm.weight",
        "q": _ATTENTION + "q_proj.weight",
        "k": _ATTENTION + "k_proj.weight",
        "v": _ATTENTION + "v_proj.weight",
        "o": _ATTENTION + "o_proj.weight",
        "q_bias": _ATTENTION + "q_proj.bias",
        "k_bias": _ATTENTION + "k_proj.bias",
        "v_bias": _ATTENTION + "v_proj.bias",
        "o_bias": _ATTENTION + "o_proj.bias",
        "q_norm": _ATTENTION + "q_norm.weight",
        "k_norm": _ATTENTION + "k_norm.weight",
        "gate": _MLP + "gate_proj.weight",
        "up": _MLP + "up_proj.weight",
        "down": _MLP + "down_proj.weight",
        "router": _MLP + "gate.weight",
        "shared_gate": _SHARED + "gate_proj.weight",
        "shared_up": _SHARED + "up_proj.weight",
        "shared_down": _SHARED + "down_proj.weight",
        "shared_scale": _MLP + "shared_expert_gate.weight",
    },
    stacked={
        "expert_gate": Stacked(_MLP + "experts.gate_up_proj", 0, 2),
        "expert_up": Stacked(_MLP + "experts.gate_up_proj", 1, 2),
        "expert_down": Stacked(_MLP + "experts.down_proj"),
    },
    each={
        "expert_gate": _MLP + "experts.{expert}.gate_proj.weight",
        "expert_up": _MLP + "experts.{expert}.up_proj.weight",
        "expert_down": _MLP + "experts.{expert}.down_proj.weight",
    },
    ignored=r".*\.rotary_emb\.inv_freq",
)
MIXTRAL_NAMING = replace(
    NAMING,
    plain=NAMING.plain | {"router": _MIXTRAL + "gate.weight"},
    each={
        "expert_gate": _MIXTRAL + "experts.{expert}.w1.weight",
        "expert_up": _MIXTRAL + "experts.{expert}.w3.weight",
        "expert_down": _MIXTRAL + "experts.{expert}.w2.weight",
    },
)
BARE = "embed_tokens.weight"  # the embedding of a model without a head
HEAD_ROWS = 1024  # compared at a time
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def weights(folder: SafetensorsFolder) -> Weights:
    """Weights by role. A tied model may store its head again; an equal copy is not read."""
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    is_mixtral = "model.layers.0.block_sparse_moe.gate.weight" in shapes
    naming = MIXTRAL_NAMING if is_mixtral else NAMING
    if BARE in shapes:
        naming = replace(
            naming, plain={k: v.removeprefix("model.") for k, v in naming.plain.items()}
        )
    if folder.config.get("tie_word_embeddings") is True or not _has_head(folder):
        naming = replace(naming, ignored=rf"{naming.ignored}|lm_head\.weight")
    return Weights(str(folder.path), naming, shapes, folder.matrix)


def spec(folder: SafetensorsFolder) -> ModelSpec:
    origin = str(folder.path / "config.json")
    config = Fields(folder.config, origin)
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise config.error("architectures", "does not name one class")
    architecture = by_class(classes[0], origin)
    for key, neutral in {"mlp_bias": (False,), "quantization_config": ()}.items():
        config.refuse(key, *neutral)
    config.refuse("clip_qkv")
    n_layers = config.count("num_hidden_layers", low=1, high=MAX_LAYERS)
    layer = _layer(config, architecture, classes[0])
    return ModelSpec(
        architecture=architecture.name,
        name=config.text("_name_or_path", "") or folder.path.resolve().name,
        d_model=config.count("hidden_size", low=1),
        vocab_size=config.count("vocab_size", low=1),
        context=config.count("max_position_embeddings", low=1),
        tied=not _has_head(folder)
        or (config.flag("tie_word_embeddings", False) and not has_own_head(folder)),
        norm_eps=layer.norm_eps,
        layers=[_place(layer, config, classes[0], index) for index in range(n_layers)],
    )


def _has_head(folder: SafetensorsFolder) -> bool:
    """Whether the model predicts tokens. A bare one, whose names lack "model.", does not."""
    return BARE not in folder.tensors


def has_own_head(folder: SafetensorsFolder) -> bool:
    """Whether a folder has a head whose values are not the embedding's. transformers 5 uses such a
    head even if the config ties it."""
    embedding, head = NAMING.plain["embedding"], NAMING.plain["head"]
    if head not in folder.tensors or embedding not in folder.tensors:
        return False
    if folder.tensors[head].shape != folder.tensors[embedding].shape:
        return True
    one, other = folder.matrix(embedding), folder.matrix(head)
    return not all(
        np.array_equal(values(one.rows(first, n, "f32")), values(other.rows(first, n, "f32")))
        for first in range(0, one.n_rows, HEAD_ROWS)
        for n in [min(HEAD_ROWS, one.n_rows - first)]
    )


def notes(folder: SafetensorsFolder, spec: ModelSpec) -> tuple[str, ...]:
    """What a user should know about how the folder was read."""
    if folder.config.get("tie_word_embeddings") is not True or spec.tied:
        return ()
    return (
        "config.json ties the head to the embedding, but lm_head.weight has other values: it is the "
        "head, as in transformers 5",
    )


def _layer(config: Fields, architecture: Architecture, class_name: str) -> LayerSpec:
    """A layer with its dense FFN and, in a mixture, its experts; _place keeps one of them."""
    n_heads = config.count("num_attention_heads", low=1)
    head_dim = config.count("head_dim", config.count("hidden_size", low=1) // n_heads, low=1)
    activation = config.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.error("hidden_act", f"is {activation!r}; supported: {known}")
    bias = config.flag("attention_bias", False)
    layer = LayerSpec(
        n_heads=n_heads,
        n_kv_heads=config.count("num_key_value_heads", n_heads, low=1),
        head_dim=head_dim,
        rope=_rope(config, head_dim),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        qk_norm=architecture.qk_norm,
        qkv_bias=bias or (architecture.qkv_bias and config.flag("qkv_bias", True)),
        o_bias=bias,
        d_ff=config.count("intermediate_size", low=1),
        activation=ACTIVATIONS[activation],
    )
    if not architecture.moe and class_name != "MixtralForCausalLM":
        return layer
    return _with_experts(layer, config, architecture)


def _with_experts(layer: LayerSpec, config: Fields, architecture: Architecture) -> LayerSpec:
    """Add experts. The key of their number differs between classes and library versions."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    d_shared = 0
    if architecture.name == "qwen2moe":
        d_shared = config.count("shared_expert_intermediate_size", low=1)
    is_mixtral = architecture.name == "llama"
    return replace(
        layer,
        n_experts=config.count(key, low=1),
        top_k=config.count("num_experts_per_tok", low=1),
        renormalise=is_mixtral or config.flag("norm_topk_prob", False),
        d_expert=config.count("moe_intermediate_size", layer.d_ff, low=1),
        d_shared=d_shared,
        shared_gate=d_shared > 0,
    )


def _place(layer: LayerSpec, config: Fields, class_name: str, index: int) -> LayerSpec:
    """The layer at `index`, with its window and either its dense FFN or its experts."""
    layer = replace(layer, window=_window(config, class_name, index))
    if not layer.n_experts:
        return layer
    step = config.count("decoder_sparse_step", 1, low=1)
    if index in config.ids("mlp_only_layers") or (index + 1) % step:
        return replace(
            layer,
            n_experts=0,
            top_k=0,
            renormalise=False,
            d_expert=0,
            d_shared=0,
            shared_gate=False,
        )
    return replace(layer, d_ff=0)


def _window(config: Fields, class_name: str, index: int) -> int:
    """Positions that a layer attends to; 0: all. Mistral and Mixtral have one window for all."""
    width = config.count("sliding_window", 0)
    if class_name in ("MistralForCausalLM", "MixtralForCausalLM"):
        return width
    if not config.flag("use_sliding_window", False):
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return width if kinds[index] == "sliding_attention" else 0
    return width if index >= config.count("max_window_layers", 0) else 0


def _rope(config: Fields, head_dim: int) -> Rope:
    """Rope from rope_parameters (transformers 5), or rope_theta and rope_scaling (older)."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict) or any(isinstance(v, dict) for v in settings.values()):
        raise config.error("rope_parameters", "differ between layers, which is not supported")
    keys = ("rope_theta", "partial_rotary_factor")
    outer = {key: config.get(key) for key in keys if key in config}
    return _rope_of(outer | settings, config, head_dim)


def _rope_of(settings: dict[str, Any], config: Fields, head_dim: int) -> Rope:
    rope = Fields(settings, config.origin)
    kind = rope.text("rope_type", rope.text("type", "default"))
    dim = int(head_dim * rope.positive("partial_rotary_factor", 1.0))
    plain = Rope("half", dim, rope.positive("rope_theta", 10000.0))
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, scaling="linear", factor=rope.positive("factor"))
    if kind != "llama3":
        raise ModelError(
            f"{config.origin}: rope type {kind!r} is not supported; "
            "supported: default, linear, llama3"
        )
    return replace(
        plain,
        scaling="llama3",
        factor=rope.positive("factor"),
        low_freq=rope.positive("low_freq_factor"),
        high_freq=rope.positive("high_freq_factor"),
        original_context=rope.count(
            "original_max_position_embeddings", config.count("max_position_embeddings"), low=1
        ),
    )
