"""One cell: six arms decode the same tokens in turn, and must give the same bits.

`compute` has all experts in memory; `io` reads the same records in the same order and computes
nothing; `beside` is `compute` while records that nobody waits for are read. The other three read what
they compute with: synchronously (`none`), in the window of one layer (`layer`), or in the window of
the delay (`delay`). Speeds of a machine and a disk drift within seconds, so arms alternate token by
token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap.figures import Cell
from cflow.engine.lab.overlap.resident import Resident
from cflow.engine.lab.overlap.schedule import WINDOWS, Disk, Schedule, plan_step
from cflow.engine.lab.overlap.streams import Case, Pass, decode_case, open_case, passes
from cflow.engine.lab.overlap.tiers import Tiers, read_seconds
from cflow.engine.native import Context, TierStats

PAUSE_S = 1.0  # between two tokens of an arm, in the schedule: longer than a reader's credit
SLOWEST = 0.01  # of compute's speed; timings of a busy machine can say less than nothing is left
ARMS = ("compute", "beside", "io", *WINDOWS)

Contexts = Mapping[str, Context]  # by arm: of all but `io`


@dataclass(frozen=True)
class Round:
    """The case decoded once in each arm.

    seconds: by arm, of each token. read_s: by window, of each record read. reading: share of the
    time of the arm `beside` in which a read was in flight."""

    seconds: dict[str, tuple[float, ...]]
    read_s: dict[str, tuple[float, ...]]
    reading: float


class CellBench:
    def __init__(self, resident: Resident, tiers: Tiers, case: Case) -> None:
        self._resident = resident
        self._tiers = tiers
        self._case = case
        self._trace = resident.trace(case)

    def measure(self, n_rounds: int, report: Callable[[int], None]) -> Cell:
        """report: is told how many rounds are done. LabError: an arm gives other bits."""
        rounds = []
        with self._contexts() as contexts:
            stages = self._resident.stage_seconds(contexts["compute"], self._case)
            want = self._warm_up(contexts)
            before = self._tiers.stats("delay")
            for done in range(n_rounds):
                report(done)
                rounds.append(self._round(contexts, want))
            after = self._tiers.stats("delay")
        report(n_rounds)
        return self._cell(stages, rounds, before, after)

    # ---- measuring ----

    @contextmanager
    def _contexts(self) -> Iterator[Contexts]:
        models = {arm: self._resident.model for arm in ("compute", "beside")}
        models |= {window: self._tiers.models[window] for window in WINDOWS}
        with ExitStack() as opened:
            yield {
                arm: opened.enter_context(closing(open_case(model, self._case)))
                for arm, model in models.items()
            }

    def _warm_up(self, contexts: Contexts) -> Pass:
        """Fills every cache with a first pass; returns the pass of `compute`."""
        want = decode_case(contexts["compute"], self._case)
        for window in WINDOWS:
            self.check_same(window, decode_case(contexts[window], self._case), want)
        return want

    def _round(self, contexts: Contexts, want: Pass) -> Round:
        tiers, traffic = self._tiers, self._tiers.traffic()
        streams = {arm: passes(context, self._case) for arm, context in contexts.items()}
        before = {arm: tiers.stats(arm) for arm in ("beside", *WINDOWS)}
        last, io_s = dict[str, Pass](), list[float]()
        for token in self._trace:
            io_s.append(tiers.read_token(token))
            with traffic:
                last["beside"] = next(streams["beside"])
            for arm in ("compute", *WINDOWS):
                last[arm] = next(streams[arm])
        for arm, one in last.items():
            self.check_same(arm, one, want)
        reading_ns = tiers.stats("beside").read_ns - before["beside"].read_ns
        return Round(
            seconds={arm: one.seconds for arm, one in last.items()} | {"io": tuple(io_s)},
            read_s={w: read_seconds(before[w], tiers.stats(w)) for w in WINDOWS},
            reading=reading_ns / 1e9 / traffic.seconds,
        )

    def check_same(self, arm: str, one: Pass, want: Pass) -> None:
        if one.choices != want.choices or one.crc != want.crc:
            raise LabError(
                f"{self._case.routing}: the arm `{arm}` gives other tokens or logits than with all "
                "experts in memory"
            )

    # ---- figures ----

    def _cell(
        self, stages: Sequence[float], rounds: Sequence[Round], before: TierStats, after: TierStats
    ) -> Cell:
        """stages: seconds of each. before, after: reads of the arm `delay` around the rounds."""
        case, tiers = self._case, self._tiers
        n = len(case.tokens) * len(rounds)
        speed = compute_speed(rounds)
        reading_s, n_reads = (after.read_ns - before.read_ns) / 1e9, after.reads - before.reads
        return Cell(
            routing=case.routing,
            threads=case.threads,
            experts=case.chosen,
            read_rate=tiers.rate,
            slots=tiers.slots,
            records=self._resident.records.n,
            misses=(after.misses - before.misses) / n,
            hits=(after.hits - before.hits) / n,
            io_eff_ms=1e3 * max(reading_s, n_reads * tiers.interval_s) / n,
            read_ms={w: _ms([statistics.fmean(one.read_s[w]) for one in rounds]) for w in WINDOWS},
            wake_ms=1e3 * tiers.wake_s,
            late_ms=1e3 * tiers.late_s,
            compute_speed=speed,
            predicted_ms={
                w: _ms(*(self._predict(stages, one, speed, w) for one in rounds)) for w in WINDOWS
            },
            **{f"{arm}_ms": _ms(*(one.seconds[arm] for one in rounds)) for arm in ARMS},
        )

    def _predict(
        self, stages: Sequence[float], one: Round, speed: float, window: str
    ) -> tuple[float, ...]:
        """Seconds of each token by the schedule.

        Stages are scaled to this round's compute. The trace runs twice and the second run counts, as
        in the measurement, whose first pass fills the cache."""
        scale = statistics.median(one.seconds["compute"]) / sum(stages)
        *each, rest = (scale * seconds for seconds in stages)
        tiers, resident = self._tiers, self._resident
        step = plan_step(resident.ops, each, rest, resident.top_k, self._case.chosen)
        disk = Disk(
            interval_s=tiers.interval_s,
            read_s=one.read_s[window],
            wake_s=tiers.wake_s,
            late_s=tiers.late_s,
            compute_speed=speed,
        )
        schedule = Schedule(step, disk, tiers.slots, window)
        schedule.token_seconds(self._trace, PAUSE_S)
        return tuple(schedule.token_seconds(self._trace, PAUSE_S))


def compute_speed(rounds: Sequence[Round]) -> float:
    """Share of its speed that compute keeps while a read is in flight.

    What the arm `beside` loses against `compute`, it loses only while it is reading."""
    alone_s, beside_s = (
        statistics.median(s for one in rounds for s in one.seconds[arm])
        for arm in ("compute", "beside")
    )
    reading = min(statistics.fmean(one.reading for one in rounds), 1.0)
    if not reading:
        return 1.0
    return min(max(1 - (1 - alone_s / beside_s) / reading, SLOWEST), 1.0)


def _ms(*rounds: Sequence[float]) -> tuple[float, ...]:
    """To the microsecond."""
    return tuple(round(1e3 * seconds, 3) for one in rounds for seconds in one)
