"""What a model file is to be written as: the encoding of its matrices, the order of its weights.

Imports nothing heavy, so that commands check both before a download.
"""

from __future__ import annotations

from pathlib import Path

from cflow.engine.base.errors import ModelError

QUANTS = ("keep", "f32", "f16", "bf16", "q8_0", "q4_1", "q4_0")
SUFFIXES = {"layer": ".cflow", "stage": ".vflow"}


def check_quant(quant: str) -> None:
    """Raise ModelError if this is not one of QUANTS."""
    if quant not in QUANTS:
        raise ModelError(f"--quant {quant} is not known; one of {', '.join(QUANTS)}")


def order_of(path: Path, order: str | None) -> str:
    """The order to write `path` in: `order` if given, else by the suffix, else "layer".

    Raises ModelError if name and order contradict each other.
    """
    by_suffix = {suffix: name for name, suffix in SUFFIXES.items()}
    named = by_suffix.get(path.suffix)
    if order is not None and order not in SUFFIXES:
        raise ModelError(f"--order {order} is not known; one of {', '.join(SUFFIXES)}")
    if order and named and order != named:
        raise ModelError(
            f"{path} is the name of a file in {named} order; with --order {order} "
            f"it must end in {SUFFIXES[order]}"
        )
    return order or named or "layer"
