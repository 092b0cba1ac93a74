"""`cflow lab overlap`: what a delay of experts is worth when they come from disk, beside two laws.

One file, one stream, six arms. C: all experts are resident. IO: the same records in the same order
and nothing computed. Both: C, while records that nobody waits for are read. Three read what they
compute with: synchronous (`none`), in the window of one layer (`layer`), in that of the delay
(`delay`). They take turns, token by token, and must give the same bits: a machine and a disk that
drift within seconds drift for all of them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from cflow.engine.base import machine
from cflow.engine.base.reports import Report, silent
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.files.synth import synth
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.measurements import shape_text
from cflow.engine.lab.schedule import WINDOWS, Disk, Schedule, Trace, plan_step
from cflow.engine.lab.widen import widen
from cflow.engine.measure.bare import decode, open_stream, step
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Context, Model, Pick, Row, TierStats, const, crc32c

RESULTS = "docs/results/overlap.json"
RATE_PART = 0.8  # of what one reader gets: what a shared disk holds
READS = 64  # to learn what a read costs beyond itself
SLEEP_S = 3e-4  # to learn how late timers are; about what a bounded reader sleeps
BATCH = 32  # records that are asked for together, to learn what one reader gets
TRAFFIC = 4  # records that are asked for together beside compute
PAUSE_S = 1.0  # between two tokens of an arm: the others' turns, longer than a reader's credit
ARMS = {
    "none": "synchronous",
    "layer": "window of a layer",
    "delay": "window of the delay",
}
ALL_ARMS = ("compute", "beside", "io", *WINDOWS)


@dataclass(frozen=True)
class Widths:
    """What makes a model's compute last as long as its reads."""

    d_model: int
    d_ff: int
    d_expert: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    random: Widths = Widths(2560, 34048, 192)
    trained: Widths = Widths(128, 131072, 6144)  # of the bundled model, widened
    n_layers: int = 16
    n_experts: int = 32
    top_k: int = 20
    tokens: int = 8
    rounds: int = 8
    threads: tuple[int, ...] = ()  # none: 1, 2, 4, .. up to this machine's less one

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """One core is left to the reader and its checksums: where all compute, the kernel decides who
        goes first, and no schedule knows."""
        most = max(machine.cores().threads - 1, 1)
        return self.threads or (*(t for t in (1, 2, 4, 8, 16) if t < most), most)


# ---- results ----


class Cell(msgspec.Struct, frozen=True):
    """One setting. Times are milliseconds, by round and token; medians leave out what a shared machine
    does to single tokens."""

    routing: str
    threads: int
    experts: int  # a token and layer
    read_rate: float  # the bound on reads, bytes a second
    slots: int
    records: int
    misses: float  # a token, in the arm of the delay
    hits: float
    compute_ms: tuple[float, ...]
    beside_ms: tuple[float, ...]  # compute, beside reads that it does not wait for
    io_ms: tuple[float, ...]
    none_ms: tuple[float, ...]
    layer_ms: tuple[float, ...]
    delay_ms: tuple[float, ...]
    io_eff_ms: (
        float  # what the disk takes for a token's records while the arm of the delay computes
    )
    read_ms: dict[str, tuple[float, ...]]  # of one record, by window and round
    wake_ms: float  # until a sleeping reader begins, or whoever waited for it runs on
    late_ms: float  # by which a timer wakes a reader that is held to a rate
    compute_speed: float  # what compute keeps of its speed beside a read
    predicted_ms: dict[str, tuple[float, ...]]  # by window, then as the times

    @property
    def name(self) -> str:
        return (
            f"{self.routing}, {self.experts} experts a layer, {self.slots} of {self.records} records "
            f"in memory, {self.threads} threads"
        )

    def ms(self, window: str) -> float:
        return statistics.median(self.times(window))

    def times(self, window: str) -> tuple[float, ...]:
        return {"none": self.none_ms, "layer": self.layer_ms, "delay": self.delay_ms}[window]

    @property
    def c(self) -> float:
        return statistics.median(self.compute_ms)

    @property
    def io(self) -> float:
        return statistics.median(self.io_ms)

    def net(self, window: str) -> float:
        """How much faster than synchronous reads, by the medians of both."""
        return self.ms("none") / self.ms(window)

    @property
    def law(self) -> float:
        """(C + IO) / max(C, IO_eff), eq. of paper 5.14."""
        return (self.c + self.io) / max(self.c, self.io_eff_ms)

    @property
    def law_error(self) -> float:
        return self.law / self.net("delay") - 1

    def predicted(self, window: str) -> float:
        return statistics.median(self.predicted_ms[window])

    def recursion(self, window: str) -> float:
        """The net that the schedule predicts, each round from its own C and reads."""
        return self.predicted("none") / self.predicted(window)

    def recursion_error(self, window: str) -> float:
        return self.recursion(window) / self.net(window) - 1

    @property
    def is_balanced(self) -> bool:
        """Every expert a miss, C and IO within 20 % of each other."""
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
        """The largest error of the recursion, over cells and both windows."""
        errors = (cell.recursion_error(w) for cell in self.cells for w in ("layer", "delay"))
        return max(errors, key=abs)

    @property
    def worst_law(self) -> float:
        return max((cell.law_error for cell in self.cells), key=abs)


# ---- what is decoded ----


@dataclass(frozen=True)
class Case:
    """A stream of fixed tokens, of which each cell decodes as many."""

    routing: str
    tokens: tuple[int, ...]
    threads: int
    chosen: int


def uniform_tokens(n_tokens: int, n: int) -> tuple[int, ...]:
    return tuple(random.Random(1).choices(range(n_tokens), k=n))


def local_tokens(n_tokens: int, n: int) -> tuple[int, ...]:
    """Zipf-like, with temporal locality: every other token is one of the last four again."""
    generator, tokens = random.Random(2), list[int]()
    weights = [1 / rank for rank in range(1, n_tokens + 1)]
    while len(tokens) < n:
        if tokens and generator.random() < 0.5:
            tokens.append(generator.choice(tokens[-4:]))
        else:
            tokens += generator.choices(range(n_tokens), weights)
    return tuple(tokens)


@dataclass(frozen=True)
class Pass:
    """A case, decoded as far as it is. seconds: of each token. choices: the greedy ones. crc: of all
    logits."""

    seconds: tuple[float, ...]
    choices: tuple[int, ...]
    crc: int


def _open_context(model: Model, case: Case, *, keep_values: bool = False) -> Context:
    return open_stream(model, len(case.tokens), threads=case.threads, keep_values=keep_values)


def _tokens(context: Context, case: Case) -> Iterator[Pass]:
    """Decodes the case token by token. Only the time of these counts, not that between them."""
    done, pick = Pass((), (), 0), Pick(0, temperature=0.0)
    start = time.perf_counter()
    for _ in decode(context, ([token] for token in case.tokens), n_experts=case.chosen):
        choices = (*done.choices, context.sample([pick])[0].token)
        crc = crc32c(context.logits(0), done.crc)
        done = Pass((*done.seconds, time.perf_counter() - start), choices, crc)
        yield done
        start = time.perf_counter()


def _decode(context: Context, case: Case) -> Pass:
    *_, done = _tokens(context, case)
    return done


def story(model: Model, n: int) -> tuple[int, ...]:
    """What the model itself tells, greedily, after the end of another story."""
    pick = Pick(0, temperature=0.0)
    tokens = [int(model.metadata["eos_ids"][0])]
    with closing(open_stream(model, n, threads=1)) as context:
        for position in range(n - 1):
            step(context, [Row(0, tokens[-1], position, const.CFLOW_ROW_LOGITS)])
            tokens.append(context.sample([pick])[0].token)
    return tuple(tokens)


# ---- one file ----


class _File:
    """A model with all experts resident, and its records."""

    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self.model = Model(str(path), threads=threads)
        self.bank = ExpertBank.of(self.model)
        self.layers = self.model.layers
        self.ops = self.model.ops
        self.first = [0]  # record of each layer's expert 0
        for layer in self.layers:
            self.first.append(self.first[-1] + layer.n_experts)
        self.places = [
            (index, expert)
            for index, tensor in enumerate(self.model.tensors)
            if tensor.role == const.Role.EXPERT_DOWN
            for expert in range(self.layers[tensor.block].n_experts)
        ]  # of each record: a tensor in it, which expert

    @property
    def least_slots(self) -> int:
        """What all experts of a delay's window take, and one read: fewer would shorten it."""
        window = max(layer.expert_delay for layer in self.layers) + 1
        return window * max(layer.top_k for layer in self.layers) + 1

    def trace(self, case: Case) -> Trace:
        tokens: Trace = []
        with closing(_open_context(self.model, case, keep_values=True)) as context:
            for _ in _tokens(context, case):
                values = [context.value(f"L{i}.routed", 0) for i in range(len(self.layers))]
                tokens.append(
                    [
                        [first + expert for expert in sorted(ids[ids >= 0].astype(int).tolist())]
                        for first, ids in zip(self.first[:-1], values, strict=True)
                    ]
                )
        return tokens

    def stage_seconds(self, context: Context, case: Case) -> list[float]:
        """Of each stage, then of the head with what lies between tokens; means over the tokens."""
        n_stages = self.model.plan.n_stages
        with _Watch(context) as watch:
            _decode(context, case)
        began = watch.began(len(case.tokens) * (n_stages + 2))
        each = np.diff(began).reshape(len(case.tokens), n_stages + 2).mean(axis=0)
        return [*each[:n_stages].tolist(), float(each[n_stages:].sum())]

    def read(self, model: Model, record: int) -> None:
        """Through model's expert cache; nothing else is done with it."""
        index, expert = self.places[record]
        model.rows(index, expert, 0, 0)

    def read_all(self, model: Model, records: Sequence[int]) -> None:
        """One after the other, asked for together; they fit the cache together."""
        uses = np.zeros(len(self.places), np.uint64)
        uses[list(records)] = 1
        model.warm(uses)

    def shuffled(self) -> list[int]:
        return random.Random(3).sample(range(len(self.places)), len(self.places))

    def held_rate(self) -> float:
        """Bytes a second of one reader that nobody bounds, less a little."""
        cache, records = (BATCH + 1) * self.bank.record_bytes, self.shuffled()
        with closing(Model(str(self.path), experts={"cache": cache, "expert_reads": 1})) as model:
            self.read_all(model, records[-BATCH:])  # memory's first touch is slower than any disk
            start, before = time.perf_counter(), _tier(model).warm_bytes
            for first in range(0, len(records), BATCH):
                self.read_all(model, records[first : first + BATCH])
            seconds = time.perf_counter() - start
            return RATE_PART * (_tier(model).warm_bytes - before) / seconds

    def close(self) -> None:
        self.model.close()


def _tier(model: Model) -> TierStats:
    if model.tier is None or not model.tier.direct_io:
        raise LabError("this disk has no direct reads; take another folder")
    return model.tier


class _Watch(threading.Thread):
    """Notes when a context's stages begin, from beside it."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._over = threading.Event()
        self._looks: list[tuple[int, float]] = []

    def _look(self) -> None:
        self._looks.append((self._context.stage_count, time.perf_counter()))

    def run(self) -> None:
        while not self._over.wait(2e-5):
            self._look()

    def __enter__(self) -> _Watch:
        self._look()
        self.start()
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._look()

    def began(self, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """When each of n stages was first seen, and the end: (n + 1,) seconds."""
        counts, times = (np.array(column) for column in zip(*self._looks, strict=True))
        if counts[-1] - counts[0] != n:
            raise LabError(f"{counts[-1] - counts[0]} stages ran, the plan has {n}")
        first = np.searchsorted(counts, counts[0] + 2 + np.arange(n - 1))
        return np.concatenate([[self._began_s], times[first], times[-1:]])


class _Tiers:
    """The same file with an expert cache, once for each window, once for reads alone (`io`) and once
    for reads beside compute (`beside`); one reader each, at a bounded rate."""

    def __init__(self, file: _File, slots: int, rate: float, threads: int) -> None:
        self._file = file
        self.rate = rate
        self._open = ExitStack()
        self.models = {window: self._model(window, slots, threads) for window in WINDOWS}
        self.models |= {arm: self._model("none", slots, threads) for arm in ("io", "beside")}
        self.slots = self.stats("delay").n_slots
        self.wake_s = self._wake_s()
        self.late_s = late_s()

    def _model(self, window: str, slots: int, threads: int) -> Model:
        model = Model(
            str(self._file.path),
            threads=threads,
            experts={
                "cache": slots * self._file.bank.record_bytes,
                "expert_reads": 1,
                "bytes_per_s": self.rate,
                "speculate": False,
                "window": window,
            },
        )
        return self._open.enter_context(closing(model))

    def stats(self, arm: str) -> TierStats:
        return _tier(self.models[arm])

    @property
    def interval_s(self) -> float:
        return self._file.bank.record_bytes / self.rate

    def read_all(self, token: Sequence[Sequence[int]]) -> float:
        """In seconds, with nothing computed; a layer's records are asked for together."""
        start = time.perf_counter()
        for layer in token:
            self._file.read_all(self.models["io"], layer)
        return time.perf_counter() - start

    def _wake_s(self) -> float:
        """Until a sleeping reader begins, and from a read's end until its asker runs on: half of both."""
        times, before = [], self.stats("io")
        for record in self._file.shuffled()[:READS]:
            time.sleep(2 * self.interval_s)  # a bounded reader starts at once
            start = time.perf_counter()
            self._file.read(self.models["io"], record)
            times.append(time.perf_counter() - start)
        return max(statistics.fmean(times) - mean_read_s(before, self.stats("io")), 0.0) / 2

    def traffic(self) -> _Traffic:
        return _Traffic(self._file, self.models["beside"])

    def close(self) -> None:
        self._open.close()


def late_s() -> float:
    """By which a timer of this machine wakes a thread too late."""
    late = []
    for _ in range(READS):
        start = time.perf_counter()
        time.sleep(SLEEP_S)
        late.append(time.perf_counter() - start - SLEEP_S)
    return statistics.median(late)


def mean_read_s(before: TierStats, after: TierStats) -> float:
    return (after.read_ns - before.read_ns) / 1e9 / max(after.reads - before.reads, 1)


def read_seconds(before: TierStats, after: TierStats) -> tuple[float, ...]:
    """Of each read between the two, in an order of chance: from the histogram, whose classes double,
    and the mean. A few slow reads make a window too short that the mean fits into."""
    taken = [
        2.0**i
        for i, (old, new) in enumerate(zip(before.latencies, after.latencies, strict=True))
        for _ in range(new - old)
    ]
    if not taken:
        return (0.0,)  # all hits
    unit = mean_read_s(before, after) * len(taken) / sum(taken)
    return tuple(unit * seconds for seconds in random.Random(4).sample(taken, len(taken)))


class _Traffic:
    """Reads records that nobody waits for, back to back, while it is entered. seconds: how long that
    was, in all."""

    def __init__(self, file: _File, model: Model) -> None:
        records = file.shuffled()
        batches = [records[i : i + TRAFFIC] for i in range(0, len(records), TRAFFIC)]
        self._batches = itertools.cycle(batches)  # longer than any cache: each is a read
        self._read = partial(file.read_all, model)
        self.seconds = 0.0

    def _run(self) -> None:
        while not self._over.is_set():
            self._read(next(self._batches))

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began_s = time.perf_counter()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds += time.perf_counter() - self._began_s


# ---- a cell ----


def compute_speed(alone_s: float, beside_s: float, reading: float) -> float:
    """What compute loses beside reads, it loses while one is under way, that part of the time."""
    return min(1 - (1 - alone_s / beside_s) / min(reading, 1.0), 1.0)


@dataclass(frozen=True)
class _Round:
    """seconds: of each arm's tokens. read_s: of its records, by window. reading: part of the time of
    the arm `beside` in which a read was under way."""

    seconds: dict[str, tuple[float, ...]]
    read_s: dict[str, tuple[float, ...]]
    reading: float


@dataclass
class _Cell:
    """Measures one case."""

    file: _File
    tiers: _Tiers
    case: Case

    def measure(self, rounds: int, report: Callable[[int], None]) -> Cell:
        case, tiers = self.case, self.tiers
        trace, found = self.file.trace(case), list[_Round]()
        models = {"compute": self.file.model, "beside": self.file.model}
        models |= {window: tiers.models[window] for window in WINDOWS}
        with ExitStack() as opened:
            contexts = {
                arm: opened.enter_context(closing(_open_context(model, case)))
                for arm, model in models.items()
            }
            stages = self.file.stage_seconds(contexts["compute"], case)
            want = _decode(contexts["compute"], case)
            for window in WINDOWS:
                self._same(window, _decode(contexts[window], case), want)
            before = tiers.stats("delay")
            for done in range(rounds):
                report(done)
                found.append(self._round(contexts, trace, want))
            after = tiers.stats("delay")
        report(rounds)
        n = len(case.tokens) * rounds
        n_reads, reading_s = after.reads - before.reads, (after.read_ns - before.read_ns) / 1e9
        alone_s, beside_s = (
            statistics.median(s for one in found for s in one.seconds[arm])
            for arm in ("compute", "beside")
        )
        speed = compute_speed(alone_s, beside_s, statistics.fmean(one.reading for one in found))
        predicted = {
            w: [self._predict(stages, one, speed, trace, w) for one in found] for w in WINDOWS
        }
        return Cell(
            routing=case.routing,
            threads=case.threads,
            experts=case.chosen,
            read_rate=tiers.rate,
            slots=tiers.slots,
            records=self.file.bank.n_records,
            misses=(after.misses - before.misses) / n,
            hits=(after.hits - before.hits) / n,
            io_eff_ms=1e3 * max(reading_s, n_reads * tiers.interval_s) / n,
            read_ms={w: _ms([statistics.fmean(one.read_s[w]) for one in found]) for w in WINDOWS},
            wake_ms=1e3 * tiers.wake_s,
            late_ms=1e3 * tiers.late_s,
            compute_speed=speed,
            predicted_ms={w: _ms(*times) for w, times in predicted.items()},
            **{f"{arm}_ms": _ms(*(one.seconds[arm] for one in found)) for arm in ALL_ARMS},
        )

    def _round(self, contexts: dict[str, Context], trace: Trace, want: Pass) -> _Round:
        """The case once in each arm, which take turns with its tokens."""
        tiers, traffic = self.tiers, self.tiers.traffic()
        streams = {arm: _tokens(context, self.case) for arm, context in contexts.items()}
        passes, io_s = dict[str, Pass](), list[float]()
        before = {arm: tiers.stats(arm) for arm in ("beside", *WINDOWS)}
        for token in trace:
            io_s.append(tiers.read_all(token))
            with traffic:
                passes["beside"] = next(streams["beside"])
            passes["compute"] = next(streams["compute"])
            for window in WINDOWS:
                passes[window] = next(streams[window])
        for arm, one in passes.items():
            self._same(arm, one, want)
        seconds = {arm: one.seconds for arm, one in passes.items()} | {"io": tuple(io_s)}
        reading_ns = tiers.stats("beside").read_ns - before["beside"].read_ns
        read_s = {w: read_seconds(before[w], tiers.stats(w)) for w in WINDOWS}
        return _Round(seconds, read_s, reading_ns / 1e9 / traffic.seconds)

    def _same(self, arm: str, one: Pass, want: Pass) -> None:
        if one.choices != want.choices or one.crc != want.crc:
            raise LabError(
                f"{self.case.routing}: the arm `{arm}` gives other tokens than memory does"
            )

    def _predict(
        self, stages: Sequence[float], one: _Round, speed: float, trace: Trace, window: str
    ) -> tuple[float, ...]:
        """Seconds of each token. The watched stages, as long together as compute was in this round. The
        second time: as here, the first has filled the cache."""
        scale = statistics.median(one.seconds["compute"]) / sum(stages)
        *each, rest = (scale * seconds for seconds in stages)
        top_k = max(layer.top_k for layer in self.file.layers)
        whole = plan_step(self.file.ops, each, rest, top_k, self.case.chosen)
        tiers = self.tiers
        disk = Disk(
            interval_s=tiers.interval_s,
            read_s=one.read_s[window],
            wake_s=tiers.wake_s,
            late_s=tiers.late_s,
            compute_speed=speed,
        )
        plan = Schedule(whole, disk, tiers.slots, window)
        plan.token_seconds(trace, PAUSE_S)
        return tuple(plan.token_seconds(trace, PAUSE_S))


def _ms(*rounds: Sequence[float]) -> tuple[float, ...]:
    """To the microsecond."""
    return tuple(round(1e3 * seconds, 3) for one in rounds for seconds in one)


# ---- all cells ----


def measure(
    folder: Path,
    here: str,
    *,
    sizes: Sizes | None = None,
    read_rate: float | None = None,
    report: Report = silent,
) -> Overlap:
    """Makes its files in folder, some 3 GB, and removes them. here: names the machine. read_rate:
    bytes a second; None: what the disk holds. LabError: arms differ, or the disk cannot be used."""
    sizes = sizes or Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="overlap-") as scratch:
        bench = _Bench(Path(scratch), sizes, read_rate, report)
        cells = [*bench.random_cells(), *bench.trained_cells()]
    return Overlap(
        machine=here,
        date=date.today().isoformat(),
        command="cflow lab overlap",
        record_bytes=bench.record_bytes,
        n_layers=sizes.n_layers,
        cells=tuple(cells),
    )


class _Bench:
    def __init__(self, folder: Path, sizes: Sizes, rate: float | None, report: Report) -> None:
        self._folder = folder
        self._sizes = sizes
        self._asked_rate = rate
        self._report = report
        self.record_bytes = 0

    def random_cells(self) -> list[Cell]:
        sizes, path = self._sizes, self._folder / "random.cflow"
        shape = self._folder / "random.toml"
        shape.write_text(
            shape_text(
                "arch2_4_combined",
                sizes.random.d_model,
                sizes.n_layers,
                d_ff=sizes.random.d_ff,
                n_experts=sizes.n_experts,
                top_k=sizes.top_k,
                d_expert=sizes.random.d_expert,
            )
        )
        synth(str(shape), path, progress=partial(self._report, "synth"))
        with closing(self._file(path)) as file:
            self.record_bytes = file.bank.record_bytes
            n_tokens, cells = file.model.header.n_tokens, list[Cell]()
            tokens = uniform_tokens(n_tokens, sizes.tokens)
            levels = list[Case]()
            for threads in sizes.thread_counts:
                most, rate = Case("uniform", tokens, threads, sizes.top_k), self._rate(file)
                levels.append(self._level(file, most, rate))
                cells += [
                    self._cell(file, file.least_slots, case, rate) for case in (levels[-1], most)
                ]
            tokens = local_tokens(n_tokens, 2 * sizes.tokens)
            local = replace(levels[0], routing="Zipf-like", tokens=tokens)
            for share in (4, 2):
                slots = file.bank.n_records // share
                cells.append(self._cell(file, slots, local, self._rate(file)))
        path.unlink()
        return cells

    def _level(self, file: _File, most: Case, rate: float) -> Case:
        """With so many experts that reads take as long as compute, or just longer. At least two, so
        that no record of a token is still there for the next."""
        with closing(_open_context(file.model, most)) as context:
            compute_s = statistics.median(
                s for _ in range(4) for s in _decode(context, most).seconds
            )
        chosen = math.ceil(compute_s / self._sizes.n_layers * rate / file.bank.record_bytes)
        return replace(most, chosen=min(max(chosen, 2), most.chosen))

    def trained_cells(self) -> list[Cell]:
        sizes, path = self._sizes, self._folder / "trained.cflow"
        self._report("widen", 0, 1)
        widen(BUNDLED_FILE, path, sizes.trained.d_ff, sizes.trained.d_expert)
        self._report("widen", 1, 1)
        with closing(self._file(path)) as file:
            tokens = story(file.model, 4 * sizes.tokens)
            case = Case("real", tokens, sizes.thread_counts[0], file.layers[0].top_k)
            cells = [
                self._cell(file, slots, case, self._rate(file))
                for slots in (file.least_slots, file.bank.n_records // 2)
            ]
        path.unlink()
        return cells

    def _file(self, path: Path) -> _File:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # or the disk would still be writing it while it is measured
        return _File(path, self._sizes.thread_counts[-1])

    def _rate(self, file: _File) -> float:
        return self._asked_rate or file.held_rate()

    def _cell(self, file: _File, slots: int, case: Case, rate: float) -> Cell:
        rounds, name = self._sizes.rounds, _name(case)
        with closing(_Tiers(file, slots, rate, case.threads)) as tiers:
            return _Cell(file, tiers, case).measure(
                rounds, lambda done: self._report(name, done, rounds)
            )


def _name(case: Case) -> str:
    return f"{case.routing}, {case.threads} threads, {case.chosen} experts"
