"""Vectors of /v1/embeddings."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import Any, Literal

from cflow.server.errors import RequestError


def check_dimensions(dimensions: int | None, size: int) -> None:
    if dimensions is not None and dimensions > size:
        message = f"dimensions: {dimensions} is more than the {size} of this model."
        raise RequestError(message, param="dimensions")


def vector_of(state: bytes, dimensions: int | None, normalise: bool) -> array[float]:
    """An embedding. state: f32, little-endian. dimensions: its first so many, of length 1 again.

    The sum is exact, so the bits do not depend on anything else."""
    vector = array("f", state)
    if sys.byteorder == "big":
        vector.byteswap()
    vector = vector[:dimensions]
    if normalise or dimensions is not None:
        length = math.sqrt(math.fsum(x * x for x in vector))
        vector = array("f", (x / length if length else 0.0 for x in vector))
    return vector


def shown(vector: array[float], form: Literal["float", "base64"]) -> Any:
    if form == "float":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
