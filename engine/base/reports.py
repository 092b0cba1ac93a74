"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Report = Callable[
    [str, int, int], None
]  # what is being done, how much of it is done, how much it is


def silent(_what: str, _done: int, _total: int) -> None:
    """Report to nobody."""
