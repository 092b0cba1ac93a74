"""Loads llama2.c checkpoints (stories260K) as a transformers model, for the ordinary converter.

File layout: version 0, as in llama2.c's run.c. Its RoPE rotates neighbouring pairs, so rows of Q and K
are reordered for transformers."""

import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from oracles import tiny

Array = NDArray[np.float32]


def in_half_order(weight: Array, n_heads: int) -> Array:
    """Rows of each head from (pair, side) to (side, pair)."""
    n_rows, n_cols = weight.shape
    pairs = weight.reshape(n_heads, n_rows // n_heads // 2, 2, n_cols)
    return pairs.swapaxes(1, 2).reshape(n_rows, n_cols)


class Reader:
    """Reads f32 arrays from a buffer in order."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data, self.offset = data, offset

    def take(self, *shape: int) -> Array:
        n = int(np.prod(shape))
        array = np.frombuffer(self.data, "<f4", n, self.offset).reshape(shape)
        self.offset += 4 * n
        return array


def load(path: Path) -> transformers.PreTrainedModel:
    data = path.read_bytes()
    dim, hidden, n_layers, n_heads, n_kv, vocab, context = struct.unpack_from("<7i", data)
    kv_dim, tied = dim * n_kv // n_heads, vocab > 0
    vocab = abs(vocab)
    r = Reader(data, 28)
    weights = {"model.embed_tokens.weight": r.take(vocab, dim)}
    layers = {
        "input_layernorm": r.take(n_layers, dim),
        "self_attn.q_proj": r.take(n_layers, dim, dim),
        "self_attn.k_proj": r.take(n_layers, kv_dim, dim),
        "self_attn.v_proj": r.take(n_layers, kv_dim, dim),
        "self_attn.o_proj": r.take(n_layers, dim, dim),
        "post_attention_layernorm": r.take(n_layers, dim),
        "mlp.gate_proj": r.take(n_layers, hidden, dim),
        "mlp.down_proj": r.take(n_layers, dim, hidden),
        "mlp.up_proj": r.take(n_layers, hidden, dim),
    }
    weights["model.norm.weight"] = r.take(dim)
    r.take(2, context, dim // n_heads // 2)  # RoPE tables
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if tied else r.take(vocab, dim)
    assert r.offset == len(data)
    for name, stacked in layers.items():
        for i, weight in enumerate(stacked):
            if name.endswith(("q_proj", "k_proj")):
                weight = in_half_order(weight, n_heads if "q_proj" in name else n_kv)
            weights[f"model.layers.{i}.{name}.weight"] = weight
    model = tiny.llama(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
    )
    model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
    model.float().eval()
    return model
