"""The figures of `cflow lab overlap`, docs/results/overlap.json, and the two laws they are held to."""

from __future__ import annotations

import statistics
from typing import Annotated

import msgspec

RESULTS = "docs/results/overlap.json"
ARMS = {  # by window (ExpertOptions)
    "none": "synchronous",
    "layer": "window of a layer",
    "delay": "window of the delay",
}


class Cell(msgspec.Struct, frozen=True):
    """One setting. Times are in milliseconds a token, one for each round and token.

    Medians are used throughout: a shared machine slows down single tokens."""

    routing: str
    threads: int
    experts: int  # a token and layer
    read_rate: float  # limit on reads, bytes a second
    slots: int
    records: int
    misses: float  # a token, in the arm "delay"
    hits: float
    compute_ms: tuple[float, ...]
    beside_ms: tuple[float, ...]  # compute beside reads that it does not wait for
    io_ms: tuple[float, ...]
    none_ms: tuple[float, ...]
    layer_ms: tuple[float, ...]
    delay_ms: tuple[float, ...]
    io_eff_ms: float  # disk time of a token's records in the arm "delay"
    read_ms: dict[str, tuple[float, ...]]  # mean time of a read, by window and round
    wake_ms: float  # to wake the reader, or the thread that waits for it
    late_ms: float  # by which a timer wakes a rate-limited reader late
    compute_speed: float  # share of its speed that compute keeps beside a read
    predicted_ms: dict[str, tuple[float, ...]]  # by the recursion: by window, then as the times

    @property
    def name(self) -> str:
        return (
            f"{self.routing}, {self.experts} experts a layer, {self.slots} of {self.records} records "
            f"in memory, {self.threads} threads"
        )

    def times(self, window: str) -> tuple[float, ...]:
        return {"none": self.none_ms, "layer": self.layer_ms, "delay": self.delay_ms}[window]

    def ms(self, window: str) -> float:
        return statistics.median(self.times(window))

    @property
    def c(self) -> float:
        """Compute alone, all experts in memory."""
        return statistics.median(self.compute_ms)

    @property
    def io(self) -> float:
        """Reads alone."""
        return statistics.median(self.io_ms)

    def net(self, window: str) -> float:
        """Speed-up over synchronous reads."""
        return self.ms("none") / self.ms(window)

    @property
    def law(self) -> float:
        """The paper's speed-up of the delay (5.14): (C + IO) / max(C, IO_eff)."""
        return (self.c + self.io) / max(self.c, self.io_eff_ms)

    @property
    def law_error(self) -> float:
        return self.law / self.net("delay") - 1

    def predicted(self, window: str) -> float:
        return statistics.median(self.predicted_ms[window])

    def recursion(self, window: str) -> float:
        """The speed-up that the schedule predicts from each round's own C and reads."""
        return self.predicted("none") / self.predicted(window)

    def recursion_error(self, window: str) -> float:
        return self.recursion(window) / self.net(window) - 1

    @property
    def is_balanced(self) -> bool:
        """Every expert is a miss, and C and IO lie within 20 % of each other."""
        return not self.hits and max(self.c, self.io) <= 1.2 * min(self.c, self.io)


class Overlap(msgspec.Struct, frozen=True):
    """overlap.json."""

    machine: str
    date: str
    command: str
    record_bytes: int  # of the random model
    n_layers: int
    cells: Annotated[tuple[Cell, ...], msgspec.Meta(min_length=1)]

    @property
    def balanced(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_balanced]

    @property
    def worst_recursion(self) -> float:
        """The largest error of the recursion over all cells and both windows."""
        errors = (cell.recursion_error(w) for cell in self.cells for w in ("layer", "delay"))
        return max(errors, key=abs)

    @property
    def worst_law(self) -> float:
        return max((cell.law_error for cell in self.cells), key=abs)
