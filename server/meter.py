"""A rate over the last seconds, in constant memory."""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """Counts events in one-second counters.

    rate() is events per second over the last window_s seconds, or since restart() if that is
    shorter."""

    def __init__(self, window_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_s = window_s
        self._counts = [0] * window_s
        self._now = int(clock())
        self._since = self._now - window_s

    def _advance(self) -> None:
        now = int(self._clock())
        for second in range(max(self._now + 1, now - self._window_s + 1), now + 1):
            self._counts[second % self._window_s] = 0
        self._now = now

    def add(self, n: int) -> None:
        self._advance()
        self._counts[self._now % self._window_s] += n

    def restart(self) -> None:
        self._counts = [0] * self._window_s
        self._since = self._now = int(self._clock())

    def rate(self) -> float:
        self._advance()
        return sum(self._counts) / min(self._window_s, self._now - self._since + 1)
