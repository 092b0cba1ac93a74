"""Writes GGUF files with random weights and no vocabulary from a shape of configs/shapes, for other
engines and for encodings that `cflow synth` does not write.

    python -m bench.shape_gguf qwen2.5-1.5b q4_k out.gguf
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from cflow.engine.files.models.gguf_model import NAMING
from cflow.engine.files.models.spec import ModelSpec
from cflow.engine.files.synth import load_shape

Bytes = NDArray[np.uint8]

MIXTURE = "q4_k_m"  # as in llama.cpp: q6_k where precision matters most, q4_k elsewhere
ENCODINGS = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k", MIXTURE)
POOL_BLOCKS = 65_521  # a prime, so that tensors repeat out of step
PIECE_BYTES = 1 << 26
EMBEDDING_GAIN = 50  # so that layers do not drown the embedding and tokens route differently

# Offsets of the f16 fields of a block, and values that give weights of about 0.02. Signs are drawn block
# by block: if the mean were not 0, all outputs would be alike and routers would always choose the same.
SCALES: dict[str, dict[int, float]] = {
    "q4_0": {0: 0.004},
    "q4_1": {0: 0.004, 2: -7.5 * 0.004},
    "q8_0": {0: 0.0003},
    "q4_k": {0: 0.0001, 2: 7.5 * 0.0001},
    "q6_k": {208: 0.000015},
}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # columns last
    encoding: str
    kind: str  # of values: "norm", "router", "embedding" or "other"


def write(shape: str, encoding: str, out: Path) -> None:
    """Writes out. encoding: of all matrices but the router."""
    spec = load_shape(shape)
    writer = GGUFWriter(out, spec.architecture)
    _add_keys(writer, spec)
    tensors = list(_tensors(spec, encoding))
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.encoding.upper()]
        block, size = GGML_QUANT_SIZES[kind]
        raw_shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        writer.add_tensor_info(
            tensor.name, raw_shape, np.dtype(np.uint8), math.prod(raw_shape), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(out, "ab") as file:
        rng = np.random.default_rng(0)
        pools = {key: _pool(*key, rng) for key in sorted({(t.encoding, t.kind) for t in tensors})}
        for tensor in tensors:
            file.write(bytes(-file.tell() % 32))
            start = int(rng.integers(POOL_BLOCKS))
            for piece in _pieces(tensor, pools[tensor.encoding, tensor.kind], start):
                piece.tofile(file)
        file.write(bytes(-file.tell() % 32))


def _add_keys(writer: GGUFWriter, spec: ModelSpec) -> None:
    layer = spec.layers[0]
    writer.add_name(spec.name)
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.d_model)
    writer.add_feed_forward_length(layer.d_ff or layer.d_expert)
    writer.add_head_count(layer.n_heads)
    writer.add_head_count_kv(layer.n_kv_heads)
    writer.add_key_length(layer.head_dim)
    writer.add_value_length(layer.head_dim)
    writer.add_rope_dimension_count(layer.rope.dim)
    writer.add_rope_freq_base(layer.rope.base)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    if layer.n_experts:
        writer.add_expert_count(layer.n_experts)
        writer.add_expert_used_count(layer.top_k)
        writer.add_expert_feed_forward_length(layer.d_expert)
    writer.add_tokenizer_model("no_vocab")


def _tensors(spec: ModelSpec, encoding: str) -> Iterator[Tensor]:
    for role, shape in spec.global_shapes().items():
        is_table = role == "embedding" and not spec.tied
        kind = "embedding" if is_table else "norm" if len(shape) == 1 else "other"
        yield Tensor(NAMING.plain[role], shape, _encoding(encoding, role, 0, shape), kind)
    for at, layer in enumerate(spec.layers):
        for role, shape in layer.shapes(spec.d_model).items():
            name = NAMING.plain[role].format(layer=at)
            kind = role if role == "router" else "norm" if len(shape) == 1 else "other"
            yield Tensor(name, shape, _encoding(encoding, role, at, shape), kind)
        for role, shape in layer.expert_shapes(spec.d_model).items():
            name = NAMING.stacked[role].name.format(layer=at)
            stacked = (layer.n_experts, *shape)
            yield Tensor(name, stacked, _encoding(encoding, role, at, stacked), "other")


def _encoding(encoding: str, role: str, layer: int, shape: tuple[int, ...]) -> str:
    if len(shape) == 1 or role == "router":
        return "f32"
    if encoding != MIXTURE:
        return encoding
    more = role in ("embedding", "head") or (role in ("v", "down") and layer % 2 == 0)
    return "q6_k" if more else "q4_k"


def _pool(encoding: str, kind: str, rng: np.random.Generator) -> Bytes:
    """Random blocks, (POOL_BLOCKS, bytes of a block), which tensors repeat."""
    if kind == "norm":
        return np.ones((POOL_BLOCKS, 1), "<f4").view(np.uint8)
    if kind == "router":
        return rng.standard_normal((POOL_BLOCKS, 1), np.float32).view(np.uint8)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[encoding.upper()]][1]
    pool = rng.integers(0, 256, (POOL_BLOCKS, size), np.uint8)
    signs = rng.choice(np.array([-1, 1], np.float16), (POOL_BLOCKS, 1))
    gain = EMBEDDING_GAIN if kind == "embedding" else 1
    for offset, value in SCALES[encoding].items():
        pool[:, offset : offset + 2] = (signs * np.float16(gain * value)).view(np.uint8)
    return pool


def _pieces(tensor: Tensor, pool: Bytes, start: int) -> Iterator[Bytes]:
    """The bytes of a tensor, piece by piece."""
    block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.encoding.upper()]][0]
    end = start + math.prod(tensor.shape) // block
    step = PIECE_BYTES // pool.shape[1]
    for first in range(start, end, step):
        yield pool[np.arange(first, min(first + step, end)) % POOL_BLOCKS]


def main() -> None:
    parser = argparse.ArgumentParser(description="write a GGUF file with random weights")
    parser.add_argument("shape")
    parser.add_argument("encoding", choices=ENCODINGS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.shape, args.encoding, args.out)


if __name__ == "__main__":
    main()
