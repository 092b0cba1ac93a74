"""Typed, bounded access to the keys of a model: GGUF metadata, or a JSON config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError

MAX_COUNT = 1 << 31


class Fields:
    """Keys of one origin. A missing or null key gets `default`; with None it is an error.

    Every method raises ModelError that names origin, key and value. names: what the origin calls a key
    that others know by another name."""

    def __init__(
        self,
        values: Mapping[str, Any],
        origin: str,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._values = values
        self.origin = origin
        self._prefix = prefix
        self._names = names or {}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        self._read.add(self._name(key))
        return self._values.get(self._name(key))

    def _name(self, key: str) -> str:
        return self._prefix + self._names.get(key, key)

    def error(self, key: str, message: str) -> ModelError:
        return ModelError(f"{self.origin}: {self._name(key)} {message}")

    def count(
        self, key: str, default: int | None = None, low: int = 0, high: int = MAX_COUNT
    ) -> int:
        value = self._known(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_short(value)}, an integer is required")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, {low} to {high} is allowed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._known(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {_short(value)}, a number is required")
        if not math.isfinite(value) or abs(value) > 3e38:
            raise self.error(key, f"is {value}, which is not finite")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, f"is {value}, it must be above 0")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._known(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_short(value)}, true or false is required")
        return value

    def sequence(self, key: str) -> list[Any] | None:
        """The elements of a list, array or string; None for anything else."""
        value = self.get(key)
        return list(value) if isinstance(value, list | np.ndarray | str) else None

    def positives(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        value = self.sequence(key)
        if value is None:
            raise self.error(key, f"is {_short(self.get(key))}, a list of numbers is required")
        numbers = tuple(float(n) for n in value if isinstance(n, int | float | np.floating))
        if len(numbers) != len(value) or not all(0 < n < math.inf for n in numbers):
            raise self.error(key, f"is {_short(value)}, finite numbers above 0 are required")
        return numbers

    def text(self, key: str, default: str | None = None) -> str:
        value = self._known(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_short(value)}, a string is required")
        return value

    def ids(self, key: str) -> list[int]:
        """Token ids from an id, a list of ids, or nothing."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MAX_COUNT:
                raise self.error(key, f"is {_short(value)}, token ids are required")
        return ids

    def refuse_unread(self, rules: Mapping[str, tuple[Any, ...]]) -> None:
        """refuse() for the keys that nothing has read."""
        for key in [key for key in rules if self._name(key) not in self._read]:
            self.refuse(key, *rules[key])

    def refuse(self, key: str, *neutral: Any) -> None:
        """Reject a key whose value changes what the model computes in an unsupported way."""
        value = self.get(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in neutral):
            raise self.error(key, f"is {_short(value)}, which is not supported")

    def _known(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
