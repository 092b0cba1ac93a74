"""A model from a GGUF file: keys to a ModelSpec, tensors by role."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.models.architectures import Architecture, by_name
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.weights import Naming, Stacked, Weights

_BLOCK = "blk.{layer}."
_EXPERT_NAMES = {"expert_gate": "ffn_gate", "expert_up": "ffn_up", "expert_down": "ffn_down"}

NAMING = Naming(
    plain={
        "embedding": "token_embd.weight",
        "head": "output.weight",
        "final_norm": "output_norm.weight",
        "norm1": _BLOCK + "attn_norm.weight",
        "norm2": _BLOCK + "ffn_norm.weight",
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
        "router": _BLOCK + "ffn_gate_inp.weight",
        "shared_gate": _BLOCK + "ffn_gate_shexp.weight",
        "shared_up": _BLOCK + "ffn_up_shexp.weight",
        "shared_down": _BLOCK + "ffn_down_shexp.weight",
        "shared_scale": _BLOCK + "ffn_gate_inp_shexp.weight",
    },
    stacked={role: Stacked(f"{_BLOCK}{n}_exps.weight") for role, n in _EXPERT_NAMES.items()},
    each={role: f"{_BLOCK}{n}.{{expert}}.weight" for role, n in _EXPERT_NAMES.items()},
    ignored=r"rope_freqs\.weight",
)

# Keys that change what an architecture computes, and the value that changes nothing.
REFUSED: dict[str, tuple[float | bool, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
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


def weights(file: GgufFile) -> Weights:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return Weights(str(file.path), NAMING, shapes, file.matrix)


def spec(file: GgufFile) -> ModelSpec:
    """The spec of a file. All layers of these architectures are alike in GGUF."""
    origin = str(file.path)
    general = Fields(file.metadata, origin, "general.")
    architecture = by_name(general.text("architecture"), origin)
    keys = Fields(file.metadata, origin, f"{architecture.name}.")
    for key, neutral in REFUSED.items():
        keys.refuse(key, *neutral)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{origin}: tensor token_embd.weight is missing")
    layer = _layer(file, keys, architecture)
    return ModelSpec(
        architecture=architecture.name,
        name=general.text("name", file.path.stem),
        d_model=keys.count("embedding_length", low=1),
        vocab_size=file.tensors["token_embd.weight"].n_rows,
        context=keys.count("context_length", low=1),
        tied="output.weight" not in file.tensors,
        norm_eps=layer.norm_eps,
        layers=[layer] * keys.count("block_count", low=1, high=MAX_LAYERS),
    )


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
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        window=keys.count("attention.sliding_window", 0),
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
    base = keys.positive("rope.freq_base", 10000.0)
    kind = architecture.gguf_rope
    scaling = keys.text("rope.scaling.type", "none")
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, kind, dim, base)
    if scaling == "linear" or (scaling == "none" and "rope.scale_linear" in keys and factor != 1):
        return Rope(kind, dim, base, "linear", factor)
    if scaling != "none":
        raise keys.error(
            "rope.scaling.type", f"is {scaling!r}, which is not supported; supported: none, linear"
        )
    return Rope(kind, dim, base)


def _llama3(file: GgufFile, kind: str, dim: int, base: float) -> Rope:
    """Rope parameters from Llama 3's scaling, which GGUF stores as a divisor per frequency."""
    matrix = file.matrix("rope_freqs.weight")
    divisors = matrix.floats().reshape(-1)
    factor = float(divisors.max())
    if divisors.size == dim // 2 and np.all(divisors == 1):
        return Rope(kind, dim, base)
    rope = Rope(kind, dim, base, "llama3", factor, 1.0, 4.0, 8192)
    if divisors.size != dim // 2 or not np.allclose(divisors, llama3_divisors(rope), rtol=1e-4):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, original "
            "context 8192); other frequency factors are not supported"
        )
    return rope


def llama3_divisors(rope: Rope) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Divisors of the dim / 2 frequencies, by the formula of _compute_llama3_parameters in
    transformers."""
    frequencies = rope.base ** (-np.arange(0, rope.dim, 2) / rope.dim)
    turns = rope.original_context * frequencies / (2 * math.pi)
    smooth = np.clip((turns - rope.low_freq) / (rope.high_freq - rope.low_freq), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope.factor + smooth))
