"""The schedule of a token whose experts come from disk, computed from its plan without running it.

Stages run in order, each as long as its ops take. Experts are demanded when the plan says so and read
one after the other by one disk; a stage with experts runs in waves, as in native/src/waves.c and
tier.h. The inputs, times of ops and of reads, are measured separately. Nothing is fitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cflow.engine.base.native_types import OpInfo
from cflow.engine.lab.errors import LabError

CREDIT_S = 1e-3  # by which a rate-limited reader may be ahead (native/src/tier.c)
NOTHING_S = 1e-12  # what rounding leaves of a span
WINDOWS = ("none", "layer", "delay")  # when experts are demanded (ExpertOptions)

Trace = list[list[list[int]]]  # token, layer: its records, in the order of demand


@dataclass(frozen=True)
class Stage:
    """Ops between two barriers. seconds: of all but experts. routed: layers whose router runs here.
    landed: layers whose experts land in a layer that routes here. starts, ends: layers whose experts
    begin (gate and up) and end (down) here."""

    seconds: float
    routed: tuple[int, ...] = ()
    landed: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A token's stages, and the time of one expert."""

    stages: tuple[Stage, ...]
    gated_s: float
    down_s: float
    rest_s: float  # the head, and the time between tokens

    @property
    def seconds(self) -> float:
        """Seconds of a token with all experts resident and one expert a layer."""
        each = len([1 for stage in self.stages for _ in stage.starts])
        fixed = sum(stage.seconds for stage in self.stages)
        return fixed + each * (self.gated_s + self.down_s) + self.rest_s


@dataclass(frozen=True)
class Disk:
    """interval_s: least time between the starts of two reads. read_s: time of each read in turn, in a
    cycle. wake_s: to wake the reader, or the thread that waits for it. late_s: by which a timer wakes
    the reader late. compute_speed: share of its speed that compute keeps beside a read, as both use
    memory and perhaps the same cores."""

    interval_s: float
    read_s: Sequence[float]
    wake_s: float = 0.0
    late_s: float = 0.0
    compute_speed: float = 1.0


def plan_step(
    ops: Sequence[OpInfo], seconds: Sequence[float], rest_s: float, top_k: int, chosen: int
) -> Step:
    """seconds: of each stage, measured with `chosen` of top_k experts a layer, all resident."""
    fixed, each = _split(ops, seconds, top_k, chosen)
    routes, gates, downs = (
        _stages_of(ops, kind) for kind in ("select", "expert_gate_up", "expert_down")
    )
    combines = {op.stage: op.layer - 1 for op in ops if _kind(op) in ("x_in", "x_out")}
    lands = {layer: combines[stage + 1] for layer, stage in downs.items()}

    def stage(index: int) -> Stage:
        routed = _layers_at(routes, index)
        landed = tuple(sorted(layer for layer, to in lands.items() if to in routed))
        starts, ends = _layers_at(gates, index), _layers_at(downs, index)
        return Stage(max(fixed[index], 0.0), routed, landed, starts, ends)

    stages = tuple(stage(index) for index in range(len(seconds)))
    return Step(stages, each["expert_gate_up"], each["expert_down"], rest_s)


def _split(
    ops: Sequence[OpInfo], seconds: Sequence[float], top_k: int, chosen: int
) -> tuple[list[float], dict[str, float]]:
    """Each stage's time without experts, and the mean time of one expert by kind of op.

    The ops of a stage share its time by the bytes they read; of experts, those of the chosen."""
    weights = [op.bytes * (chosen / top_k if _is_expert(op) else 1) for op in ops]
    total = [0.0] * len(seconds)
    for op, weight in zip(ops, weights, strict=True):
        total[op.stage] += weight
    fixed = list(seconds)
    taken: dict[str, list[float]] = {"expert_gate_up": [], "expert_down": []}
    for op, weight in zip(ops, weights, strict=True):
        if _is_expert(op):
            share = seconds[op.stage] * weight / total[op.stage]
            fixed[op.stage] -= share
            taken[_kind(op)].append(share / chosen)
    return fixed, {kind: sum(times) / len(times) for kind, times in taken.items()}


def _kind(op: OpInfo) -> str:
    return op.name.rpartition(".")[2]


def _is_expert(op: OpInfo) -> bool:
    return _kind(op) in ("expert_gate_up", "expert_down")


def _stages_of(ops: Sequence[OpInfo], kind: str) -> dict[int, int]:
    """The stage of each layer's op of that kind."""
    return {op.layer: op.stage for op in ops if _kind(op) == kind}


def _layers_at(stages: Mapping[int, int], stage: int) -> tuple[int, ...]:
    return tuple(sorted(layer for layer, where in stages.items() if where == stage))


@dataclass
class Cache:
    """The expert cache over time: one reader, and eviction of the least recently used record."""

    disk: Disk
    n_slots: int
    now: float = 0.0
    n_reads: int = 0
    _paced: float = 0.0  # no read begins before this time
    _reads: Iterator[float] = field(init=False)
    _queue: list[int] = field(default_factory=list)
    _loading: int | None = None
    _left: float = 0.0  # time until its read ends
    _ended: float = -math.inf  # when the last read ended
    _begins: float | None = None  # when the next read begins; None: not decided yet
    _used: dict[int, None] = field(default_factory=dict)  # resident, the least recently used first
    _needed: set[int] = field(default_factory=set)  # demanded or pinned: not evicted

    def __post_init__(self) -> None:
        self._reads = itertools.cycle(self.disk.read_s)

    def demand(self, records: Iterable[int]) -> None:
        for record in records:
            self._needed.add(record)
            if record in self._used:
                self._touch(record)
            elif record not in self._queue and record != self._loading:
                self._queue.append(record)

    def is_demanded(self, record: int) -> bool:
        return record in self._needed

    def resident(self, records: Iterable[int]) -> list[int]:
        return [record for record in records if record in self._used]

    def release(self, records: Iterable[int]) -> None:
        for record in records:
            self._needed.discard(record)
            self._touch(record)

    def compute(self, seconds: float) -> None:
        """Passes the time of a computation: `seconds` alone, longer beside reads."""
        self._elapse(seconds, self.disk.compute_speed)

    def idle(self, seconds: float) -> None:
        self._elapse(seconds, 1.0)

    def wait(self, records: Sequence[int]) -> None:
        """Blocks until one of the records is resident."""
        slept = False
        while not self.resident(records):
            self._begin_read(records)
            span = self._next_event()
            if span == math.inf:
                raise LabError(f"{self.n_slots} slots are too few for the experts of a stage")
            self._pass(span)
            slept = True
        if slept:
            self.idle(self.disk.wake_s)

    def _elapse(self, seconds: float, speed_beside_read: float) -> None:
        while seconds > NOTHING_S:
            self._begin_read(())
            speed = 1.0 if self._loading is None else speed_beside_read
            span = min(seconds / speed, self._next_event())
            self._pass(span)
            seconds -= span * speed

    def _touch(self, record: int) -> None:
        del self._used[record]
        self._used[record] = None

    def _victim(self) -> int | None:
        return next((record for record in self._used if record not in self._needed), None)

    def _has_room(self) -> bool:
        return len(self._used) < self.n_slots or self._victim() is not None

    def _next_event(self) -> float:
        """Seconds until the current read ends or the next can begin; inf if neither will."""
        if self._loading is not None:
            return self._left
        if not self._queue or not self._has_room():
            return math.inf
        if self._begins is None:
            awake = self.now if self.now <= self._ended else self.now + self.disk.wake_s
            is_paced = self._paced > awake
            self._begins = self._paced + self.disk.late_s if is_paced else awake
        return max(self._begins - self.now, 0.0)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self._loading is None:
            return
        self._left -= seconds
        if self._left <= NOTHING_S:
            self._used[self._loading] = None
            self._loading, self._ended = None, self.now

    def _begin_read(self, waited: Sequence[int]) -> None:
        """Begins a read if one can begin now, of a record in `waited` first."""
        if self._loading is not None or self._next_event() > NOTHING_S:
            return
        record = next((r for r in self._queue if r in waited), self._queue[0])
        self._queue.remove(record)
        if len(self._used) >= self.n_slots and (victim := self._victim()) is not None:
            del self._used[victim]
        self._loading, self._left, self._begins = record, next(self._reads), None
        self._paced = max(self._paced, self.now - CREDIT_S) + self.disk.interval_s
        self.n_reads += 1


class Schedule:
    """Runs tokens through a plan. window: one of WINDOWS."""

    def __init__(self, step: Step, disk: Disk, n_slots: int, window: str) -> None:
        self._step = step
        self._window = window
        self.cache = Cache(disk, n_slots)

    def token_seconds(self, trace: Trace, pause_s: float = 0.0) -> list[float]:
        """Time of each token, one after the other, without the pause that follows it."""
        seconds = []
        for token in trace:
            begin = self.cache.now
            self._run(token)
            seconds.append(self.cache.now - begin)
            self.cache.idle(pause_s)
        return seconds

    def _run(self, wanted: Sequence[Sequence[int]]) -> None:
        step, cache = self._step, self.cache
        ending: list[int] = []  # experts that are in their down projection
        for stage in step.stages:
            waiting = [record for layer in stage.starts for record in wanted[layer]]
            cache.demand(record for record in waiting if not cache.is_demanded(record))
            if self._window == "none":
                for record in waiting:
                    cache.wait([record])
            ready, waiting = self._ready(waiting)
            asked = {"none": (), "layer": stage.landed, "delay": stage.routed}[self._window]
            for layer in asked:
                cache.demand(wanted[layer])
            ending = self._wave(ready, ending, stage.seconds)
            while waiting:
                ready, waiting = self._ready(waiting)
                if ready or ending:
                    ending = self._wave(ready, ending)
                else:
                    cache.wait(waiting)
        cache.compute(step.rest_s)

    def _wave(self, ready: list[int], ending: list[int], seconds: float = 0.0) -> list[int]:
        """Gate and up of `ready` beside down of `ending`, which is released; returns what ends next."""
        step = self._step
        self.cache.compute(seconds + len(ready) * step.gated_s + len(ending) * step.down_s)
        self.cache.release(ending)
        return ready

    def _ready(self, waiting: list[int]) -> tuple[list[int], list[int]]:
        ready = self.cache.resident(waiting)
        return ready, [record for record in waiting if record not in ready]
