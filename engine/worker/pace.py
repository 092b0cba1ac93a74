"""Predicts step time, to choose how many prefill rows fit without delaying running decodes.

Two lines are fitted to the times of finished steps, recent steps counting most:

    decode rows    time of a step without prefill = fixed + slope * rows
    prefill chunk  time that a chunk adds to a step = fixed + slope * rows

The rules for a chunk of prefill:

- A step with decodes may take max_step_ms. If recent steps with a chunk took longer than predicted,
  predictions are multiplied by measured over predicted time.
- With experts on disk even the smallest chunk can exceed the limit, since it reads almost as many
  experts as a large one. A chunk then has so many rows that slope * rows equals the fixed part.
  After such a chunk, steps have no prefill until they have taken as long as the chunk added.
- A step without decodes delays only new requests, so it may take four times the limit.
- Before the first measurement a chunk has at most 64 rows. With weights on disk and no decodes it
  has as many as a step can hold, since a small chunk would read almost as many weights.

The line of decode rows also gives the cost of one more row, which decides how many drafts to check
(drafts.py). Fitting that line needs steps with different numbers of rows, so now and then a step
checks a few more drafts as a trial.
"""

from __future__ import annotations

WEIGHT = 0.2  # of the newest step
ROW_WEIGHT = 0.05  # of the newest step, in the line of decode rows
UNKNOWN_ROWS = 64  # of a chunk before the first measurement
MIN_ROWS = 16  # of a chunk, however slow
LONE = 4.0  # a step without decodes may take this many times the limit
SPREAD = 0.1  # relative deviation of row counts below which a line's slope is not updated
TRIAL_ROWS = 4  # least rows that a trial adds; half the number of decode rows if that is more
ENOUGH = 4.0  # no trials while _n_informative is at least this
FADING = 1 / 2000  # decay of _n_informative in each step, so that about one step in 500 is a trial


class Pace:
    """Learns from finished steps (observe) and limits the rows of the next one."""

    def __init__(self, max_step_s: float, max_rows: int, *, reads_disk: bool = False) -> None:
        """reads_disk: some weights are on disk."""
        self._max_step_s = max_step_s
        self._max_rows = max_rows
        self._first_rows = max_rows if reads_disk else UNKNOWN_ROWS  # of a step without decodes
        self._decode_s = 0.0
        self._rows = _Line(ROW_WEIGHT)
        self._n_informative = 0.0  # steps whose rows are over 1/4 off the mean; fades with age
        self._chunk = _Line(WEIGHT)
        self._excess = 1.0  # measured over predicted time of steps with a chunk; at least 1
        self._is_dear = False  # a chunk of MIN_ROWS exceeded the limit
        self._owed_s = 0.0  # time for decodes alone before the next chunk

    def n_prefill_rows(self, n_decodes: int) -> int:
        """Most prefill rows in a step with n_decodes decode rows."""
        room = self._max_rows - n_decodes
        if not n_decodes:
            return min(room, self._n_lone_rows())
        if self._owed_s > 0:
            return 0
        chunk = self._chunk
        if not chunk.slope:
            # A row costs at most as much as a decode step.
            sure = self._max_step_s / self._decode_s if self._decode_s else UNKNOWN_ROWS
            return min(room, UNKNOWN_ROWS, max(int(sure), MIN_ROWS))
        seconds = chunk.fixed
        if not self._is_over_limit():
            seconds = self._max_step_s / self._excess - self._decode_s - chunk.fixed
            room = min(room, int(2 * chunk.x))  # the line is a guess beyond that
        return min(room, max(int(seconds / chunk.slope), MIN_ROWS))

    def _n_lone_rows(self) -> int:
        """Rows of a step without decodes; all rows if fixed costs take over half of the limit."""
        most_s, chunk = LONE * self._max_step_s, self._chunk
        left_s = most_s - self._decode_s - chunk.fixed
        if not chunk.slope:
            return self._first_rows
        if left_s < most_s / 2:
            return self._max_rows
        return max(int(left_s / chunk.slope), MIN_ROWS)

    def row_price(self, n_rows: int) -> float:
        """Cost of one more row, as a share of a step with n_rows decode rows."""
        rows = self._rows
        return rows.slope / (rows.fixed + n_rows * rows.slope) if rows.slope else 1 / n_rows

    def n_trial_rows(self, n_rows: int) -> int:
        """Rows to add to n_rows decode rows as a trial, to learn what a row costs; 0: no trial."""
        if not self._rows.slope or self._n_informative >= ENOUGH:
            return 0
        return max(TRIAL_ROWS, n_rows // 2)

    def n_draft_rows(self, n_decodes: int) -> int:
        """Most rows for drafts: half of the rows left by decodes, so that prefill can go on."""
        return (self._max_rows - n_decodes) // 2

    def observe(self, n_decodes: int, n_prefill: int, seconds: float) -> None:
        """Learn from a finished step. n_decodes: decode rows, drafts included."""
        if not n_prefill:
            is_informative = abs(n_decodes - self._rows.x) > self._rows.x / 4
            n_informative = self._n_informative * (1 - FADING) + is_informative
            self._n_informative = min(n_informative, ENOUGH + 1)
            self._rows.add(n_decodes, seconds)
            self._decode_s = _mean(self._decode_s, seconds)
            self._owed_s -= seconds
            return
        added_s = max(seconds - self._decode_s, 1e-7)
        if n_prefill >= MIN_ROWS:
            self._compare(n_prefill, seconds)
            self._chunk.add(n_prefill, added_s)
        if n_prefill <= MIN_ROWS:
            self._is_dear = added_s > self._max_step_s
        self._owed_s = added_s if self._is_over_limit() else 0.0

    def _compare(self, n_prefill: int, seconds: float) -> None:
        """Update the excess from a step with a chunk."""
        chunk = self._chunk
        if chunk.slope:
            expected_s = self._decode_s + chunk.fixed + n_prefill * chunk.slope
            excess = max(seconds / expected_s, 1.0)
            self._excess = max(excess, _mean(self._excess, excess))

    def _is_over_limit(self) -> bool:
        """Even the smallest chunk exceeds the limit."""
        return self._is_dear and self._chunk.fixed > self._max_step_s


class _Line:
    """Least squares line y = fixed + slope * x through recent points, with fixed >= 0."""

    def __init__(self, weight: float) -> None:
        """weight: of the newest point in the means."""
        self.slope = 0.0  # 0: no point yet
        self.fixed = 0.0
        self.x = self._y = self._xx = self._xy = 0.0  # means
        self._weight = weight

    def add(self, x: float, y: float) -> None:
        w = self._weight if self.slope else 1.0  # the first point is the mean
        self.x += w * (x - self.x)
        self._y += w * (y - self._y)
        self._xx += w * (x * x - self._xx)
        self._xy += w * (x * y - self._xy)
        through_zero = self._y / self.x
        variance = self._xx - self.x**2
        if variance > (SPREAD * self.x) ** 2:
            slope = (self._xy - self.x * self._y) / variance
            self.slope = min(max(slope, through_zero / 1000), through_zero)
        self.slope = min(self.slope or through_zero, through_zero)
        self.fixed = self._y - self.slope * self.x


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
