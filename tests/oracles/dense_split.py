"""Rewrites the first layers of a dense model, unchanged or with each FFN cut into experts that are all
active with weight 1: the same function through the expert path."""

from pathlib import Path
from typing import Any

import numpy as np

from cflow.engine.files.formats import cflow, tiles
from cflow.engine.files.formats.cflow import Run, Weight
from oracles.model_file import MODEL_LEVEL, Array, ModelFile
from oracles.random_model import token_bytes

BEFORE_FFN = "norm1 q q_bias q_norm k k_bias k_norm v v_bias o o_bias norm2".split()  # noqa: SIM905


def write(model: ModelFile, path: Path, n_layers: int, n_experts: int = 0) -> Path:
    """n_experts: 0 for dense, or a power of two, so that routing weights are exact."""
    layers = model.layers[:n_layers]
    blocks = [layer["block"] for layer in layers]
    runs = [*weights(model, MODEL_LEVEL, ["embedding"])]
    experts = {}
    for block in blocks:
        runs += weights(model, block, BEFORE_FFN)
        if n_experts:
            router = np.zeros((n_experts, model.header["d_model"]))
            runs.append((weight("router", block, router),))
            experts[block] = [ffn(model, block, i, n_experts) for i in range(n_experts)]
        else:
            runs += ffn(model, block, 0, 1, prefix="")
    runs += weights(model, MODEL_LEVEL, ["final_norm", "head"])
    derived = ("version", "order", "file_bytes", "n_layers", "n_tensors", "n_records")
    header = {k: v for k, v in model.header.items() if k not in derived}
    contents = cflow.Contents(
        header=header | {"n_blocks": n_layers},
        layers=[layer | expert_fields(layer, n_experts) for layer in layers],
        metadata=model.metadata,
        tokenizer=b"",
        token_bytes=token_bytes(header["n_tokens"]),
        resident=runs,
        experts=experts,
    )
    cflow.write(contents, path)
    return path


def expert_fields(layer: dict[str, Any], n_experts: int) -> dict[str, Any]:
    if not n_experts:
        return {}
    return {
        "d_ff": 0,
        "n_experts": n_experts,
        "top_k": n_experts,
        "d_expert": layer["d_ff"] // n_experts,
        "expert_scale": float(n_experts),
        "norms_shared": 1,
    }


def ffn(
    model: ModelFile, block: int, part: int, n_parts: int, prefix: str = "expert_"
) -> list[Run]:
    """The part-th slice of the FFN's hidden columns."""
    gate, up = (np.split(model.weight(block, side), n_parts)[part] for side in ("gate", "up"))
    down = np.split(model.weight(block, "down"), n_parts, axis=1)[part]
    return [
        (weight(f"{prefix}gate", block, gate), weight(f"{prefix}up", block, up)),
        (weight(f"{prefix}down", block, down),),
    ]


def weights(model: ModelFile, block: int, roles: list[str]) -> list[Run]:
    found = [role for role in roles if model.has(block, role)]
    return [(weight(role, block, model.weight(block, role)),) for role in found]


def weight(role: str, block: int, values: Array) -> Weight:
    """A matrix or vector in f32."""
    numbers = values.astype("<f4")
    if values.ndim == 1:
        packed = numbers.view(np.uint8)[None]
    else:
        packed = tiles.pack(tiles.Planes("f32", numbers, {}), tiles.stripe_rows(len(numbers)))
    n_rows, n_cols = np.atleast_2d(values).shape
    return Weight(
        role,
        block,
        "f32",
        n_rows,
        n_cols,
        lambda first, n: packed[first : first + n],
        is_vector=values.ndim == 1,
    )
