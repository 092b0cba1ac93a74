"""What rows cost: how many of a prompt fit into a step without keeping the decodes of others waiting,
and what one more row takes of a step that has decodes only.

Learned from finished steps: the time of one with decodes only, and what n prefill rows add to it,
a + b n. With all weights in memory a is small, and rows are chosen to keep to the step's limit. A
chunk that has to read experts from disk wants nearly all of them however small it is: a alone exceeds
the limit. Then a chunk is made so large that its rows cost as much as it costs itself, and after it
decodes go on alone for as long as it took. A step without decodes delays only who comes meanwhile, and
may take four times the limit. Of the first one of all nothing is known: it has few rows, or all of them
where weights come from disk, as few rows read nearly as much. The line lags behind: rows cost more the
further on in a prompt they are, and other work on the machine comes and goes. So chunks are planned as
if they took longer than the line says by as much as the last ones did.

A line through the times of steps with decodes only, by their rows, says what a row more takes: little
where weights come from memory for all rows at once, much where rows want other experts. Where the
number of rows hardly changes nothing is learned, so now and then a few are added to try.
"""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
ROW_WEIGHT = 0.05  # the same, in what a row takes
UNKNOWN_ROWS = 64  # a chunk before anything was measured
MIN_ROWS = 16  # prefill goes on, however slow
LONE = 4.0  # limits that a step without decodes may take
SPREAD = 0.1  # of sizes around their mean; with less they say nothing about the slope
TRIAL_ROWS = 4  # added to try, or half as many as there are
ENOUGH = 4.0  # steps that tell what a row takes
FADING = 1 / 2000  # of what they tell, in a step: a trial in 500 steps


class Pace:
    def __init__(self, max_step_s: float, max_rows: int, *, reads_disk: bool = False) -> None:
        """reads_disk: some weights are not in memory."""
        self._max_step_s = max_step_s
        self._max_rows = max_rows
        self._first_rows = max_rows if reads_disk else UNKNOWN_ROWS  # of a prompt alone
        self._decode_s = 0.0
        self._rows = _Line(ROW_WEIGHT)
        self._n_telling = 0.0  # steps that told what a row takes, old ones counting less
        self._chunk = _Line(WEIGHT)
        self._excess = 1.0  # what steps with chunks took, over what was expected; at least 1
        self._is_dear = False  # a chunk of the least rows exceeded the limit
        self._owed_s = 0.0  # to decodes, before the next chunk

    def n_prefill_rows(self, n_decodes: int) -> int:
        """Rows for prefill in a step with n_decodes others."""
        room = self._max_rows - n_decodes
        if not n_decodes:
            return min(room, self._n_lone_rows())
        if self._owed_s > 0:
            return 0
        chunk = self._chunk
        if not chunk.slope:
            # A row takes at most what a step of one takes.
            sure = self._max_step_s / self._decode_s if self._decode_s else UNKNOWN_ROWS
            return min(room, UNKNOWN_ROWS, max(int(sure), MIN_ROWS))
        seconds = chunk.fixed
        if not self._is_over_limit():
            seconds = self._max_step_s / self._excess - self._decode_s - chunk.fixed
            room = min(room, int(2 * chunk.x))  # farther off the line is a guess
        return min(room, max(int(seconds / chunk.slope), MIN_ROWS))

    def _n_lone_rows(self) -> int:
        """Of a step without decodes; all where much of what one takes does not hang on its rows."""
        most_s, chunk = LONE * self._max_step_s, self._chunk
        left_s = most_s - self._decode_s - chunk.fixed
        if not chunk.slope:
            return self._first_rows
        if left_s < most_s / 2:
            return self._max_rows
        return max(int(left_s / chunk.slope), MIN_ROWS)

    def row_price(self, n_rows: int) -> float:
        """What one more row takes of the time of a step with n_rows of decodes."""
        rows = self._rows
        return rows.slope / (rows.fixed + n_rows * rows.slope) if rows.slope else 1 / n_rows

    def n_trial_rows(self, n_rows: int) -> int:
        """Rows to add to n_rows of decodes, whatever they bring, to learn their price."""
        if not self._rows.slope or self._n_telling >= ENOUGH:
            return 0
        return max(TRIAL_ROWS, n_rows // 2)

    def n_guess_rows(self, n_decodes: int) -> int:
        """Rows at most for guesses: half of what n_decodes leave, so that prompts go on."""
        return (self._max_rows - n_decodes) // 2

    def observe(self, n_decodes: int, n_prefill: int, seconds: float) -> None:
        """n_decodes: rows, guesses of what follows included."""
        if not n_prefill:
            is_telling = abs(n_decodes - self._rows.x) > self._rows.x / 4
            self._n_telling = min(self._n_telling * (1 - FADING) + is_telling, ENOUGH + 1)
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
        """A step with a chunk took so long."""
        chunk = self._chunk
        if chunk.slope:
            expected_s = self._decode_s + chunk.fixed + n_prefill * chunk.slope
            excess = max(seconds / expected_s, 1.0)
            self._excess = max(excess, _mean(self._excess, excess))

    def _is_over_limit(self) -> bool:
        """A chunk takes too long however small it is."""
        return self._is_dear and self._chunk.fixed > self._max_step_s


class _Line:
    """y = fixed + slope x through recent points, by least squares; fixed is at least 0."""

    def __init__(self, weight: float) -> None:
        """weight: of the newest point."""
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
