"""Safetensors shards byte by byte, and complete Hugging Face folders of a tiny llama."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint16": "BF16"}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def shard(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def pack(tensors: dict[str, NDArray[Any]]) -> bytes:
    header, data = {}, b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        header[name] = entry(DTYPES[values.dtype.name], list(values.shape), len(data), end)
        data += values.tobytes()
    return shard(header, data)


def tiny_tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 64),
        "model.norm.weight": (64,),
    }
    block = "model.layers.0."
    shapes |= {
        block + "input_layernorm.weight": (64,),
        block + "post_attention_layernorm.weight": (64,),
        block + "self_attn.q_proj.weight": (64, 64),
        block + "self_attn.k_proj.weight": (32, 64),
        block + "self_attn.v_proj.weight": (32, 64),
        block + "self_attn.o_proj.weight": (64, 64),
        block + "mlp.gate_proj.weight": (96, 64),
        block + "mlp.up_proj.weight": (96, 64),
        block + "mlp.down_proj.weight": (64, 96),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def tiny_folder(path: Path, tensors: dict[str, NDArray[Any]] | None = None, **config: Any) -> Path:
    """A folder with one model.safetensors; `config` changes config.json, None removes a key."""
    path.mkdir(parents=True)
    settings = {k: v for k, v in (CONFIG | config).items() if v is not None}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "model.safetensors").write_bytes(pack(tiny_tensors() if tensors is None else tensors))
    return path


def shard_folder(path: Path, **config: Any) -> Path:
    """The same model in two shards with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    items = list(tiny_tensors().items())
    weight_map: dict[str, str] = {}
    for index, part in enumerate((items[:4], items[4:]), 1):
        name = f"model-{index:05}-of-00002.safetensors"
        (path / name).write_bytes(pack(dict(part)))
        weight_map |= dict.fromkeys(dict(part), name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
