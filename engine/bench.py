"""How fast a model runs here, next to how fast its memory could let it.

Decode starts from an empty context and is fed fixed random tokens, a greedy choice counted with each
step; prefill is one prompt in the server's step size. No server, no text.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cflow.engine import machine, native
from cflow.engine.errors import CflowError
from cflow.engine.native import Context, Model, Pick, Row, const
from cflow.engine.reports import Report, silent

MAX_STEP_ROWS = 512
WARM_UP_STEPS = 4
PROBE_BYTES = 1 << 30
PROBE_PASSES = 6


@dataclass(frozen=True)
class Runs:
    """Tokens a second of the repetitions."""

    min: float
    median: float
    max: float

    @staticmethod
    def of(rates: Sequence[float]) -> Runs:
        return Runs(min(rates), statistics.median(rates), max(rates))


@dataclass(frozen=True)
class Batch:
    """Streams decoded together; the rate is the sum over them."""

    streams: int
    rates: Runs


@dataclass(frozen=True)
class BenchResult:
    model: str
    quant: str
    prompt: int  # tokens of a prefill run
    gen: int  # tokens of a decode run, per stream
    prefill: Runs
    decode: Runs
    batch: tuple[Batch, ...]
    bytes_per_token: int  # weights one decode step reads
    probe_before_gb_s: float
    probe_after_gb_s: float
    isa: str
    threads: int
    resident_bytes: int
    huge_page_ratio: float

    @property
    def read_gb_s(self) -> float:
        return self.bytes_per_token * self.decode.median / 1e9

    @property
    def probe_gb_s(self) -> float:
        return max(self.probe_before_gb_s, self.probe_after_gb_s)

    def to_json(self) -> dict[str, Any]:
        """Rates are medians; the spread stands beside them under "runs"."""
        return {
            "model": self.model,
            "quant": self.quant,
            "prompt": self.prompt,
            "gen": self.gen,
            "prefill_tok_s": self.prefill.median,
            "decode_tok_s": self.decode.median,
            "runs": {"prefill_tok_s": asdict(self.prefill), "decode_tok_s": asdict(self.decode)},
            "batch": [
                {"streams": b.streams, "tok_s": b.rates.median, "runs": asdict(b.rates)}
                for b in self.batch
            ],
            "bytes_per_token": self.bytes_per_token,
            "read_gb_s": self.read_gb_s,
            "probe_gb_s": self.probe_gb_s,
            "probe_before_gb_s": self.probe_before_gb_s,
            "probe_after_gb_s": self.probe_after_gb_s,
            "bandwidth_fraction": self.read_gb_s / self.probe_gb_s,
            "isa": self.isa,
            "threads": self.threads,
            "resident_bytes": self.resident_bytes,
            "huge_page_ratio": self.huge_page_ratio,
        }


def run(
    path: Path | str,
    *,
    prompt: int = 512,
    gen: int = 128,
    batch: Sequence[int] = (1, 4, 16),
    runs: int = 3,
    threads: int | None = None,
    isa: str | None = None,
    kv: str = "f16",
    precision: str = "int8",
    progress: Report = silent,
) -> BenchResult:
    """Loads the model at `path` and measures it, `runs` times each; threads None: as many as pay."""
    threads = threads or machine.cores().threads
    model = Model(
        str(path),
        threads=threads,
        as_f32=precision == "f32",
        progress=lambda done, total: progress("load", done, total),
    )
    _check(model, prompt, gen, batch, runs)
    streams = max([1, *batch])
    context = Context(
        model,
        threads=threads,
        isa=isa,
        max_rows=max(streams, min(prompt, MAX_STEP_ROWS)),
        max_sequences=streams,
        max_context=max(prompt, gen, WARM_UP_STEPS),
        n_kv_blocks=_n_blocks(prompt) + streams * _n_blocks(gen),
        kv_type="f32" if precision == "f32" else kv,
    )
    bench = _Bench(context, model.header.n_tokens, runs, progress)
    bench.warm_up()
    before = _probe(threads, progress)
    prefill = bench.prefill(prompt)
    decode = bench.decode(1, gen)
    rates = [Batch(n, decode if n == 1 else bench.decode(n, gen)) for n in batch]
    after = _probe(threads, progress)
    memory = model.memory
    return BenchResult(
        model=model.metadata.get("name") or Path(path).stem,
        quant=model.encoding,
        prompt=prompt,
        gen=gen,
        prefill=prefill,
        decode=decode,
        batch=tuple(rates),
        bytes_per_token=model.plan.bytes_per_token,
        probe_before_gb_s=before,
        probe_after_gb_s=after,
        isa=context.isa,
        threads=threads,
        resident_bytes=memory.resident_bytes,
        huge_page_ratio=memory.huge_bytes / memory.resident_bytes,
    )


def _check(model: Model, prompt: int, gen: int, batch: Sequence[int], runs: int) -> None:
    limit = model.header.context
    for name, n in (("prompt", prompt), ("gen", gen)):
        if not 1 <= n <= limit:
            raise CflowError(f"{name} {n}: this model takes 1 to {limit} tokens")
    for name, n in (("runs", runs), *(("batch", n) for n in batch)):
        if n < 1:
            raise CflowError(f"{name} {n}: at least 1 is needed")


def _n_blocks(n_tokens: int) -> int:
    return -(-n_tokens // int(const.CFLOW_KV_BLOCK))


def _probe(threads: int, report: Report) -> float:
    """GB/s of main memory: a buffer that no cache holds, read with the same threads."""
    report("probe", 0, 1)
    n_bytes = max(PROBE_BYTES, 4 * machine.cpu().l3_bytes)
    rate = native.probe_bandwidth(n_bytes, threads, PROBE_PASSES) / 1e9
    report("probe", 1, 1)
    return rate


class _Bench:
    """Times steps of one context."""

    def __init__(self, context: Context, n_tokens: int, runs: int, report: Report) -> None:
        self._context = context
        self._n_tokens = n_tokens
        self._runs = runs
        self._report = report

    def _tokens(self, n: int) -> list[int]:
        return random.Random(n).choices(range(self._n_tokens), k=n)

    def _bind(self, streams: int, n_tokens: int) -> None:
        n = _n_blocks(n_tokens)
        for sequence in range(streams):
            self._context.bind(sequence, range(sequence * n, (sequence + 1) * n))

    def warm_up(self) -> None:
        self._bind(1, WARM_UP_STEPS)
        for _ in self._steps(1, WARM_UP_STEPS):
            pass

    def prefill(self, n: int) -> Runs:
        """One prompt of n tokens and its first choice."""
        self._bind(1, n)
        rows = [Row(0, token, i) for i, token in enumerate(self._tokens(n))]
        rows[-1] = rows[-1]._replace(flags=const.CFLOW_ROW_LOGITS)
        rates = []
        for done in range(self._runs):
            self._report("prefill", done, self._runs)
            start = time.perf_counter()
            for first in range(0, n, MAX_STEP_ROWS):
                chunk = rows[first : first + MAX_STEP_ROWS]
                self._step(chunk)
            self._context.sample([Pick(len(chunk) - 1, temperature=0.0)])
            rates.append(n / (time.perf_counter() - start))
        self._report("prefill", self._runs, self._runs)
        return Runs.of(rates)

    def decode(self, streams: int, n: int) -> Runs:
        """n tokens for each of `streams` sequences, all in every step."""
        self._bind(streams, n)
        what, total = f"decode {streams}", self._runs * n
        rates = []
        for run_index in range(self._runs):
            start = time.perf_counter()
            for n_done in self._steps(streams, n):
                self._report(what, run_index * n + n_done, total)
            rates.append(streams * n / (time.perf_counter() - start))
        return Runs.of(rates)

    def _steps(self, streams: int, n: int) -> Iterator[int]:
        """n steps of one row a stream, from empty contexts; yields how many are done."""
        tokens = self._tokens(streams * n)
        picks = [Pick(row, temperature=0.0) for row in range(streams)]
        flags = const.CFLOW_ROW_LOGITS
        for position in range(n):
            fed = tokens[position * streams : (position + 1) * streams]
            self._step([Row(s, token, position, flags) for s, token in enumerate(fed)])
            self._context.sample(picks)
            yield position + 1

    def _step(self, rows: Sequence[Row]) -> None:
        if any(self._context.step(rows).status):
            raise CflowError("the model's logits are not finite")
