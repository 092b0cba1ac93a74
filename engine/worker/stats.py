"""Counters and queue order for the front end, and when they are sent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from cflow.engine.base.messages import DiskStats, Line, Stats
from cflow.engine.worker.runner import Context
from cflow.engine.worker.scheduler import Scheduler

STATS_S = 0.1
LINE_S = 1.0


class StatsKeeper:
    """Sends Stats at most ten times a second, and once more when idle; the queue order (Line) at
    most once a second."""

    def __init__(
        self,
        scheduler: Scheduler,
        context: Context,
        disk_stats: Callable[[], dict[str, DiskStats]],
    ) -> None:
        self._scheduler = scheduler
        self._context = context
        self._disk_stats = disk_stats
        self.cancelled: Counter[str] = Counter()
        self._n_steps = 0
        self._step_s = 0.0
        self._n_tokens = 0
        self._sent_at = 0.0
        self._last: Stats | None = None
        self._line_at = 0.0
        self._line = Line(())

    def count_step(self, seconds: float, n_tokens: int) -> None:
        self._n_steps += 1
        self._step_s += seconds
        self._n_tokens += n_tokens

    def due(self, n_running: int) -> Stats | None:
        now = time.monotonic()
        if n_running and now < self._sent_at + STATS_S:
            return None
        stats = self._gather()
        if stats == self._last:
            return None
        self._sent_at, self._last = now, stats
        return stats

    @property
    def is_reading(self) -> bool:
        """Reads are in flight, so the last Stats can become outdated without a step."""
        return self._last is not None and any(d.n_loading for d in self._last.disk.values())

    def line_due(self) -> Line | None:
        now = time.monotonic()
        if now < self._line_at + LINE_S:
            return None
        self._line_at = now
        line = Line(tuple(self._scheduler.line()))
        if line == self._line:
            return None
        self._line = line
        return line

    def _gather(self) -> Stats:
        counters, pool = self._scheduler.counters, self._scheduler.pool
        return Stats(
            n_running=self._scheduler.n_running,
            n_waiting=self._scheduler.n_waiting,
            n_kv_used=pool.n_used,
            n_kv_blocks=pool.n_blocks,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=self._n_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            preemptions_memory=counters.preemptions_memory,
            draft_rounds=counters.draft_rounds,
            drafts=counters.drafts,
            accepted_at=tuple(counters.accepted_at),
            steps=self._n_steps,
            step_s=self._step_s,
            read_bytes=self._context.read_bytes,
            cancelled_queue=self.cancelled["queue"],
            cancelled_prefill=self.cancelled["prefill"],
            cancelled_decode=self.cancelled["decode"],
            disk=self._disk_stats(),
        )
