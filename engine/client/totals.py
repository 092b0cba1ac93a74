"""Counters that never fall, even when the worker that counts is replaced."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from cflow.engine.base.messages import Stats

GAUGES = ("n_running", "n_waiting", "n_kv_used", "n_kv_blocks")
DISK_GAUGES = ("n_resident", "n_loading", "n_overdue")


class Totals:
    """Statistics of an engine. stats: gauges of the current worker, counters over all workers."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._before = Stats()  # counters of the workers that have ended

    def update(self, stats: Stats) -> None:
        """Take over the statistics that the current worker reports."""
        self.stats = _sum(self._before, stats)

    def end_worker(self) -> None:
        """Keep the counters of a worker that has ended, and set its gauges to 0."""
        disk = {k: replace(s, **dict.fromkeys(DISK_GAUGES, 0)) for k, s in self.stats.disk.items()}
        self._before = self.stats = replace(self.stats, disk=disk, **dict.fromkeys(GAUGES, 0))


def _sum(a: Any, b: Any) -> Any:
    """The sum of numbers, tuples, structs or dicts, by element; a missing element is 0."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict):
        return {key: _sum(a.get(key), b.get(key)) for key in a | b}
    if isinstance(a, tuple):
        return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
    if isinstance(a, msgspec.Struct):
        names = a.__struct_fields__
        return type(a)(**{name: _sum(getattr(a, name), getattr(b, name)) for name in names})
    return a + b
