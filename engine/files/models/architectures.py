"""Supported architectures: what a name implies that the files do not state."""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """name: GGUF's general.architecture. classes: entries of config.json's "architectures".

    gguf_rope: of a GGUF file, whose converter permutes the Q and K rows of llama so that rotated pairs
    are adjacent. renormalise: whether the expert weights of a token sum to 1, if GGUF does not say.
    """

    name: str
    classes: tuple[str, ...]
    qkv_bias: bool = False
    qk_norm: str = "none"
    moe: bool = False
    gguf_rope: str = "half"
    renormalise: bool = False


ARCHITECTURES = (
    Architecture(
        "llama",
        ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        gguf_rope="interleaved",
        renormalise=True,
    ),
    Architecture("qwen2", ("Qwen2ForCausalLM",), qkv_bias=True),
    Architecture("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), qk_norm="head"),
    Architecture("qwen2moe", ("Qwen2MoeForCausalLM",), qkv_bias=True, moe=True),
    Architecture("qwen3moe", ("Qwen3MoeForCausalLM",), qk_norm="head", moe=True, renormalise=True),
    Architecture("olmoe", ("OlmoeForCausalLM",), qk_norm="full", moe=True),
)


def by_name(name: str, origin: str) -> Architecture:
    """The architecture of a GGUF file."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(a.name for a in ARCHITECTURES)
    raise ModelError(f"{origin}: unknown architecture {name!r}; supported: {known}")


def by_class(name: str, origin: str) -> Architecture:
    """The architecture of a transformers class."""
    for architecture in ARCHITECTURES:
        if name in architecture.classes:
            return architecture
    known = ", ".join(cls for a in ARCHITECTURES for cls in a.classes)
    raise ModelError(f"{origin}: unknown architecture {name!r}; supported: {known}")
