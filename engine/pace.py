"""How many prefill rows fit into a step without keeping the decodes of others waiting."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
UNKNOWN_ROWS = 64  # a chunk beside decodes before anything was measured
MIN_ROWS = 16  # prefill goes on, however slow


class Pace:
    """Learns two times from finished steps: of a step with decodes only, and of each prefill row."""

    def __init__(self, max_step_s: float, max_rows: int) -> None:
        self._max_step_s = max_step_s
        self._max_rows = max_rows
        self._decode_s = 0.0
        self._row_s = 0.0

    def n_prefill_rows(self, n_decodes: int) -> int:
        """Rows for prefill in a step with n_decodes others."""
        room = self._max_rows - n_decodes
        if not n_decodes:
            return room
        if not self._row_s:
            return min(room, UNKNOWN_ROWS)
        n = int((self._max_step_s - self._decode_s) / self._row_s)
        return min(room, max(n, MIN_ROWS))

    def observe(self, n_decodes: int, n_prefill: int, seconds: float) -> None:
        if not n_prefill:
            self._decode_s = _mean(self._decode_s, seconds)
        elif n_prefill >= MIN_ROWS:
            decode_s = self._decode_s if n_decodes else 0.0
            self._row_s = _mean(self._row_s, max(seconds - decode_s, 1e-7) / n_prefill)


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
