"""Speed of prefill and decode, beside the bandwidth of memory and disk.

Decode feeds random tokens to an empty context (or one filled to a depth) and samples greedily in
each step. Prefill is one prompt in steps of the server's size. The tokens are the same in every
bench but differ between its runs, so that no run finds the experts of an earlier one in the cache.
Memory, and the disk if weights are on it, are measured before each run of one stream and after the
last one, because their speeds drift within minutes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.base.reports import Report, silent
from cflow.engine.measure.bare import decode, open_bare, step
from cflow.engine.measure.disk_probe import probe_disk
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.memory.kv_blocks import BLOCK, n_blocks_for
from cflow.engine.memory.layer_memory import pieces
from cflow.engine.native import Context, Model, Pick, Row, TierStats, const

MAX_STEP_ROWS = 512
WARM_UP_STEPS = 4
PROBE_PASSES = 6


@dataclass(frozen=True)
class Runs:
    """Tokens a second of repeated runs."""

    min: float
    median: float
    max: float

    @staticmethod
    def of(rates: Sequence[float]) -> Runs:
        return Runs(min(rates), statistics.median(rates), max(rates))


@dataclass(frozen=True)
class Batch:
    """Streams decoded together; rates are sums over the streams."""

    streams: int
    rates: Runs


@dataclass(frozen=True)
class TierUse:
    """What some tokens read from disk."""

    tokens: int
    hits: int
    misses: int
    reads: int  # misses, and speculative reads that were wrong
    disk_bytes: int
    stall_s: float

    @staticmethod
    def between(before: TierStats, after: TierStats, tokens: int) -> TierUse:
        return TierUse(
            tokens,
            after.hits - before.hits,
            after.misses - before.misses,
            after.reads - before.reads,
            after.disk_bytes - before.disk_bytes,
            (after.stall_ns - before.stall_ns) / 1e9,
        )

    def floor_tok_s(self, disk_gb_s: float) -> float | None:
        """Tokens a second if only reading the misses took time. None without misses, or without
        reads to tell their size (all were read ahead)."""
        if not self.misses or not self.reads:
            return None
        missed_bytes = self.disk_bytes * self.misses / self.reads
        return disk_gb_s * 1e9 * self.tokens / missed_bytes


@dataclass(frozen=True)
class Tier:
    """Records on disk, and what all runs of prefill and of one stream's decode read of them."""

    records: int
    in_memory: int  # slots of the expert cache, or layers always in memory
    io: str  # "direct" or "cached"
    prefill: TierUse
    decode: TierUse
    prefill_disk_probe_gb_s: float  # reads of such records, median of those between the runs
    disk_probe_gb_s: float  # the same for decode

    @property
    def floor_tok_s(self) -> float | None:
        return self.decode.floor_tok_s(self.disk_probe_gb_s)

    def experts_json(self) -> dict[str, Any]:
        return {
            "expert_records": self.records,
            "expert_slots": self.in_memory,
            "expert_io": self.io,
            "expert_hits": self.decode.hits,
            "expert_misses": self.decode.misses,
            "prefill_expert_hits": self.prefill.hits,
            "prefill_expert_misses": self.prefill.misses,
            **self._disk_json(""),
        }

    def layers_json(self) -> dict[str, Any]:
        return {
            "layer_records": self.records,
            "layers_kept": self.in_memory,
            "layer_io": self.io,
            "layer_reads": self.decode.misses,
            **self._disk_json("layer_"),
        }

    def _disk_json(self, prefix: str) -> dict[str, Any]:
        return {
            f"{prefix}disk_bytes": self.decode.disk_bytes,
            f"{prefix}stall_s": self.decode.stall_s,
            f"{prefix}disk_probe_gb_s": self.disk_probe_gb_s,
            f"{prefix}disk_floor_tok_s": self.floor_tok_s,
            f"prefill_{prefix}disk_bytes": self.prefill.disk_bytes,
            f"prefill_{prefix}disk_probe_gb_s": self.prefill_disk_probe_gb_s,
            f"prefill_{prefix}disk_floor_tok_s": self.prefill.floor_tok_s(
                self.prefill_disk_probe_gb_s
            ),
        }


@dataclass(frozen=True)
class BenchResult:
    model: str
    quant: str
    prompt: int  # tokens of a prefill run
    gen: int  # tokens of a decode run, per stream
    depth: int  # positions before them
    prefill: Runs
    decode: Runs
    batch: tuple[Batch, ...]
    bytes_per_token: int  # weights that a decode step reads
    kv_bytes_per_token: int  # keys and values of the depth that it also reads
    probes: tuple[float, ...]  # GB/s, before each run of decode and after the last one
    fraction: Runs  # rate of weight reads in decode, as a share of the probes around each run
    isa: str
    threads: int
    resident_bytes: int
    huge_page_ratio: float
    experts: Tier | None  # if some are on disk
    layers: Tier | None

    @property
    def read_gb_s(self) -> float:
        return self.bytes_per_token * self.decode.median / 1e9

    @property
    def probe_gb_s(self) -> float:
        return statistics.median(self.probes)

    def to_json(self) -> dict[str, Any]:
        """The report. Rates are medians; "runs" has the spread."""
        return {
            "model": self.model,
            "quant": self.quant,
            "prompt": self.prompt,
            "gen": self.gen,
            "depth": self.depth,
            "prefill_tok_s": self.prefill.median,
            "decode_tok_s": self.decode.median,
            "runs": {
                "prefill_tok_s": asdict(self.prefill),
                "decode_tok_s": asdict(self.decode),
                "bandwidth_fraction": asdict(self.fraction),
            },
            "batch": [
                {"streams": b.streams, "tok_s": b.rates.median, "runs": asdict(b.rates)}
                for b in self.batch
            ],
            "bytes_per_token": self.bytes_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "read_gb_s": self.read_gb_s,
            "probe_gb_s": self.probe_gb_s,
            "probes_gb_s": list(self.probes),
            "bandwidth_fraction": self.fraction.median,
            "isa": self.isa,
            "threads": self.threads,
            "resident_bytes": self.resident_bytes,
            "huge_page_ratio": self.huge_page_ratio,
            **(self.experts.experts_json() if self.experts else {}),
            **(self.layers.layers_json() if self.layers else {}),
        }


def run(
    config: EngineConfig,
    *,
    prompt: int | None = None,
    gen: int = 128,
    batch: Sequence[int] = (1, 4, 16),
    depth: int = 0,
    runs: int = 3,
    progress: Report = silent,
) -> BenchResult:
    """Load a model and measure prefill and decode `runs` times each. prompt: tokens; None: 512, or
    what the context holds after depth. gen: tokens of a decode run. batch: numbers of streams.
    depth: positions already in KV memory before prefill and decode begin."""
    header = Model(config.model, header_only=True)
    if prompt is None:
        prompt = min(MAX_STEP_ROWS, max(header.header.context - depth, 1))
    _check(header, prompt, gen, batch, depth, runs)
    streams = max([1, *batch])
    probe_bytes = machine.beyond_caches(
        machine.memory().available // 2
    )  # the other half is for the model
    kv_blocks = max(n_blocks_for(depth + prompt), streams * n_blocks_for(depth + gen))
    model, context, threads, kv_bytes = open_bare(
        config,
        progress,
        spare=probe_bytes,
        max_rows=max(streams, BLOCK, min(prompt, MAX_STEP_ROWS)),
        max_sequences=streams,
        max_context=depth + max(prompt, gen, WARM_UP_STEPS),
        n_kv_blocks=kv_blocks,
    )
    bench = _Bench(context, model.header.n_tokens, threads, probe_bytes, depth, runs, progress)
    bench.warm_up(kv_blocks)
    experts, layers = _experts(model, config), _layers(model, config)
    disks = [disk for disk in (experts, layers) if disk is not None]
    _note(disks)
    prefill = bench.prefill(prompt, disks)
    _note(disks)
    decode = bench.decode(1, gen, disks)
    _note(disks)
    batches = [Batch(n, Runs.of((decode if n == 1 else bench.decode(n, gen)).rates)) for n in batch]
    memory, bytes_per_token = model.memory, model.plan.bytes_per_token
    return BenchResult(
        model=model.metadata.get("name") or Path(config.model).stem,
        quant=model.encoding,
        prompt=prompt,
        gen=gen,
        depth=depth,
        prefill=prefill,
        decode=Runs.of(decode.rates),
        batch=tuple(batches),
        bytes_per_token=bytes_per_token,
        kv_bytes_per_token=_kv_read(model, depth) * kv_bytes // (kv_blocks * BLOCK),
        probes=decode.probes,
        fraction=decode.fraction(bytes_per_token),
        isa=context.isa,
        threads=threads,
        resident_bytes=memory.resident_bytes,
        huge_page_ratio=memory.huge_bytes / memory.resident_bytes,
        experts=experts.tier(runs * prompt, runs * gen) if experts else None,
        layers=layers.tier(runs * prompt, runs * gen) if layers else None,
    )


def _check(
    model: Model, prompt: int, gen: int, batch: Sequence[int], depth: int, runs: int
) -> None:
    limit = model.header.context
    if not 0 <= depth < limit:
        raise CflowError(f"depth {depth}: this model takes 0 to {limit - 1} tokens")
    behind = f" behind {depth}" if depth else ""
    for name, n in (("prompt", prompt), ("gen", gen)):
        if not 1 <= n <= limit - depth:
            raise CflowError(f"{name} {n}: this model takes 1 to {limit - depth} tokens{behind}")
    for name, n in (("runs", runs), *(("batch", n) for n in batch)):
        if n < 1:
            raise CflowError(f"{name} {n}: at least 1 is needed")


def _kv_read(model: Model, depth: int) -> int:
    """Positions that a token at this depth reads: the mean over layers and their windows."""
    read = [min(depth, layer.window or depth) for layer in model.layers]
    return sum(read) // len(read)


def _note(disks: Iterable[_Disk]) -> None:
    for disk in disks:
        disk.note()


def _experts(model: Model, config: EngineConfig) -> _Disk | None:
    """The disk reads of these weights; None if all are in memory."""
    if (tier := model.tier) is None:
        return None
    return _Disk(model, "tier", tier.n_slots, ExpertBank.of(model), config.expert_reads)


def _layers(model: Model, config: EngineConfig) -> _Disk | None:
    """The disk reads of these weights; None if all are in memory."""
    tier, records = model.layer_tier, model.layer_records
    if tier is None or records is None:
        return None
    bank = pieces(model, tier.slot_bytes)
    return _Disk(model, "layer_tier", records.n_kept, bank, config.expert_reads)


class _Disk:
    """Watches the disk reads of a model while it runs. counters: the property of the model that
    counts them. bank: records that measure the disk."""

    def __init__(
        self, model: Model, counters: str, in_memory: int, bank: ExpertBank, n_reads: int
    ) -> None:
        self._path = Path(model.path)
        self._stats: Callable[[], TierStats] = partial(getattr, model, counters)
        self._in_memory = in_memory
        self._bank = bank
        self._n_reads = n_reads
        self._rates: list[list[float]] = []  # after each note
        self._notes: list[TierStats] = []

    def probe(self, report: Report) -> None:
        report("disk probe", 0, 1)
        self._rates[-1].append(probe_disk(self._path, self._bank, self._n_reads) / 1e9)
        report("disk probe", 1, 1)

    def note(self) -> None:
        """Record the counters. Call it before prefill, after it, and after decode."""
        self._notes.append(self._stats())
        self._rates.append([])

    def tier(self, n_prompt: int, n_gen: int) -> Tier:
        """The result for this many tokens of prefill and decode."""
        first, between, last = self._notes
        return Tier(
            records=last.n_records,
            in_memory=self._in_memory,
            io="direct" if last.direct_io else "cached",
            prefill=TierUse.between(first, between, n_prompt),
            decode=TierUse.between(between, last, n_gen),
            prefill_disk_probe_gb_s=statistics.median(self._rates[0]),
            disk_probe_gb_s=statistics.median(self._rates[1]),
        )


@dataclass(frozen=True)
class Decoded:
    """Tokens a second of each run. probes: GB/s of memory around each run, for one stream."""

    rates: tuple[float, ...]
    probes: tuple[float, ...]

    def fraction(self, bytes_per_token: int) -> Runs:
        """Rate of weight reads as a share of the mean of the probes around each run."""
        beside = (sum(pair) / 2 * 1e9 for pair in pairwise(self.probes))
        pairs = zip(self.rates, beside, strict=True)
        return Runs.of([rate * bytes_per_token / probe for rate, probe in pairs])


class _Bench:
    """Times the steps of one context."""

    def __init__(
        self,
        context: Context,
        n_tokens: int,
        threads: int,
        probe_bytes: int,
        depth: int,
        runs: int,
        report: Report,
    ) -> None:
        self._context = context
        self._n_tokens = n_tokens
        self._threads = threads
        self._probe_bytes = probe_bytes
        self._depth = depth
        self._runs = runs
        self._report = report
        self._random = random.Random(0)

    def _tokens(self, n: int) -> list[int]:
        return self._random.choices(range(self._n_tokens), k=n)

    def _bind(self, streams: int, n_tokens: int) -> None:
        n = n_blocks_for(self._depth + n_tokens)
        for sequence in range(streams):
            self._context.bind(sequence, range(sequence * n, (sequence + 1) * n))

    def _probe(self, disks: Iterable[_Disk]) -> None:
        for disk in disks:
            disk.probe(self._report)

    def warm_up(self, kv_blocks: int) -> None:
        """Run a few steps, and fill the depth with copies of one block: the values of keys do not
        change the time."""
        self._bind(1, WARM_UP_STEPS)
        for _ in self._steps(1, WARM_UP_STEPS):
            pass
        if self._depth:
            step(self._context, [Row(0, t, i) for i, t in enumerate(self._tokens(BLOCK))])
            for block in range(1, kv_blocks):
                self._context.copy_block(0, block)

    def prefill(self, n: int, disks: Iterable[_Disk]) -> Runs:
        """Time one prompt of n tokens and its first sampled token."""
        self._bind(1, n)
        rates = []
        for done in range(self._runs):
            self._probe(disks)
            self._report("prefill", done, self._runs)
            rows = [Row(0, token, self._depth + i) for i, token in enumerate(self._tokens(n))]
            rows[-1] = rows[-1]._replace(flags=const.CFLOW_ROW_LOGITS)
            start = time.perf_counter()
            for first in range(0, n, MAX_STEP_ROWS):
                chunk = rows[first : first + MAX_STEP_ROWS]
                step(self._context, chunk)
            self._context.sample([Pick(len(chunk) - 1, temperature=0.0)])
            rates.append(n / (time.perf_counter() - start))
        self._probe(disks)
        self._report("prefill", self._runs, self._runs)
        return Runs.of(rates)

    def decode(self, streams: int, n: int, disks: Iterable[_Disk] = ()) -> Decoded:
        """Time n steps with one token of each stream."""
        self._bind(streams, n)
        what, total = f"decode {streams}", self._runs * n
        rates, probes = [], []
        for run_index in range(self._runs):
            probes += self._memory(streams)
            self._probe(disks)
            start = time.perf_counter()
            for n_done in self._steps(streams, n):
                self._report(what, run_index * n + n_done, total)
            rates.append(streams * n / (time.perf_counter() - start))
        self._probe(disks)
        return Decoded(tuple(rates), (*probes, *self._memory(streams)))

    def _memory(self, streams: int) -> list[float]:
        """Memory bandwidth in GB/s with the same threads. Not measured for several streams: they
        share weight reads, so memory does not limit them."""
        if streams > 1:
            return []
        self._report("probe", 0, 1)
        rate = native.probe_bandwidth(self._probe_bytes, self._threads, PROBE_PASSES) / 1e9
        self._report("probe", 1, 1)
        return [rate]

    def _steps(self, streams: int, n: int) -> Iterator[int]:
        """Run n steps of one row a stream after the depth; yields the number of steps done."""
        picks = [Pick(row, temperature=0.0) for row in range(streams)]
        tokens = self._tokens(streams * n)
        fed = (tokens[i : i + streams] for i in range(0, len(tokens), streams))
        for n_done in decode(self._context, fed, first=self._depth):
            self._context.sample(picks)
            yield n_done
