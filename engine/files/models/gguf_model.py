"""A model from a GGUF file: keys to a ModelSpec, tensors by role."""

from __future__ import annotations

from dataclasses import replace

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.models.architectures import Architecture, by_name
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.rope import magnitude, scaled
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.weights import Fused, Naming, Stacked, Weights

_BLOCK = "blk.{layer}."
_EXPERT_NAMES = {"expert_gate": "ffn_gate", "expert_up": "ffn_up", "expert_down": "ffn_down"}

NAMING = Naming(
    plain={
        "embedding": "token_embd.weight",
        "head": "output.weight",
        "final_norm": "output_norm.weight",
        "final_norm_bias": "output_norm.bias",
        "norm1": _BLOCK + "attn_norm.weight",
        "norm1_bias": _BLOCK + "attn_norm.bias",
        "norm2": _BLOCK + "ffn_norm.weight",
        "norm2_bias": _BLOCK + "ffn_norm.bias",
        "post_norm1": _BLOCK + "post_attention_norm.weight",
        "post_norm2": _BLOCK + "post_ffw_norm.weight",
        "q": _BLOCK + "attn_q.weight",
        "k": _BLOCK + "attn_k.weight",
        "v": _BLOCK + "attn_v.weight",
        "o": _BLOCK + "attn_output.weight",
        "q_bias": _BLOCK + "attn_q.bias",
        "k_bias": _BLOCK + "attn_k.bias",
        "v_bias": _BLOCK + "attn_v.bias",
        "o_bias": _BLOCK + "attn_output.bias",
        "q_norm": _BLOCK + "attn_q_norm.weight",
        "k_norm": _BLOCK + "attn_k_norm.weight",
        "gate": _BLOCK + "ffn_gate.weight",
        "up": _BLOCK + "ffn_up.weight",
        "down": _BLOCK + "ffn_down.weight",
        "gate_bias": _BLOCK + "ffn_gate.bias",
        "up_bias": _BLOCK + "ffn_up.bias",
        "down_bias": _BLOCK + "ffn_down.bias",
        "router": _BLOCK + "ffn_gate_inp.weight",
        "shared_gate": _BLOCK + "ffn_gate_shexp.weight",
        "shared_up": _BLOCK + "ffn_up_shexp.weight",
        "shared_down": _BLOCK + "ffn_down_shexp.weight",
        "shared_scale": _BLOCK + "ffn_gate_inp_shexp.weight",
    },
    stacked={role: Stacked(f"{_BLOCK}{n}_exps.weight") for role, n in _EXPERT_NAMES.items()},
    each={role: f"{_BLOCK}{n}.{{expert}}.weight" for role, n in _EXPERT_NAMES.items()},
    ignored=r"rope_(freqs|factors_long|factors_short)\.weight",
    fused={
        "q": Fused(_BLOCK + "attn_qkv.weight", None),
        "k": Fused(_BLOCK + "attn_qkv.weight", 1),
        "v": Fused(_BLOCK + "attn_qkv.weight", 0),
        "gate": Fused(_BLOCK + "ffn_up.weight", None),
        "up": Fused(_BLOCK + "ffn_up.weight", 0),
    },
)

# What GGUF calls the keys of config.json.
KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "logits_scaling": "logit_scale",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "residual_multiplier": "residual_scale",
    "rope_finetuned": "rope.scaling.finetuned",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}

# Keys that change what an architecture computes unless its family reads them, and the value that
# changes nothing.
REFUSED: dict[str, tuple[float | bool, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
NORM_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}


def weights(file: GgufFile) -> Weights:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    names = by_name(_architecture_name(file), str(file.path)).gguf_names
    naming = replace(NAMING, plain=NAMING.plain | names)
    return Weights(str(file.path), naming, shapes, file.matrix)


def _architecture_name(file: GgufFile) -> str:
    return Fields(file.metadata, str(file.path), "general.").text("architecture")


def spec(file: GgufFile) -> ModelSpec:
    """The spec of a file. All layers of these architectures are alike in GGUF."""
    origin = str(file.path)
    general = Fields(file.metadata, origin, "general.")
    architecture = by_name(_architecture_name(file), origin)
    keys = Fields(file.metadata, origin, f"{architecture.name}.", KEYS)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{origin}: tensor token_embd.weight is missing")
    layer = _layer(file, keys, architecture)
    spec = ModelSpec(
        architecture=architecture.name,
        name=general.text("name", file.path.stem),
        d_model=keys.count("embedding_length", low=1),
        vocab_size=file.tensors["token_embd.weight"].n_rows,
        context=keys.count("context_length", low=1),
        tied="output.weight" not in file.tensors,
        norm_eps=layer.norm_eps,
        norm_kind=layer.norm_kind,
        norm_bias=layer.norm_bias,
        layers=[layer] * keys.count("block_count", low=1, high=MAX_LAYERS),
    )
    spec = architecture.family(keys, spec)
    keys.refuse_unread(REFUSED)
    return spec


def _layer(file: GgufFile, keys: Fields, architecture: Architecture) -> LayerSpec:
    d_model = keys.count("embedding_length", low=1)
    n_heads = keys.count("attention.head_count", low=1)
    head_dim = keys.count("attention.key_length", d_model // n_heads, low=1)
    keys.refuse("attention.value_length", head_dim)
    n_experts = keys.count("expert_count", 0)
    if architecture.moe and not n_experts:
        raise keys.error("expert_count", "is missing or 0")
    dense = LayerSpec(
        n_heads=n_heads,
        n_kv_heads=keys.count("attention.head_count_kv", n_heads, low=1),
        head_dim=head_dim,
        rope=_rope(file, keys, architecture, head_dim),
        norm_eps=keys.positive(NORM_EPS[architecture.norm_kind]),
        norm_kind=architecture.norm_kind,
        norm_place=architecture.norm_place,
        norm_bias="blk.0.attn_norm.bias" in file.tensors,
        ffn_bias="blk.0.ffn_up.bias" in file.tensors,
        ungated=architecture.ungated,
        activation=architecture.activation,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
    )
    if not n_experts:
        return replace(dense, d_ff=keys.count("feed_forward_length", low=1))
    d_shared = _shared_width(file, keys, architecture)
    return replace(
        dense,
        n_experts=n_experts,
        top_k=keys.count("expert_used_count", low=1),
        renormalise=keys.flag("expert_weights_norm", architecture.renormalise),
        expert_scale=keys.number("expert_weights_scale", 0.0) or 1.0,
        d_expert=_expert_width(file, keys),
        d_shared=d_shared,
        shared_gate=d_shared > 0,
    )


def _expert_width(file: GgufFile, keys: Fields) -> int:
    """Width of an expert, from the tensor: some files omit the key, others give the dense width."""
    stacked = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if stacked is not None and len(stacked.shape) == 3:
        return stacked.shape[1]
    width = keys.count("feed_forward_length", 0)
    return keys.count("expert_feed_forward_length", width, low=1)


def _shared_width(file: GgufFile, keys: Fields, architecture: Architecture) -> int:
    if architecture.name != "qwen2moe":
        return 0
    tensor = file.tensors.get("blk.0.ffn_up_shexp.weight")
    width = tensor.n_rows if tensor else None
    return keys.count("expert_shared_feed_forward_length", width, low=1)


def _rope(file: GgufFile, keys: Fields, architecture: Architecture, head_dim: int) -> Rope:
    dim = keys.count("rope.dimension_count", head_dim, low=2, high=head_dim)
    plain = Rope(architecture.gguf_rope, dim, keys.positive("rope.freq_base", 10000.0))
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in file.tensors:
        return replace(plain, divisors=_divisors(file, "rope_freqs.weight"))
    if "rope_factors_long.weight" in file.tensors:
        return replace(
            plain,
            divisors=_divisors(file, "rope_factors_short.weight"),
            long_divisors=_divisors(file, "rope_factors_long.weight"),
            gain=keys.positive("rope.scaling.attn_factor", 1.0),
            original_context=keys.count("rope.scaling.original_context_length", low=1),
        )
    if kind == "none" and "rope.scale_linear" in keys and factor != 1:
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise keys.error(
            "rope.scaling.type",
            f"is {kind!r}, which is not supported; supported: none, linear, yarn, and longrope with "
            "the tensors of its factors",
        )
    return scaled(plain, {"none": "default"}.get(kind, kind), _as_in_config(keys, factor))


def _as_in_config(keys: Fields, factor: float) -> Fields:
    """The keys of a scaling, which are known by their names in rope_parameters."""
    names = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "factor": "rope.scaling.factor",
        "attention_factor": "rope.scaling.yarn_attn_factor",
    }
    # mscale and mscale_all_dim are equal wherever a log multiplier is stored: they cancel out
    gain = 1.0 if keys.number("rope.scaling.yarn_log_multiplier", 0.0) else magnitude(factor)
    values = {key: keys.get(key) for key in names.values()}
    values |= {names["factor"]: factor}
    values |= {names["attention_factor"]: keys.positive(names["attention_factor"], gain)}
    return Fields(values, keys.origin, names=names)


def _divisors(file: GgufFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    return tuple(file.matrix(name).floats().reshape(-1).tolist())
