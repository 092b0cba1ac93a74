"""How many prefill rows fit into a step without keeping the decodes of others waiting.

Learned from finished steps: the time of a step with decodes only, and what n prefill rows add to it,
a + b n. With all weights in memory a is small, and rows are chosen to keep to the step's limit. A
chunk that has to read experts from disk wants nearly all of them however small it is: a alone exceeds
the limit. Then a chunk is made so large that its rows cost as much as it costs itself, and after it
decodes go on alone for as long as it took.
"""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
UNKNOWN_ROWS = 64  # a chunk beside decodes before anything was measured
MIN_ROWS = 16  # prefill goes on, however slow
SPREAD = 0.1  # of chunk sizes around their mean; with less they say nothing about the slope


class Pace:
    def __init__(self, max_step_s: float, max_rows: int) -> None:
        self._max_step_s = max_step_s
        self._max_rows = max_rows
        self._decode_s = 0.0
        self._chunk = _Line()
        self._is_dear = False  # a chunk of the least rows exceeded the limit
        self._owed_s = 0.0  # to decodes, before the next chunk

    def n_prefill_rows(self, n_decodes: int) -> int:
        """Rows for prefill in a step with n_decodes others."""
        room = self._max_rows - n_decodes
        if not n_decodes:
            return room
        if self._owed_s > 0:
            return 0
        chunk = self._chunk
        if not chunk.slope:
            return min(room, UNKNOWN_ROWS)
        seconds = chunk.fixed
        if not self._is_over_limit():
            seconds = self._max_step_s - self._decode_s - chunk.fixed
            room = min(room, int(2 * chunk.x))  # farther off the line is a guess
        return min(room, max(int(seconds / chunk.slope), MIN_ROWS))

    def observe(self, n_decodes: int, n_prefill: int, seconds: float) -> None:
        if not n_prefill:
            self._decode_s = _mean(self._decode_s, seconds)
            self._owed_s -= seconds
            return
        added_s = max(seconds - self._decode_s, 1e-7)
        if n_prefill >= MIN_ROWS:
            self._chunk.add(n_prefill, added_s)
        if n_prefill <= MIN_ROWS:
            self._is_dear = added_s > self._max_step_s
        self._owed_s = added_s if self._is_over_limit() else 0.0

    def _is_over_limit(self) -> bool:
        """A chunk takes too long however small it is."""
        return self._is_dear and self._chunk.fixed > self._max_step_s


class _Line:
    """y = fixed + slope x through recent points, by least squares; fixed is at least 0."""

    def __init__(self) -> None:
        self.slope = 0.0  # 0: no point yet
        self.fixed = 0.0
        self.x = self._y = self._xx = self._xy = 0.0  # means

    def add(self, x: float, y: float) -> None:
        self.x, self._y = _mean(self.x, x), _mean(self._y, y)
        self._xx, self._xy = _mean(self._xx, x * x), _mean(self._xy, x * y)
        through_zero = self._y / self.x
        variance = self._xx - self.x**2
        if variance > (SPREAD * self.x) ** 2:
            slope = (self._xy - self.x * self._y) / variance
            self.slope = min(max(slope, through_zero / 1000), through_zero)
        self.slope = min(self.slope or through_zero, through_zero)
        self.fixed = self._y - self.slope * self.x


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
