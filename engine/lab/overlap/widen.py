"""A model with wider FFNs and the same output: the added weights are zero.

A small trained model routes as trained models do, but its experts are too small to load a disk.
Widened, it keeps its routing and text at any size.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cflow.engine.files.formats.cflow import Contents, Run, Weight, write
from cflow.engine.files.formats.quantise import encode
from cflow.engine.files.formats.tiles import Bytes, Floats, Planes, pack, stripe_rows
from cflow.engine.lab.errors import LabError
from cflow.engine.native import Model, Tensor, const

_ROWS = ("GATE", "UP", "EXPERT_GATE", "EXPERT_UP")  # roles whose rows are the FFN's width
_COLUMNS = ("DOWN", "EXPERT_DOWN")
_UPS = ("UP", "EXPERT_UP")


def widen(source: Path, out: Path, d_ff: int, d_expert: int) -> None:
    """Writes source, a model in q8_0, with FFNs and experts of these widths.

    Matrices are decoded and encoded again with the same scales, so nothing is lost. LabError: a width
    is less than the model's own."""
    with closing(Model(str(source))) as model:
        write(_contents(model, {False: d_ff, True: d_expert}), out)


def _contents(model: Model, widths: dict[bool, int]) -> Contents:
    runs: dict[int, list[list[Run]]] = {}
    resident: list[Run] = []
    for index, tensor in enumerate(model.tensors):
        if tensor.role < const.Role.EXPERT_GATE:
            _add(resident, _weight(model, index, tensor, 0, widths[False]))
            continue
        records = runs.setdefault(tensor.block, [[] for _ in range(_n_experts(model, tensor))])
        for expert, record in enumerate(records):
            _add(record, _weight(model, index, tensor, expert, widths[True]))
    layers = [asdict(layer) | _widths(layer.n_experts, widths) for layer in model.layers]
    return Contents(
        header=asdict(model.header),
        layers=layers,
        metadata=model.metadata,
        tokenizer=model.section(const.SectionId.TOKENIZER),
        token_bytes=model.section(const.SectionId.TOKEN_BYTES),
        resident=resident,
        experts=runs,
    )


def _n_experts(model: Model, tensor: Tensor) -> int:
    return next(layer.n_experts for layer in model.layers if layer.block == tensor.block)


def _widths(n_experts: int, widths: dict[bool, int]) -> dict[str, Any]:
    return {"d_ff": widths[False], "d_expert": widths[True] if n_experts else 0}


def _add(runs: list[Run], weight: Weight) -> None:
    """Adds a run; an up matrix joins the gate before it."""
    if weight.role.upper() in _UPS:
        runs[-1] = (*runs[-1], weight)
    else:
        runs.append((weight,))


def _weight(model: Model, index: int, tensor: Tensor, expert: int, width: int) -> Weight:
    role = const.Role(tensor.role).name
    values = model.rows(index, expert, 0, tensor.n_rows)
    if not tensor.stripe_rows:
        return _vector(role.lower(), tensor.block, values)
    encoding = const.Encoding(tensor.encoding).name.lower()
    n_rows = width if role in _ROWS else tensor.n_rows
    n_cols = width if role in _COLUMNS else tensor.n_cols
    if n_rows < tensor.n_rows or n_cols < tensor.n_cols:
        raise LabError(f"{role.lower()} of {tensor.n_rows} x {tensor.n_cols} exceeds {width}")
    padded = np.zeros((n_rows, n_cols), np.float32)
    padded[: tensor.n_rows, : tensor.n_cols] = values
    packed = pack(encode(Planes("f32", padded, {}), encoding), stripe_rows(n_rows))
    return Weight(
        role.lower(), tensor.block, encoding, n_rows, n_cols, lambda first, n: packed[first:][:n]
    )


def _vector(role: str, block: int, values: Floats) -> Weight:
    data: Bytes = values.astype("<f4").view(np.uint8)
    return Weight(role, block, "f32", 1, values.shape[1], lambda *_: data, True)
