"""Order of the weights in a file: by layer, or as the stages of the plan read them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from cflow.engine.files.formats.cflow import Contents, write_header
from cflow.engine.native import Model, const


def ordered(contents: Contents, order: str) -> Contents:
    """Contents, given in layer order, in the requested order."""
    return contents if order == "layer" else _by_stage(contents)


def _by_stage(contents: Contents) -> Contents:
    """Contents sorted by where the plan first reads each weight and expert."""
    rank = _ranks(contents)
    return replace(
        contents,
        header=contents.header | {"order": const.Order.STAGE},
        resident=sorted(contents.resident, key=lambda run: rank[run[0].block, run[0].role]),
        experts=dict(
            sorted(contents.experts.items(), key=lambda item: rank[item[0], "expert_gate"])
        ),
    )


def _ranks(contents: Contents) -> dict[tuple[int, str], int]:
    """Rank of each (block, role), from the C planner on a file without weights."""
    with tempfile.TemporaryDirectory(prefix="cflow-order-") as folder:
        path = Path(folder) / "header.cflow"
        write_header(contents, path)
        model = Model(str(path), header_only=True)
        tensors = model.reading_order
        model.close()
    return {(t.block, const.Role(t.role).name.lower()): rank for rank, t in enumerate(tensors)}
