"""The figures of the benchmark table from the output of its commands, beside what the machine allows.

A step takes at least the longer of two times: reading its weights at the probe's bandwidth, and
computing its products at the rate of tests/bench/multiply.c.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cflow.engine.files.models.spec import LayerSpec, ModelSpec
from cflow.engine.files.synth import load_shape

Q4_0_BYTES = 18 / 32  # a weight


@dataclass(frozen=True)
class Taken:
    """The output of a command, the shape of its model, and this machine's rate of products."""

    found: dict[str, Any]
    shape: str
    gmac_s: float

    @property
    def spec(self) -> ModelSpec:
        return load_shape(self.shape)


@dataclass(frozen=True)
class Figure:
    """runs: min, median, max in `unit`. ceiling: in `unit`. ratio: the value that goals are about.
    steps: of a sweep, (rows a step, rate, ceiling)."""

    unit: str
    runs: dict[str, float]
    ceiling: float | None
    ratio: float | None
    steps: tuple[tuple[int, float, float], ...] = field(default=())


def decode(taken: Taken) -> Figure:
    """One stream; it reads weights, and at a depth also keys and values."""
    found = taken.found
    beside = 1 + found["kv_bytes_per_token"] / found["bytes_per_token"]
    ratio = found["bandwidth_fraction"] * beside
    return Figure("tok/s", found["runs"]["decode_tok_s"], found["decode_tok_s"] / ratio, ratio)


def prefill(taken: Taken) -> Figure:
    n = taken.found["prompt"]
    ceiling = n / floor_s(taken, rows=n, heads=1)
    return _of_ceiling(taken.found["runs"]["prefill_tok_s"], ceiling)


def sixteen(taken: Taken) -> Figure:
    (batch,) = (b for b in taken.found["batch"] if b["streams"] == 16)
    return _of_ceiling(batch["runs"], 16 / floor_s(taken, rows=16, heads=16))


def sweep(taken: Taken) -> Figure:
    """The ratio is the least growth of the rate from one size of step to the next."""
    batches = taken.found["batch"]
    growth = [after["tok_s"] / before["tok_s"] for before, after in pairwise(batches)]
    steps = [
        (b["streams"], b["tok_s"], b["streams"] / floor_s(taken, b["streams"], b["streams"]))
        for b in batches
    ]
    return Figure("tok/s", batches[-1]["runs"], steps[-1][2], min(growth), tuple(steps))


def through(taken: Taken) -> Figure:
    """Rounds of a stream beside the bare engine, which is the ceiling."""
    rounds, n = taken.found["rounds"], taken.found["tokens"]
    bare = statistics.median(n / r["bare_s"] for r in rounds)
    ratio = statistics.median(r["bare_s"] / r["through_s"] for r in rounds)
    return Figure("tok/s", _runs(n / r["through_s"] for r in rounds), bare, ratio)


def overhead(taken: Taken) -> Figure:
    """Extra time of a token over the bare engine."""
    rounds, n = taken.found["rounds"], taken.found["tokens"]
    return Figure("µs", _runs(1e6 * (r["through_s"] - r["bare_s"]) / n for r in rounds), None, None)


def floor_s(taken: Taken, rows: int, heads: int) -> float:
    """Least time of a step whose rows choose experts evenly. heads: rows with logits."""
    spec, found = taken.spec, taken.found
    products = rows * sum(_weights(spec, layer, layer.top_k) for layer in spec.layers)
    products += heads * spec.vocab_size * spec.d_model
    others = sum(
        (_touched(layer, rows) - layer.top_k) * _expert_weights(spec, layer)
        for layer in spec.layers
    )
    n_bytes = found["bytes_per_token"] + Q4_0_BYTES * others
    bounds_ns: tuple[float, float] = products / taken.gmac_s, n_bytes / found["probe_gb_s"]
    return max(bounds_ns) / 1e9


def _touched(layer: LayerSpec, rows: int) -> float:
    """Expected number of a layer's experts that at least one row chooses."""
    if not layer.n_experts:
        return 0
    return layer.n_experts * (1 - (1 - layer.top_k / layer.n_experts) ** rows)


def _weights(spec: ModelSpec, layer: LayerSpec, n_experts: float) -> float:
    matrices = (s for s in layer.shapes(spec.d_model).values() if len(s) == 2)
    return sum(map(math.prod, matrices)) + n_experts * _expert_weights(spec, layer)


def _expert_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    return sum(map(math.prod, layer.expert_shapes(spec.d_model).values()))


def _of_ceiling(runs: dict[str, float], ceiling: float) -> Figure:
    return Figure("tok/s", runs, ceiling, runs["median"] / ceiling)


def _runs(values: Iterable[float]) -> dict[str, float]:
    taken: Sequence[float] = list(values)
    return {"min": min(taken), "median": statistics.median(taken), "max": max(taken)}
