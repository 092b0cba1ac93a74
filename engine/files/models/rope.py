"""Rotary scalings as divisors of the frequencies and a gain, by the formulas of transformers'
modeling_rope_utils."""

from __future__ import annotations

import math
from dataclasses import replace

from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.spec import Rope

SCALINGS = "default, linear, dynamic (with alpha), llama3, yarn, longrope"


def scaled(plain: Rope, kind: str, keys: Fields) -> Rope:
    """`plain` with a scaling as config.json describes it in rope_parameters: `keys`."""
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, scaling="linear", factor=keys.positive("factor"))
    if kind == "llama3":
        return replace(
            plain,
            scaling="llama3",
            factor=keys.positive("factor"),
            low_freq=keys.positive("low_freq_factor"),
            high_freq=keys.positive("high_freq_factor"),
            original_context=_original_context(keys),
        )
    if kind == "yarn":
        return _yarn(plain, keys)
    if kind in ("longrope", "su"):
        return _longrope(plain, keys)
    if kind == "dynamic" and "alpha" in keys:
        # HunYuan: a fixed alpha stretches the base; nothing depends on the length
        stretch = keys.positive("alpha") ** (plain.dim / (plain.dim - 2))
        return replace(plain, base=plain.base * stretch)
    raise keys.error("rope_type", f"is {kind!r}, which is not supported; supported: {SCALINGS}")


def _original_context(keys: Fields) -> int:
    context = keys.get("max_position_embeddings")
    return keys.count("original_max_position_embeddings", context, low=1)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(plain: Rope, keys: Fields) -> Rope:
    """YaRN (arXiv 2309.00071): slow rotations are divided by `factor`, fast ones kept, with a ramp
    between the pairs that turn beta_slow and beta_fast times within the original context."""
    original = _original_context(keys)
    factor = keys.positive("factor")
    dim, half = plain.dim, plain.dim // 2

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

    low = pair_of(keys.number("beta_fast", 0.0) or 32)
    high = pair_of(keys.number("beta_slow", 0.0) or 1)
    if keys.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    ramps = (min(max((i - low) / span, 0.0), 1.0) for i in range(half))
    return replace(
        plain,
        divisors=tuple(1 / (1 - ramp + ramp / factor) for ramp in ramps),
        gain=_yarn_gain(keys, factor),
        original_context=original,
    )


def _yarn_gain(keys: Fields, factor: float) -> float:
    if "attention_factor" in keys:
        return keys.positive("attention_factor")
    if keys.number("mscale", 0.0) and keys.number("mscale_all_dim", 0.0):
        one, other = keys.number("mscale"), keys.number("mscale_all_dim")
        return magnitude(factor, one) / magnitude(factor, other)
    return magnitude(factor)


def _longrope(plain: Rope, keys: Fields) -> Rope:
    """LongRoPE (arXiv 2402.13753): a table for the original context and one for longer ones."""
    original = _original_context(keys)
    context = keys.count("max_position_embeddings", low=1)
    factor = context / original if context > original else 1.0
    gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        plain,
        divisors=keys.positives("short_factor"),
        long_divisors=keys.positives("long_factor"),
        gain=keys.positive("attention_factor", gain),
        original_context=original,
    )
