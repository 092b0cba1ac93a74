"""A dense GGUF checkpoint as a transformers model in f32, dequantised by the gguf package."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from oracles.llama2c import in_half_order

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
GEMMA_NAMES = NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}


def transformers_name(name: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *prefix, part, kind = name.split(".")
    layer = f"model.layers.{prefix[1]}." if prefix else ""
    names = GEMMA_NAMES if architecture == "gemma3" else NAMES
    return f"{layer}{names[part]}.{kind}"


@contextmanager
def read_quickly() -> Iterator[None]:
    """Has GGUFReader, here and in transformers, cut its thousands of tokens out of a plain array: out of
    a memmap each of them costs three times as much."""
    plain = {"memmap": lambda path, mode: np.memmap(path, mode=mode).view(np.ndarray)}
    with patch("gguf.gguf_reader.np", SimpleNamespace(**vars(np) | plain)):
        yield


def load(path: Path) -> PreTrainedModel:
    with read_quickly():
        reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def field(key: str) -> Any:
        return reader.fields[f"{architecture}.{key}"].contents()

    n_heads, n_kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if architecture == "llama" and ".attn_q." in tensor.name:
            weight = in_half_order(weight, n_heads)
        if architecture == "llama" and ".attn_k." in tensor.name:
            weight = in_half_order(weight, n_kv_heads)
        if architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            weight = weight - 1  # the converter adds 1
        weights[transformers_name(tensor.name, architecture)] = torch.tensor(weight)
    tied = "lm_head.weight" not in weights
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config_class, model_class = CLASSES[architecture]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": field("rope.freq_base")}
    more: dict[str, Any] = {}
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        rope = {"full_attention": rope, "sliding_attention": local}
        head_dim, window = field("attention.key_length"), field("attention.sliding_window")
        more = {"head_dim": head_dim, "sliding_window": window}
        more |= {"query_pre_attn_scalar": head_dim}
    config = config_class(
        vocab_size=len(weights["lm_head.weight"]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters=rope,
        tie_word_embeddings=tied,
        **more,
    )
    # Not model_class(config), which draws random weights first: that takes longer than the test.
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )
    model.eval()
    return model
