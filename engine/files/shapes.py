"""Shapes of real models by name: the .toml files of configs/shapes, which `synth` and `plan` take."""

from __future__ import annotations

import os
from pathlib import Path

from cflow.engine.base.errors import ModelError

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def shape_names() -> list[str]:
    return sorted(path.stem for path in SHAPES.glob("*.toml"))


def is_shape(reference: str) -> bool:
    """Whether this names a shape rather than a model."""
    return reference in shape_names() or reference.endswith(".toml")


def shape_path(shape: str) -> Path:
    """The file of a shape, given by name or as a .toml file. ModelError if there is none."""
    path = Path(shape) if shape.endswith(".toml") else SHAPES / f"{shape}.toml"
    if shape not in shape_names() and not (shape.endswith(".toml") and os.path.isfile(path)):
        raise ModelError(f"no shape {shape!r}; available shapes: {', '.join(shape_names())}")
    return path
