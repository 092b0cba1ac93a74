"""Callbacks that show the progress of long work."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, total bytes
Report = Callable[[str, int, int], None]  # what is being done, units done, total units


def silent(_what: str, _done: int, _total: int) -> None:
    """A Report that shows nothing."""
