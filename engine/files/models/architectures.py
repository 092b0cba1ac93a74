"""Supported architectures: what a name implies that the files do not state."""

from __future__ import annotations

from dataclasses import dataclass, field

from cflow.engine.base.errors import ModelError
from cflow.engine.files.models import families
from cflow.engine.files.models.families import Family


@dataclass(frozen=True)
class Architecture:
    """name: GGUF's general.architecture. classes: entries of config.json's "architectures".

    hf_rope, gguf_rope: which dimensions rotate together; the GGUF converters of some families permute
    the Q and K rows. renormalise: whether the expert weights of a token sum to 1, if GGUF does not
    say. hf_offset: 1 if norms multiply by (1 + w); GGUF stores 1 + w. tied: whether the head is the
    embedding, if config.json does not say. hf_names, gguf_names: of tensors, by role, where they differ
    from most. family: what its layers add to plain ones.
    """

    name: str
    classes: tuple[str, ...]
    qkv_bias: bool = False
    qk_norm: str = "none"
    moe: bool = False
    hf_rope: str = "half"
    gguf_rope: str = "half"
    renormalise: bool = False
    norm_kind: str = "rms"
    norm_place: str = "before"
    hf_offset: float = 0.0
    activation: str = "silu"
    ungated: bool = False
    tied: bool = False
    hf_names: dict[str, str] = field(default_factory=dict)
    gguf_names: dict[str, str] = field(default_factory=dict)
    family: Family = lambda _keys, spec: spec


_HF = "model.layers.{layer}."
_AFTER = {
    "post_norm1": _HF + "post_attention_layernorm.weight",
    "post_norm2": _HF + "post_feedforward_layernorm.weight",
}
_AROUND = _AFTER | {"norm2": _HF + "pre_feedforward_layernorm.weight"}

ARCHITECTURES = (
    Architecture(
        "llama",
        ("MistralForCausalLM", "MixtralForCausalLM"),
        gguf_rope="interleaved",
        renormalise=True,
        family=families.one_window,
    ),
    Architecture("llama", ("LlamaForCausalLM",)),  # a folder's; a GGUF file's is the one above
    Architecture("qwen2", ("Qwen2ForCausalLM",), qkv_bias=True, family=families.qwen),
    Architecture("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), qk_norm="head", family=families.qwen),
    Architecture(
        "qwen2moe", ("Qwen2MoeForCausalLM",), qkv_bias=True, moe=True, family=families.qwen
    ),
    Architecture(
        "qwen3moe",
        ("Qwen3MoeForCausalLM",),
        qk_norm="head",
        moe=True,
        renormalise=True,
        family=families.qwen,
    ),
    Architecture("olmoe", ("OlmoeForCausalLM",), qk_norm="full", moe=True),
    Architecture(
        "gemma2",
        ("Gemma2ForCausalLM",),
        norm_place="around",
        hf_offset=1.0,
        activation="gelu_tanh",
        tied=True,
        hf_names=_AROUND,
        family=families.gemma2,
    ),
    Architecture(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        qk_norm="head",
        norm_place="around",
        hf_offset=1.0,
        activation="gelu_tanh",
        tied=True,
        hf_names=_AROUND,
        family=families.gemma3,
    ),
    Architecture("phi3", ("Phi3ForCausalLM",), family=families.one_window),
    Architecture(
        "mistral3",
        ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        gguf_rope="interleaved",
        family=families.mistral3,
    ),
    Architecture(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        gguf_rope="interleaved",
        tied=True,
        family=families.smollm3,
    ),
    Architecture(
        "granite", ("GraniteForCausalLM",), gguf_rope="interleaved", family=families.granite
    ),
    Architecture(
        "olmo2",
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        qk_norm="full",
        norm_place="after",
        hf_names=_AFTER,
        family=families.olmo2,
    ),
    Architecture(
        "glm4",
        ("Glm4ForCausalLM",),
        norm_place="around",
        hf_rope="interleaved",
        gguf_rope="interleaved",
        hf_names={
            "post_norm1": _HF + "post_self_attn_layernorm.weight",
            "post_norm2": _HF + "post_mlp_layernorm.weight",
        },
    ),
    Architecture(
        "cohere2",
        ("Cohere2ForCausalLM",),
        norm_kind="layer",
        hf_rope="interleaved",
        gguf_rope="interleaved",
        tied=True,
        hf_names={"norm2": _HF + "input_layernorm.weight"},
        gguf_names={"norm2": "blk.{layer}.attn_norm.weight"},
        family=families.cohere2,
    ),
    Architecture(
        "exaone4",
        ("Exaone4ForCausalLM",),
        qk_norm="head",
        norm_place="after",
        hf_names=_AFTER,
        family=families.exaone4,
    ),
    Architecture(
        "seed_oss",
        ("SeedOssForCausalLM",),
        gguf_names={"norm2": "blk.{layer}.post_attention_norm.weight"},
    ),
    Architecture(
        "ernie4_5",
        ("Ernie4_5ForCausalLM",),
        hf_rope="interleaved",
        gguf_rope="interleaved",
        tied=True,
    ),
    Architecture(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        norm_kind="layer",
        activation="gelu_tanh",
        ungated=True,
        tied=True,
        hf_names={
            f"{role}{suffix}": f"{_HF}mlp.{name}.{kind}"
            for role, name in (("up", "c_fc"), ("down", "c_proj"))
            for suffix, kind in (("", "weight"), ("_bias", "bias"))
        },
        family=families.one_window,
    ),
    Architecture(
        "hunyuan-dense",
        ("HunYuanDenseV1ForCausalLM",),
        qk_norm="rotated",
        hf_names={
            "q_norm": _HF + "self_attn.query_layernorm.weight",
            "k_norm": _HF + "self_attn.key_layernorm.weight",
        },
    ),
)


def by_name(name: str, origin: str) -> Architecture:
    """The architecture of a GGUF file."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(dict.fromkeys(a.name for a in ARCHITECTURES))
    raise ModelError(f"{origin}: unknown architecture {name!r}; supported: {known}")


def by_class(name: str, origin: str) -> Architecture:
    """The architecture of a transformers class."""
    for architecture in ARCHITECTURES:
        if name in architecture.classes:
            return architecture
    known = ", ".join(cls for a in ARCHITECTURES for cls in a.classes)
    raise ModelError(f"{origin}: unknown architecture {name!r}; supported: {known}")
