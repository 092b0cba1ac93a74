"""A pipeline-native model from a folder that the lab exports."""

from __future__ import annotations

from cflow.engine.files.formats.safetensors import SafetensorsFolder
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.weights import Naming, Stacked, Weights

MODEL_TYPE = "cflow_pipeline"
CLASS = "CflowPipelineForCausalLM"

_BLOCK = "blocks.{layer}."
_ATTENTION = _BLOCK + "attention."
_DENSE = _BLOCK + "dense."
_EXPERTS = _BLOCK + "experts."
_EXPERT_ROLES = {f"expert_{part}": _EXPERTS + part for part in ("gate", "up", "down")}

NAMING = Naming(
    plain={
        "embedding": "embedding.weight",
        "head": "head.weight",
        "final_norm": "final_norm.weight",
        "norm1": _BLOCK + "norm1.weight",
        "norm2": _BLOCK + "norm2.weight",
        "q": _ATTENTION + "q.weight",
        "k": _ATTENTION + "k.weight",
        "v": _ATTENTION + "v.weight",
        "o": _ATTENTION + "o.weight",
        "gate": _DENSE + "gate",
        "up": _DENSE + "up",
        "down": _DENSE + "down",
        "router": _EXPERTS + "router",
    },
    stacked={role: Stacked(name) for role, name in _EXPERT_ROLES.items()},
    each=_EXPERT_ROLES,
    ignored="",
)


def weights(folder: SafetensorsFolder) -> Weights:
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    return Weights(str(folder.path), NAMING, shapes, folder.matrix)


def spec(folder: SafetensorsFolder) -> ModelSpec:
    """The spec from config.json, whose keys are the fields of Shape and Arm of the lab."""
    config = Fields(folder.config, str(folder.path / "config.json"))
    n_layers = config.count("n_layers", low=1, high=MAX_LAYERS)
    passes = config.count("passes", 1, low=1)
    if n_layers % passes:
        raise config.error("passes", f"is {passes}, which does not divide {n_layers} layers")
    return ModelSpec(
        architecture=MODEL_TYPE,
        name=folder.path.resolve().name,
        d_model=config.count("d_model", low=1),
        vocab_size=config.count("vocab_size", low=1),
        context=config.count("context", low=1),
        tied=False,
        norm_eps=config.positive("norm_eps"),
        layers=[_layer(config)] * (n_layers // passes),
        passes=passes,
    )


def _layer(config: Fields) -> LayerSpec:
    n_heads = config.count("n_heads", low=1)
    d_model = config.count("d_model", low=1)
    if d_model % n_heads:
        raise config.error("n_heads", f"is {n_heads}, which does not divide d_model, {d_model}")
    head_dim = d_model // n_heads
    sources = ("post_attention", "x_in", "x_in_previous")
    return LayerSpec(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        rope=Rope("half", head_dim, config.positive("rope_base")),
        norm_eps=config.positive("norm_eps"),
        v_norm=config.flag("v_norm"),
        d_ff=config.count("d_ff", low=1),
        activation="gelu_tanh",
        activation_on_up=True,
        n_experts=config.count("n_experts", low=1),
        top_k=config.count("top_k", low=1),
        renormalise=True,
        d_expert=config.count("d_expert", low=1),
        dense_source=_one_of(config, "dense_source", sources),
        expert_anchor=_one_of(config, "expert_anchor", sources[:2]),
        expert_delay=config.count("expert_delay", high=MAX_LAYERS),
        residual_scale=config.positive("residual_scale"),
    )


def _one_of(config: Fields, key: str, allowed: tuple[str, ...]) -> str:
    value = config.text(key)
    if value not in allowed:
        raise config.error(key, f"is {value!r}; supported: {', '.join(allowed)}")
    return value
