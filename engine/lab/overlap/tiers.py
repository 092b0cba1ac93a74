"""A model file behind expert caches with one rate-limited reader each, and what their reads cost."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap.records import Records
from cflow.engine.lab.overlap.schedule import WINDOWS
from cflow.engine.native import Model, TierStats

RATE_PART = 0.8  # of one reader's unlimited rate: a rate that a shared disk holds
READS = 64  # samples of a wake-up and of a timer
SLEEP_S = 3e-4  # a sleep of a rate-limited reader, about
BATCH = 32  # records demanded together to measure the rate of one reader
TRAFFIC = 4  # records demanded together beside compute


class Tiers:
    """One model of the same file for each arm that reads: each window, reads alone (`io`) and reads
    beside compute (`beside`)."""

    def __init__(self, path: Path, records: Records, slots: int, rate: float, threads: int) -> None:
        """rate: limit on reads, bytes a second."""
        self._records = records
        self.rate = rate
        self.interval_s = records.bytes / rate
        self._open = ExitStack()
        windows = {window: window for window in WINDOWS} | {"io": "none", "beside": "none"}
        self.models = {
            arm: self._model(path, slots, threads, window) for arm, window in windows.items()
        }
        self.slots = self.stats("delay").n_slots
        self.wake_s = self._measure_wake()
        self.late_s = measure_lateness()

    def _model(self, path: Path, slots: int, threads: int, window: str) -> Model:
        model = Model(
            str(path),
            threads=threads,
            experts={
                "cache": slots * self._records.bytes,
                "expert_reads": 1,
                "bytes_per_s": self.rate,
                "speculate": False,
                "window": window,
            },
        )
        return self._open.enter_context(closing(model))

    def stats(self, arm: str) -> TierStats:
        return tier_stats(self.models[arm])

    def read_token(self, token: Sequence[Sequence[int]]) -> float:
        """Seconds to read a token's records and compute nothing, a layer's records demanded together."""
        start = time.perf_counter()
        for layer in token:
            self._records.read_together(self.models["io"], layer)
        return time.perf_counter() - start

    def _measure_wake(self) -> float:
        """Half of what a lone read takes beyond itself: the reader wakes up, then whoever waits."""
        times, before = [], self.stats("io")
        for record in self._records.shuffled()[:READS]:
            time.sleep(2 * self.interval_s)  # so that the limit does not delay the read
            start = time.perf_counter()
            self._records.read(self.models["io"], record)
            times.append(time.perf_counter() - start)
        return max(statistics.fmean(times) - mean_read_s(before, self.stats("io")), 0.0) / 2

    def traffic(self) -> Traffic:
        return Traffic(self.models["beside"], self._records)

    def close(self) -> None:
        self._open.close()


class Traffic:
    """Reads records back to back in another thread while it is entered; nobody waits for them.

    seconds: how long it has been entered in all."""

    def __init__(self, model: Model, records: Records) -> None:
        order = records.shuffled()
        batches = [order[i : i + TRAFFIC] for i in range(0, len(order), TRAFFIC)]
        self._batches = itertools.cycle(batches)  # longer than any cache: no record is a hit
        self._model, self._records = model, records
        self.seconds = 0.0

    def _run(self) -> None:
        while not self._over.is_set():
            self._records.read_together(self._model, next(self._batches))

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began_s = time.perf_counter()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds += time.perf_counter() - self._began_s


def tier_stats(model: Model) -> TierStats:
    if model.tier is None or not model.tier.direct_io:
        raise LabError("this disk has no direct reads; use a folder on another one")
    return model.tier


def held_rate(path: Path, records: Records) -> float:
    """Bytes a second that one reader can hold: its unlimited rate, less a margin."""
    cache, order = (BATCH + 1) * records.bytes, records.shuffled()
    with closing(Model(str(path), experts={"cache": cache, "expert_reads": 1})) as model:
        records.read_together(model, order[-BATCH:])  # the first touch of memory is slow
        start, before = time.perf_counter(), tier_stats(model).warm_bytes
        for first in range(0, len(order), BATCH):
            records.read_together(model, order[first : first + BATCH])
        seconds = time.perf_counter() - start
        return RATE_PART * (tier_stats(model).warm_bytes - before) / seconds


def measure_lateness() -> float:
    """Seconds by which a timer of this machine wakes a thread too late."""
    late = []
    for _ in range(READS):
        start = time.perf_counter()
        time.sleep(SLEEP_S)
        late.append(time.perf_counter() - start - SLEEP_S)
    return statistics.median(late)


def mean_read_s(before: TierStats, after: TierStats) -> float:
    return (after.read_ns - before.read_ns) / 1e9 / max(after.reads - before.reads, 1)


def read_seconds(before: TierStats, after: TierStats) -> tuple[float, ...]:
    """Seconds of each read between two counts, in random order.

    Rebuilt from the histogram, whose classes double, and scaled to the mean. The mean alone would
    not do: a few slow reads miss a window that the mean fits into."""
    taken = [
        2.0**i
        for i, (old, new) in enumerate(zip(before.latencies, after.latencies, strict=True))
        for _ in range(new - old)
    ]
    if not taken:
        return (0.0,)  # all hits
    unit = mean_read_s(before, after) * len(taken) / sum(taken)
    return tuple(unit * seconds for seconds in random.Random(4).sample(taken, len(taken)))
