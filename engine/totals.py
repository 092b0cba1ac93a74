"""Counters that never fall, though the worker that counts them may be replaced."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from cflow.engine.messages import Stats

GAUGES = ("n_running", "n_waiting", "n_kv_used", "n_kv_blocks")


class Totals:
    """stats: gauges of this worker, totals over all of them."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._before = Stats()  # totals of the workers that are gone

    def update(self, stats: Stats) -> None:
        before = asdict(self._before)
        now = asdict(stats)
        self.stats = Stats(**{name: now[name] + before[name] for name in now})

    def end_worker(self) -> None:
        self._before = self.stats = replace(self.stats, **dict.fromkeys(GAUGES, 0))
