"""A small random model of Qwen3-Embedding's shape, as sentence-transformers saves one."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model

from oracles import tiny


def build(context: int = 256, vocab_size: int = tiny.VOCAB_SIZE) -> PreTrainedModel:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=context,
    )  # fmt: skip
    model: PreTrainedModel = Qwen3Model(config).eval()
    return model


def save(model: PreTrainedModel, folder: Path, pooling: str = "lasttoken") -> Path:
    """pooling: as in 1_Pooling/config.json, "lasttoken" or "mean_tokens". The vectors are
    normalised."""
    tiny.save(model, folder)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path}
        for name, path in paths.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder
