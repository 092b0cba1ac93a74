"""GGUF files byte by byte, valid and invalid. Shares no code with the reader."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    """A typed value: kind is a struct code, "s" for a string, "[x" for an array of x."""
    if kind == "s":
        return struct.pack("<I", 8) + text(content)
    if kind == "[s":
        return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
    if kind.startswith("["):
        head = struct.pack("<IIQ", 9, TYPES[kind[1]], len(content))
        return head + struct.pack(f"<{len(content)}{kind[1]}", *content)
    return struct.pack("<I" + kind, TYPES[kind], content)


@dataclass
class Tensor:
    """dims as GGUF stores them: columns first. data None: zeros of the right size."""

    name: str | bytes
    dims: list[int]
    type: int = 0
    data: bytes | None = None
    offset: int | None = None

    def bytes(self) -> bytes:
        if self.data is not None:
            return self.data
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        return bytes(int(np.prod(self.dims)) // block * size)


@dataclass
class GgufBuilder:
    """keys: (name, kind, content), or (name, bytes of type and value)."""

    keys: list[tuple[Any, ...]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_tensors: int | None = None
    n_keys: int | None = None

    def build(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_keys)]
        for key in self.keys:
            out += [text(key[0]), key[1] if len(key) == 2 else value(key[1], key[2])]
        at, data = 0, b""
        for tensor in self.tensors:
            at = self._up(len(data)) if tensor.offset is None else tensor.offset
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            out += [text(tensor.name), dims, struct.pack("<IQ", tensor.type, at)]
            if tensor.offset is None:
                data = data.ljust(at, b"\0") + tensor.bytes()
        head = b"".join(out)
        return head.ljust(self._up(len(head)), b"\0") + data

    def _up(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment


def tiny_llama(
    seed: int = 0, *, type_: int = 0, d_model: int = 64, n_layers: int = 2, vocab: int = 64
) -> GgufBuilder:
    """A complete llama with 4 heads and 2 KV heads. type_: GGML float type of the matrices."""
    rng = np.random.default_rng(seed)
    dtype = {0: np.float32, 1: np.float16}[type_]

    def matrix(name: str, rows: int, cols: int) -> Tensor:
        values = rng.standard_normal((rows, cols), np.float32).astype(dtype)
        return Tensor(name, [cols, rows], type_, values.tobytes())

    def vector(name: str, n: int) -> Tensor:
        return Tensor(name, [n], 0, rng.standard_normal(n, np.float32).tobytes())

    d_ff, kv = 96, d_model // 2
    tensors = [matrix("token_embd.weight", vocab, d_model), vector("output_norm.weight", d_model)]
    for layer in range(n_layers):
        blk = f"blk.{layer}."
        tensors += [
            vector(blk + "attn_norm.weight", d_model),
            vector(blk + "ffn_norm.weight", d_model),
            matrix(blk + "attn_q.weight", d_model, d_model),
            matrix(blk + "attn_k.weight", kv, d_model),
            matrix(blk + "attn_v.weight", kv, d_model),
            matrix(blk + "attn_output.weight", d_model, d_model),
            matrix(blk + "ffn_gate.weight", d_ff, d_model),
            matrix(blk + "ffn_up.weight", d_ff, d_model),
            matrix(blk + "ffn_down.weight", d_model, d_ff),
        ]
    keys = [
        ("general.architecture", "s", "llama"),
        ("general.name", "s", "tiny"),
        ("llama.block_count", "I", n_layers),
        ("llama.context_length", "I", 128),
        ("llama.embedding_length", "I", d_model),
        ("llama.feed_forward_length", "I", d_ff),
        ("llama.attention.head_count", "I", 4),
        ("llama.attention.head_count_kv", "I", 2),
        ("llama.attention.layer_norm_rms_epsilon", "f", 1e-5),
        ("tokenizer.ggml.model", "s", "no_vocab"),
    ]
    return GgufBuilder(keys, tensors)
