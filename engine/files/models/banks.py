"""A model's weights in layer order: the order in which a step consumes them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cflow.engine.files.formats.cflow import MODEL_LEVEL, Run, Weight
from cflow.engine.files.models.spec import ModelSpec

Shape = tuple[int, ...]
UPS = ("up", "shared_up", "expert_up")


class Origin(Protocol):
    """A source of weights: a file, or a random generator."""

    def weight(self, role: str, block: int, shape: Shape) -> Weight: ...

    def experts(self, role: str, block: int, n_experts: int, shape: Shape) -> list[Weight]: ...


def resident(spec: ModelSpec, origin: Origin) -> list[Run]:
    """The resident bank. A tied embedding is also the head, so it goes last."""
    shapes = spec.global_shapes()
    last = "embedding" if spec.tied else "head"
    runs: list[Run] = []
    if not spec.tied:
        runs.append((origin.weight("embedding", MODEL_LEVEL, shapes["embedding"]),))
    for block, layer in enumerate(spec.layers):
        runs += [(_constant(role, block, row),) for role, row in layer.constants().items()]
        roles = layer.shapes(spec.d_model).items()
        runs += _interleaved([origin.weight(role, block, shape) for role, shape in roles])
    runs += [
        (origin.weight(role, MODEL_LEVEL, shapes[role]),)
        for role in ("final_norm", "final_norm_bias", last)
        if role in shapes
    ]
    return runs


def _constant(role: str, block: int, values: tuple[float, ...]) -> Weight:
    row = np.array(values, "<f4").view(np.uint8)[None]
    return Weight(role, block, "f32", 1, len(values), lambda *_: row, is_vector=True)


def expert_records(spec: ModelSpec, origin: Origin) -> dict[int, list[list[Run]]]:
    """Records by block with experts, then by expert: gate and up interleaved, then down."""
    records = {}
    for block, layer in enumerate(spec.layers):
        if not layer.n_experts:
            continue
        roles = layer.expert_shapes(spec.d_model).items()
        columns = [origin.experts(role, block, layer.n_experts, shape) for role, shape in roles]
        records[block] = [_interleaved(list(one)) for one in zip(*columns, strict=True)]
    return records


def _interleaved(weights: list[Weight]) -> list[Run]:
    """Weights as runs: an up joins the run of the gate before it, if there is one."""
    runs: list[Run] = []
    for weight in weights:
        gate = weight.role.removesuffix("up") + "gate"
        if weight.role in UPS and runs and runs[-1][-1].role == gate:
            runs[-1] = (*runs[-1], weight)
        else:
            runs.append((weight,))
    return runs
