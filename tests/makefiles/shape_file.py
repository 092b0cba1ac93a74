"""Models with random weights, of a shape given by a test."""

import json
from pathlib import Path
from typing import Any

from cflow.engine.files.synth import synth


def synth_model(
    path: Path,
    architecture: str,
    *,
    n_layers: int,
    d_model: int,
    heads: tuple[int, int, int],
    vocab_size: int = 256,
    context: int = 512,
    tied: bool = False,
    **layer: Any,
) -> Path:
    """Writes path, in the order given by its suffix. heads: number of query heads and of KV heads, and
    their width. layer: further fields of [layer]."""
    n_heads, n_kv_heads, head_dim = heads
    model = {
        "architecture": architecture,
        "n_layers": n_layers,
        "d_model": d_model,
        "vocab_size": vocab_size,
        "context": context,
        "tied": tied,
        "norm_eps": 1e-5,
    }
    layer |= {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    rope = {"kind": "half", "dim": head_dim, "base": 10000.0}
    shape = path.with_suffix(".toml")
    shape.write_text(
        f"{_fields(model)}[layer]\n{_fields(layer)}[layer.rope]\n{_fields(rope)}", encoding="utf-8"
    )
    synth(str(shape), path)
    return path


def _fields(values: dict[str, Any]) -> str:
    """Lines of TOML, which writes numbers, strings and booleans as JSON does."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
