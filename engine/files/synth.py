"""Models of a real shape with random q4_0 weights and a byte tokenizer, for sizing and tests."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.base.reports import Progress
from cflow.engine.files.formats.cflow import Contents, Weight, write, write_header
from cflow.engine.files.formats.order import ordered
from cflow.engine.files.formats.tiles import Bytes, Planes, pack, stripe_rows
from cflow.engine.files.models import banks
from cflow.engine.files.models.spec import MAX_LAYERS, LayerSpec, ModelSpec, Rope
from cflow.engine.files.models.vocabulary import byte_vocabulary
from cflow.engine.files.shapes import shape_path
from cflow.engine.files.target import order_of

POOL_BLOCKS = (
    4099  # random blocks per stripe height; a prime, so that tensors do not repeat in step
)
ADDED = ("o", "down", "shared_down", "expert_down")  # outputs that a layer adds to the stream
CODE_STD = math.sqrt((16**2 - 1) / 12)  # of a uniform 4-bit code


def load_shape(shape: str) -> ModelSpec:
    """A shape by name or from a .toml file: fields of ModelSpec, and of LayerSpec in [layer]."""
    path = shape_path(shape)
    try:
        table = tomllib.loads(path.read_text())
        layer = dict(table.pop("layer"))
        rope = Rope(**layer.pop("rope"))
        n_layers = table.pop("n_layers")
        one = LayerSpec(rope=rope, norm_eps=table["norm_eps"], **layer)
        one.fields(0)  # raises for unknown names of kinds
        spec = ModelSpec(name=path.stem, layers=[one] * min(n_layers, MAX_LAYERS + 1), **table)
        spec.check()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: not a model shape: {error}") from error
    return spec


def synth(
    shape: str,
    out: Path,
    *,
    seed: int = 0,
    order: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model of that shape, whole or not at all. The same seed gives the same weights.

    order: as in convert().
    """
    order = order_of(out, order)
    write(ordered(_contents(load_shape(shape), seed), order), out, progress)


def synth_header(shape: str, out: Path) -> None:
    """Write the file without its weights, for planning."""
    write_header(_contents(load_shape(shape), 0), out)


def _contents(spec: ModelSpec, seed: int) -> Contents:
    vocabulary = byte_vocabulary(spec.vocab_size)
    origin = _Random(spec, seed)
    return Contents(
        header=spec.header(len(vocabulary.tokens)),
        layers=spec.layer_records(),
        metadata=_metadata(spec) | vocabulary.metadata(),
        tokenizer=vocabulary.tokenizer_json,
        token_bytes=vocabulary.section(),
        resident=banks.resident(spec, origin),
        experts=banks.expert_records(spec, origin),
    )


def _metadata(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "architecture": spec.architecture,
        "licence": None,
        "source": "random weights",
        "source_sha256": None,
        "quantisation": "q4_0",
        "parameters": spec.n_parameters(),
    }


class _Random:
    """Random weights with a standard deviation of 1 / sqrt(columns), which preserves magnitudes.

    As in GPT-2, what a layer adds to the stream is smaller by sqrt(2 layers). So the stream stays
    close to an embedding of magnitude 1, and routers choose almost evenly. A tied embedding has the
    magnitude of the head."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pools: dict[tuple[int, int, float], Bytes] = {}
        added = 1 / math.sqrt(2 * len(spec.layers) * spec.passes)
        self._gains = dict.fromkeys(ADDED, added)
        if not spec.tied:
            self._gains["embedding"] = math.sqrt(spec.d_model)

    def weight(self, role: str, block: int, shape: tuple[int, ...]) -> Weight:
        if len(shape) == 1:
            return self._vector(role, block, shape[0])
        if role in ("router", "shared_scale"):
            return self._floats(role, block, *shape)
        return self._codes(role, block, *shape)

    def experts(
        self, role: str, block: int, n_experts: int, shape: tuple[int, ...]
    ) -> list[Weight]:
        return [self._codes(role, block, *shape) for _ in range(n_experts)]

    def _vector(self, role: str, block: int, n_cols: int) -> Weight:
        """Norms of 1, biases of 0."""
        value = np.full((1, n_cols), 0.0 if role.endswith("bias") else 1.0, "<f4")
        return Weight(role, block, "f32", 1, n_cols, lambda *_: value.view(np.uint8), True)

    def _floats(self, role: str, block: int, n_rows: int, n_cols: int) -> Weight:
        rows = stripe_rows(n_rows)
        values = self._random.standard_normal((n_rows, n_cols), np.float32) / math.sqrt(n_cols)
        packed = pack(Planes("f32", values.astype(np.float32), {}), rows)
        return Weight(
            role, block, "f32", n_rows, n_cols, lambda first, n: packed[first : first + n]
        )

    def _codes(self, role: str, block: int, n_rows: int, n_cols: int) -> Weight:
        rows = stripe_rows(n_rows)
        pool = self._pool(rows, n_cols, self._gains.get(role, 1.0))
        start = int(self._random.integers(len(pool)))
        n_blocks = -(-n_cols // 32)

        def stripes(first: int, n: int) -> Bytes:
            blocks = np.arange(start + first * n_blocks, start + (first + n) * n_blocks)
            return pool[blocks % len(pool)].reshape(n, -1)

        return Weight(role, block, "q4_0", n_rows, n_cols, stripes)

    def _pool(self, rows: int, n_cols: int, gain: float) -> Bytes:
        """Random q4_0 blocks of `rows` rows: (POOL_BLOCKS, bytes of a block).

        Scales have random signs; otherwise the codes' mean of -1/2 would make all outputs alike."""
        key = rows, n_cols, gain
        if key not in self._pools:
            n_codes = rows * 16
            codes = self._random.integers(0, 256, (POOL_BLOCKS, n_codes), np.uint8)
            signs = self._random.choice(np.array([-1, 1], np.float16), (POOL_BLOCKS, rows))
            scales = signs * np.float16(gain / (CODE_STD * math.sqrt(n_cols)))
            self._pools[key] = np.concatenate([codes, scales.view(np.uint8)], axis=1)
        return self._pools[key]
