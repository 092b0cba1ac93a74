"""The tensors of a model by role, whatever their names in its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.matrix import Matrix

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stacked:
    """A tensor (n_experts, n_parts * rows, columns) with all experts; a role is one of its parts."""

    name: str
    part: int = 0
    n_parts: int = 1


@dataclass(frozen=True)
class Fused:
    """A tensor that holds the rows of several roles. rows_after: how many parts of the same height
    follow the role's rows; None: it is the first."""

    name: str
    rows_after: int | None


@dataclass(frozen=True)
class Naming:
    """Names as templates with {layer} and {expert}. fused: used where the plain name is missing.
    ignored: a pattern of names without weights."""

    plain: dict[str, str]
    stacked: dict[str, Stacked]
    each: dict[str, str]
    ignored: str
    fused: dict[str, Fused] = field(default_factory=dict)


class Weights:
    """Finds tensors, checks their shapes, and remembers which were never requested."""

    def __init__(
        self,
        origin: str,
        naming: Naming,
        shapes: Mapping[str, Shape],
        matrix: Callable[[str], Matrix],
    ) -> None:
        self._origin = origin
        self._naming = naming
        self._shapes = shapes
        self._matrix = matrix
        self._used: set[str] = set()

    def find(self, role: str, layer: int, shape: Shape) -> Matrix:
        name = self._naming.plain[role].format(layer=layer)
        fused = self._naming.fused.get(role)
        if fused and self._shapes.get(name) != shape:
            whole = fused.name.format(layer=layer)
            if whole in self._shapes:
                return self._part(whole, fused, shape)
        return self._checked(name, shape)

    def _part(self, name: str, fused: Fused, shape: Shape) -> Matrix:
        total, n_rows = self._shapes[name][0], shape[0]
        first = 0 if fused.rows_after is None else total - (fused.rows_after + 1) * n_rows
        if self._shapes[name][1:] != shape[1:] or first < 0 or first + n_rows > total:
            raise ModelError(
                f"{self._origin}: tensor {name} has the shape {self._shapes[name]}, which does not "
                f"hold {shape}"
            )
        self._used.add(name)
        return self._matrix(name).part(first, n_rows)

    def find_experts(self, role: str, layer: int, n_experts: int, shape: Shape) -> list[Matrix]:
        """One matrix of `shape` for each expert, from a stacked tensor or separate ones."""
        n_rows, n_cols = shape
        stacked = self._naming.stacked[role]
        name = stacked.name.format(layer=layer)
        if name in self._shapes:
            whole = self._checked(name, (n_experts, stacked.n_parts * n_rows, n_cols))
            starts = [(e * stacked.n_parts + stacked.part) * n_rows for e in range(n_experts)]
            return [whole.part(start, n_rows) for start in starts]
        names = self._naming.each[role]
        return [
            self._checked(names.format(layer=layer, expert=expert), shape)
            for expert in range(n_experts)
        ]

    def _checked(self, name: str, shape: Shape) -> Matrix:
        if name not in self._shapes:
            raise ModelError(f"{self._origin}: tensor {name} is missing")
        found = self._shapes[name]
        if found != shape and (1, *found) != shape:
            raise ModelError(
                f"{self._origin}: tensor {name} has the shape {found}, {shape} is expected"
            )
        self._used.add(name)
        return self._matrix(name)

    def refuse_leftovers(self) -> None:
        """Raise ModelError for tensors that no role requested: ignoring them could change answers."""
        left = [
            name
            for name in self._shapes
            if name not in self._used and not re.fullmatch(self._naming.ignored, name)
        ]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ModelError(
                f"{self._origin}: tensors without a known role: {', '.join(left[:5])}{more}"
            )
