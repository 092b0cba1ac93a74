"""A matrix or vector of a source file: its shape, and rows on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.quantise import encode, values
from cflow.engine.files.formats.tiles import Floats, Planes


@dataclass(frozen=True)
class Matrix:
    """n_rows x n_cols numbers; a vector is one row. path: its file. read(first, n): n rows as Planes."""

    path: Path
    name: str
    n_rows: int
    n_cols: int
    encoding: str  # that holds it exactly
    read: Callable[[int, int], Planes]

    def rows(self, first: int, n: int, encoding: str) -> Planes:
        """Rows [first, first + n) in any encoding. Raises ModelError for NaN and infinity."""
        planes = self.read(first, n)
        if not planes.is_finite():
            raise ModelError(f"{self.path}: tensor {self.name} holds NaN or infinite values")
        planes = encode(planes, encoding)
        if not planes.is_finite():
            raise ModelError(f"{self.path}: tensor {self.name} has values too large for {encoding}")
        return planes

    def floats(self) -> Floats:
        """All rows as f32 (n_rows, n_cols)."""
        return values(self.rows(0, self.n_rows, "f32"))

    def part(self, first: int, n: int) -> Matrix:
        """Rows [first, first + n) as a matrix."""
        return replace(self, n_rows=n, read=lambda start, count: self.read(first + start, count))
