"""What each family adds to a plain layer: a function of a family, the same for folders and GGUF files.

A function gets the model's keys by their names in config.json (KEYS of gguf_model translates) and the
spec that is common to all families. Sources: the classes of transformers; for keys that GGUF lacks,
llama.cpp's graph of the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.spec import LayerSpec, ModelSpec, Rope

Family = Callable[[Fields, ModelSpec], ModelSpec]


def each_layer(spec: ModelSpec, change: Callable[[LayerSpec, int], LayerSpec]) -> ModelSpec:
    return replace(spec, layers=[change(layer, i) for i, layer in enumerate(spec.layers)])


def is_local(keys: Fields, index: int, every: int) -> bool:
    """Whether a layer has a window: by layer_types or sliding_window_pattern, else all but the last
    of every `every` layers."""
    kinds = keys.get("layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] == "sliding_attention")
    pattern = keys.sequence("sliding_window_pattern")
    if pattern is not None and index < len(pattern):
        return pattern[index] in (True, "L")
    if isinstance(keys.get("sliding_window_pattern"), int):
        every = keys.count("sliding_window_pattern", low=1)
    return index % every < every - 1


def windowed(keys: Fields, spec: ModelSpec, every: int) -> ModelSpec:
    width = keys.count("sliding_window", 0)
    return each_layer(
        spec, lambda layer, i: replace(layer, window=width if is_local(keys, i, every) else 0)
    )


def no_rope(layer: LayerSpec) -> LayerSpec:
    return replace(layer, rope=Rope("none", layer.rope.dim, layer.rope.base))


def one_window(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """Every layer has the window of the file (Mistral, Phi 3, StarCoder 2)."""
    width = keys.count("sliding_window", 0)
    return each_layer(spec, lambda layer, _: replace(layer, window=width))


def qwen(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """Windows by layer_types or from max_window_layers on, where use_sliding_window allows them."""
    if not keys.flag("use_sliding_window", False):
        return spec
    width, first = keys.count("sliding_window", 0), keys.count("max_window_layers", 0)
    kinds = keys.get("layer_types")

    def window(index: int) -> int:
        if isinstance(kinds, list) and index < len(kinds):
            return width if kinds[index] == "sliding_attention" else 0
        return width if index >= first else 0

    return each_layer(spec, lambda layer, i: replace(layer, window=window(i)))


def _gemma_scale(keys: Fields, spec: ModelSpec, layers_of_27b: int) -> float:
    """1 / sqrt(query_pre_attn_scalar). GGUF lacks the key; only the 27B models differ from head_dim."""
    layer = spec.layers[0]
    is_27b = len(spec.layers) == layers_of_27b
    scalar = spec.d_model / layer.n_heads if is_27b else layer.head_dim
    return float(keys.positive("query_pre_attn_scalar", scalar) ** -0.5)


def gemma2(keys: Fields, spec: ModelSpec) -> ModelSpec:
    spec = replace(
        windowed(keys, spec, every=2),
        embedding_scale=math.sqrt(spec.d_model),
        logit_cap=keys.number("final_logit_softcapping", 0.0),
    )
    scale, cap = _gemma_scale(keys, spec, 46), keys.number("attn_logit_softcapping", 0.0)
    return each_layer(spec, lambda layer, _: replace(layer, attention_scale=scale, score_cap=cap))


def gemma3(keys: Fields, spec: ModelSpec) -> ModelSpec:
    spec = replace(
        windowed(keys, spec, every=6),
        embedding_scale=math.sqrt(spec.d_model),
        logit_cap=keys.number("final_logit_softcapping", 0.0),
    )
    scale, cap = _gemma_scale(keys, spec, 62), keys.number("attn_logit_softcapping", 0.0)
    base = keys.positive("rope_local_base_freq", 10000.0)

    def change(layer: LayerSpec, _: int) -> LayerSpec:
        layer = replace(layer, attention_scale=scale, score_cap=cap)
        return plain_rope(layer, base) if layer.window else layer

    return each_layer(spec, change)


def plain_rope(layer: LayerSpec, base: float) -> LayerSpec:
    return replace(layer, rope=Rope(layer.rope.kind, layer.rope.dim, base))


def mistral3(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """Queries grow with the logarithm of the position, in units of the original context."""
    spec = one_window(keys, spec)
    growth = keys.number("llama_4_scaling_beta", 0.0)
    if not growth:
        return spec
    period = keys.count("original_max_position_embeddings", low=1)
    return each_layer(
        spec, lambda layer, _: replace(layer, query_growth=growth, query_period=period)
    )


def smollm3(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """In no_rope_layers, 1 marks a layer that has rope."""
    every = keys.count("no_rope_layer_interval", 4, low=1)
    has_rope = keys.sequence("no_rope_layers")
    spec = qwen(keys, spec)

    def change(layer: LayerSpec, index: int) -> LayerSpec:
        rotates = has_rope[index] if has_rope and index < len(has_rope) else (index + 1) % every
        return layer if rotates else no_rope(layer)

    return each_layer(spec, change)


def granite(keys: Fields, spec: ModelSpec) -> ModelSpec:
    residual = keys.positive("residual_multiplier", 1.0)
    scale = keys.number("attention_multiplier", 0.0) or None
    rotates = keys.flag("rope_finetuned", True)
    spec = replace(
        spec,
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        logit_scale=1 / keys.positive("logits_scaling", 1.0),
    )

    def change(layer: LayerSpec, _: int) -> LayerSpec:
        layer = replace(layer, residual_scale=residual, attention_scale=scale)
        return layer if rotates else no_rope(layer)

    return each_layer(spec, change)


def olmo2(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """Olmo 3 has windows in three of four layers, whose rope is not scaled."""
    if not keys.count("sliding_window", 0):
        return spec
    spec = windowed(keys, spec, every=4)
    base = keys.positive("rope_local_base_freq", spec.layers[0].rope.base)
    return each_layer(spec, lambda layer, _: plain_rope(layer, base) if layer.window else layer)


def cohere2(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """Attention and FFN read one norm; only layers with a window have rope."""
    spec = replace(windowed(keys, spec, every=4), logit_scale=keys.positive("logit_scale", 1.0))

    def change(layer: LayerSpec, _: int) -> LayerSpec:
        layer = replace(layer, dense_source="x_in")
        return layer if layer.window else no_rope(layer)

    return each_layer(spec, change)


def exaone4(keys: Fields, spec: ModelSpec) -> ModelSpec:
    """The 32B has windows in three of four layers, and no rope in the others."""
    if not keys.count("sliding_window", 0):
        return spec
    spec = windowed(keys, spec, every=4)
    return each_layer(spec, lambda layer, _: layer if layer.window else no_rope(layer))
