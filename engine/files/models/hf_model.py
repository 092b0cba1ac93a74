"""A model from a Hugging Face folder: config.json to a ModelSpec, tensors by role."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.quantise import values
from cflow.engine.files.formats.safetensors import SafetensorsFolder
from cflow.engine.files.models import quantised
from cflow.engine.files.models.architectures import Architecture, by_class
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.rope import scaled
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.weights import Fused, Naming, Stacked, Weights

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
        "final_norm_bias": "model.norm.bias",
        "norm1": _BLOCK + "input_layernorm.weight",
        "norm1_bias": _BLOCK + "input_layernorm.bias",
        "norm2": _BLOCK + "post_attention_layernorm.weight",
        "norm2_bias": _BLOCK + "post_attention_layernorm.bias",
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
        "gate_bias": _MLP + "gate_proj.bias",
        "up_bias": _MLP + "up_proj.bias",
        "down_bias": _MLP + "down_proj.bias",
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
    fused={
        "q": Fused(_ATTENTION + "qkv_proj.weight", None),
        "k": Fused(_ATTENTION + "qkv_proj.weight", 1),
        "v": Fused(_ATTENTION + "qkv_proj.weight", 0),
        "gate": Fused(_MLP + "gate_up_proj.weight", None),
        "up": Fused(_MLP + "gate_up_proj.weight", 0),
    },
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
# Prefixes of the text model in a checkpoint that sees images too, and of the rest.
TEXT = re.compile(r"(?:model\.language_model\.|language_model\.model\.)")
OTHER_MODES = r"(?:model\.)?(?:vision_tower|multi_modal_projector|vision_model)\..*"
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
    tensors = quantised.stored(folder)
    stored = {_text_name(name): name for name in tensors.shapes}
    shapes = {name: tensors.shapes[stored[name]] for name in stored}
    is_mixtral = "model.layers.0.block_sparse_moe.gate.weight" in shapes
    naming = MIXTRAL_NAMING if is_mixtral else NAMING
    architecture = by_class(_class_name(folder), str(folder.path))
    naming = replace(naming, plain=naming.plain | architecture.hf_names)
    if BARE in shapes:
        naming = replace(
            naming, plain={k: v.removeprefix("model.") for k, v in naming.plain.items()}
        )
    if _is_tied(folder, architecture) or not _has_head(folder):
        naming = replace(naming, ignored=rf"{naming.ignored}|lm_head\.weight")
    return Weights(str(folder.path), naming, shapes, lambda name: tensors.matrix(stored[name]))


def _text_name(name: str) -> str:
    return "lm_head.weight" if name == "language_model.lm_head.weight" else TEXT.sub("model.", name)


def _class_name(folder: SafetensorsFolder) -> str:
    config = Fields(folder.config, str(folder.path / "config.json"))
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise config.error("architectures", "does not name one class")
    return classes[0]


def _is_tied(folder: SafetensorsFolder, architecture: Architecture) -> bool:
    config = Fields(_text_config(folder.config), str(folder.path / "config.json"))
    return config.flag("tie_word_embeddings", architecture.tied)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the keys of text_config, and with those of rope_parameters that a family reads
    among the others. In rope_parameters by kind of layer, sliding_attention only has a base."""
    inner = config.get("text_config")
    merged = config | (inner if isinstance(inner, dict) else {})
    rope = merged.get("rope_parameters") or merged.get("rope_scaling")
    if not isinstance(rope, dict):
        return merged
    if isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention")
        local = local if isinstance(local, dict) else {}
        if local.get("rope_type", "default") != "default":
            raise ModelError("config.json: rope_parameters scale layers with a window")
        merged |= {"rope_local_base_freq": local.get("rope_theta")}
        rope = rope["full_attention"]
    keys = ("llama_4_scaling_beta", "original_max_position_embeddings")
    return merged | {"rope_parameters": rope} | {key: rope[key] for key in keys if key in rope}


def spec(folder: SafetensorsFolder) -> ModelSpec:
    origin = str(folder.path / "config.json")
    class_name = _class_name(folder)
    architecture = by_class(class_name, origin)
    config = Fields(_text_config(folder.config), origin)
    quantised.stored(folder)  # refuses unknown schemes first
    config.refuse("clip_qkv")
    n_layers = config.count("num_hidden_layers", low=1, high=MAX_LAYERS)
    names = {_text_name(name) for name in folder.tensors}
    layer = _layer(config, architecture, class_name, names)
    spec = ModelSpec(
        architecture=architecture.name,
        name=config.text("_name_or_path", "") or folder.path.resolve().name,
        d_model=config.count("hidden_size", low=1),
        vocab_size=config.count("vocab_size", low=1),
        context=config.count("max_position_embeddings", low=1),
        tied=not _has_head(folder) or (_is_tied(folder, architecture) and not has_own_head(folder)),
        norm_eps=layer.norm_eps,
        norm_kind=layer.norm_kind,
        norm_bias=layer.norm_bias,
        norm_offset=layer.norm_offset,
        layers=[_place(layer, config, index) for index in range(n_layers)],
    )
    return architecture.family(config, spec)


def _has_head(folder: SafetensorsFolder) -> bool:
    """Whether the model predicts tokens. A bare one, whose names lack "model.", does not."""
    return BARE not in folder.tensors


def has_own_head(folder: SafetensorsFolder) -> bool:
    """Whether a folder has a head whose values are not the embedding's. transformers 5 uses such a
    head even if the config ties it."""
    stored = {_text_name(name): name for name in folder.tensors}
    embedding, head = (stored.get(NAMING.plain[role], "") for role in ("embedding", "head"))
    if not embedding or not head:
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
        return quantised.notes(folder)
    return (
        *quantised.notes(folder),
        "config.json ties the head to the embedding, but lm_head.weight has other values: it is the "
        "head, as in transformers 5",
    )


def _layer(
    config: Fields, architecture: Architecture, class_name: str, names: set[str]
) -> LayerSpec:
    """A layer with its dense FFN and, in a mixture, its experts; _place keeps one of them. names: of
    the tensors; biases are where they are, or where the config promises them."""
    n_heads = config.count("num_attention_heads", low=1)
    head_dim = config.count("head_dim", config.count("hidden_size", low=1) // n_heads, low=1)
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    activation = config.text(key, "silu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.error(key, f"is {activation!r}; supported: {known}")
    plain = NAMING.plain | architecture.hf_names

    def has(role: str) -> bool:
        return plain[role].format(layer=0) in names

    layer = LayerSpec(
        n_heads=n_heads,
        n_kv_heads=config.count("num_key_value_heads", n_heads, low=1),
        head_dim=head_dim,
        rope=_rope(config, architecture.hf_rope, head_dim),
        norm_eps=_norm_eps(config, architecture.norm_kind),
        norm_offset=architecture.hf_offset,
        norm_kind=architecture.norm_kind,
        norm_place=architecture.norm_place,
        norm_bias=has("norm1_bias"),
        qk_norm=architecture.qk_norm,
        qkv_bias=has("q_bias")
        or config.flag("attention_bias", False)
        or (architecture.qkv_bias and config.flag("qkv_bias", True)),
        o_bias=has("o_bias"),
        ffn_bias=has("up_bias") or config.flag("mlp_bias", False),
        ungated=architecture.ungated,
        d_ff=config.count("intermediate_size", low=1),
        activation=ACTIVATIONS[activation],
    )
    if not architecture.moe and class_name != "MixtralForCausalLM":
        return layer
    return _with_experts(layer, config, architecture)


def _norm_eps(config: Fields, norm_kind: str) -> float:
    if norm_kind == "rms":
        return config.positive("rms_norm_eps", 1e-6)
    return config.positive("norm_epsilon" if "norm_epsilon" in config else "layer_norm_eps")


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


def _place(layer: LayerSpec, config: Fields, index: int) -> LayerSpec:
    """The layer at `index`, with either its dense FFN or its experts."""
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


def _rope(config: Fields, kind: str, head_dim: int) -> Rope:
    """Rope from rope_parameters (transformers 5), or rope_theta and rope_scaling (older)."""
    settings = config.get("rope_parameters") or {}
    if not isinstance(settings, dict) or any(isinstance(v, dict) for v in settings.values()):
        raise config.error("rope_parameters", "differ between layers, which is not supported")
    keys = (
        *("rope_theta", "partial_rotary_factor"),
        *("max_position_embeddings", "original_max_position_embeddings"),
    )
    outer = {key: config.get(key) for key in keys if key in config}
    rope = Fields(outer | settings, config.origin)
    dim = int(head_dim * rope.positive("partial_rotary_factor", 1.0))
    plain = Rope(kind, dim, rope.positive("rope_theta", 10000.0))
    return scaled(plain, rope.text("rope_type", rope.text("type", "default")), rope)
