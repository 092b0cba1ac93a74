"""The figures of the claims table that are taken on the spot.

The speed of a machine drifts, so arms alternate, round by round, in one run; a ratio is the median
over rounds of the ratio within a round.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.native_types import PlanInfo
from cflow.engine.base.reports import Report, silent
from cflow.engine.files.synth import synth, synth_header
from cflow.engine.lab.arms import ARMS
from cflow.engine.lab.errors import LabError
from cflow.engine.measure.bare import decode, open_stream
from cflow.engine.native import Model, const

T = TypeVar("T")

MIB = 1 << 20
N_EXPERTS, TOP_KS = 32, (2, 8, 32)
PROBE_PASSES = 6
L1_CACHES = {"32 KiB": "32768,8,64", "48 KiB": "49152,12,64"}  # bytes, ways, bytes of a line
LAYOUTS = ("row_major", "by_tile", "tiled")
ACTIVATIONS = ("f32", "int8")

TIMED_ARMS = ("sequential", "parallel", "arch2_4_combined")
PLANNED_ARMS = (*TIMED_ARMS, "arch4_async_experts")


@dataclass(frozen=True)
class Samples:
    """Figures of an arm, by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def inverse(self) -> Samples:
        return Samples(tuple(1 / value for value in self.values))

    def over(self, other: Samples) -> float:
        pairs = zip(self.values, other.values, strict=True)
        return statistics.median(a / b for a, b in pairs)

    def beats(self, other: Samples) -> bool:
        """Whether it is higher by more than noise: 2 % in the median, and in four rounds of five."""
        wins = sum(a > b for a, b in zip(self.values, other.values, strict=True))
        return self.over(other) >= 1.02 and wins >= 0.8 * len(self.values)

    def text(self, digits: int = 1) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


Groups = dict[str, dict[str, Samples]]  # group, arm: GB/s
Misses = dict[tuple[str, str, str, int], float]  # layout, activations, cache, columns: a row


@dataclass(frozen=True)
class Experts:
    """Decoding with k experts a layer, by k."""

    n_bytes: dict[int, float]  # weights read for a token, as the engine counts them
    ms: dict[int, Samples]  # a token


@dataclass(frozen=True)
class Planned:
    """The engine's plan for a shape."""

    plan: PlanInfo
    file_bytes: int
    quantised_bytes: int  # of layers, for a token: without the f32 routers
    n_matrices: int
    ordered: int  # of these, how many lie in the file behind the one read before


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    mib: int  # of weights read from RAM: more than any cache holds
    rounds: int = 9
    columns: tuple[int, ...] = (32768, 8192)  # under cachegrind: dense-down of d = 8192, and fewer
    rows: int = 128  # under cachegrind
    d_experts: int = 1024  # d_model of the model whose experts are counted
    d_bus: int = 2048  # of the models that share one memory bus
    tokens: int = 16  # decoded in a round

    @staticmethod
    def of_machine() -> Sizes:
        return Sizes(max(1024, -(-4 * machine.cpu().l3_bytes // MIB)))


@dataclass(frozen=True)
class Bench:
    """Takes figures with the programs that `make claims` built under `root`, the checkout."""

    root: Path
    sizes: Sizes
    threads: int
    report: Report = silent

    @property
    def folder(self) -> Path:
        return self.root / "build" / "bench"

    def shown(self, command: Iterable[str]) -> str:
        """A command as typed in the checkout."""
        return " ".join(part.replace(f"{self.root}/", "") for part in command)

    # ---- programs of tests/bench ----

    def command(self, name: str, threads: int | None = None) -> list[str]:
        sizes = (self.sizes.mib, threads or self.threads, self.sizes.rounds)
        return [str(self.folder / name), *map(str, sizes)]

    def groups(self, name: str, threads: int | None = None) -> Groups:
        """The output of a program that uses tests/bench/arms.h."""
        self.report(name, 0, 1)
        found: Groups = {}
        for text in output(self.command(name, threads)).splitlines():
            line = msgspec.json.decode(text, type=_Line)
            found.setdefault(line.group, {})[line.arm] = Samples(line.gb_s)
        self.report(name, 1, 1)
        return found

    def probe_gb_s(self) -> float:
        return native.probe_bandwidth(self.sizes.mib * MIB, self.threads, PROBE_PASSES) / 1e9

    def misses_command(
        self, layout: str, activations: str, cache: str, columns: int, passes: int = 1
    ) -> list[str]:
        tool = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--D1={L1_CACHES[cache]}"]
        sizes = map(str, (columns, self.sizes.rows, passes))
        return [*tool, str(self.folder / "cache_misses"), layout, activations, *sizes]

    def misses(self) -> Misses | None:
        """Level-1 read misses a row of the matrix; None without valgrind."""
        if shutil.which("valgrind") is None:
            return None
        cases = [
            (layout, activations, cache, columns)
            for columns in self.sizes.columns
            for cache in L1_CACHES
            for activations in ACTIVATIONS
            for layout in LAYOUTS
        ]
        found: Misses = {}
        for done, case in enumerate(cases):
            self.report("cache misses", done, len(cases))
            # A run that makes the matrix and multiplies, minus one that only makes it.
            product, making = (_read_misses(self.misses_command(*case, n)) for n in (1, 0))
            found[case] = (product - making) / self.sizes.rows
        self.report("cache misses", len(cases), len(cases))
        return found

    # ---- models ----

    def shape(self, arm: str, d: int, n_layers: int, **sizes: int) -> Path:
        """Writes a file in build/bench/shapes, for `cflow plan` and `cflow synth`."""
        path = self.folder / "shapes" / f"{arm}_d{d}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shape_text(arm, d, n_layers, **sizes))
        return path

    def published_shape(self, arm: str, d: int) -> Path:
        """The shape of the paper's small models (docs/delays.md) at any d, but with our vocabulary."""
        return self.shape(arm, d, 6, d_ff=4 * d, n_experts=8, top_k=2, d_expert=d)

    def experts(self) -> Experts:
        d, n = self.sizes.d_experts, N_EXPERTS
        shape = self.shape("experts", d, 8, d_ff=0, n_experts=n, top_k=n, d_expert=d)
        with (
            tempfile.TemporaryDirectory(prefix="cflow-claims-") as folder,
            closing(self._decoder(shape, Path(folder))) as decoder,
        ):
            n_bytes = {k: decoder.bytes_per_token(k) for k in TOP_KS}
            ms = self._in_turn("experts", {k: partial(decoder.ms, k) for k in TOP_KS})
        return Experts(n_bytes, ms)

    def shared_bus(self) -> dict[str, Samples]:
        """Milliseconds a token by arm, with models of equal size."""
        decoders: dict[str, Decoder] = {}
        with tempfile.TemporaryDirectory(prefix="cflow-claims-") as folder:
            try:
                for name in TIMED_ARMS:
                    shape = self.published_shape(name, self.sizes.d_bus)
                    decoders[name] = self._decoder(shape, Path(folder))
                arms = {name: decoder.ms for name, decoder in decoders.items()}
                return self._in_turn("shared bus", arms)
            finally:
                for decoder in decoders.values():
                    decoder.close()

    def _decoder(self, shape: Path, folder: Path) -> Decoder:
        path = folder / f"{shape.stem}.cflow"
        synth(str(shape), path, progress=partial(self.report, f"synth {shape.stem}"))
        return Decoder(path, self.threads, self.sizes.tokens)

    def _in_turn(self, what: str, arms: Mapping[T, Callable[[], float]]) -> dict[T, Samples]:
        """Runs arms round by round; the first round warms up and does not count."""
        found: dict[T, list[float]] = {name: [] for name in arms}
        for done in range(-1, self.sizes.rounds):
            for name, arm in arms.items():
                value = arm()
                if done >= 0:
                    found[name].append(value)
            self.report(what, done + 1, self.sizes.rounds)
        return {name: Samples(tuple(values)) for name, values in found.items()}


class Decoder:
    """Decodes one stream of random tokens with a model file."""

    def __init__(self, path: Path, threads: int, tokens: int) -> None:
        self._model = Model(str(path), threads=threads)
        self._context = open_stream(self._model, tokens, threads=threads)
        self._tokens = random.Random(1).choices(range(self._model.header.n_tokens), k=tokens)

    def ms(self, n_experts: int = 0) -> float:
        """Milliseconds a token with n_experts a layer (0: top_k)."""
        start = time.perf_counter()
        for _ in decode(self._context, ([t] for t in self._tokens), n_experts=n_experts):
            pass
        return 1e3 * (time.perf_counter() - start) / len(self._tokens)

    def bytes_per_token(self, n_experts: int = 0) -> float:
        before = self._context.read_bytes
        self.ms(n_experts)
        return (self._context.read_bytes - before) / len(self._tokens)

    def close(self) -> None:
        self._context.close()
        self._model.close()


# Roles that are not read from front to back of the resident bank.
_UNORDERED = (
    const.Role.EMBEDDING,
    const.Role.EXPERT_GATE,
    const.Role.EXPERT_UP,
    const.Role.EXPERT_DOWN,
)


def planned(shape: str) -> Planned:
    """The plan of a shape of configs/shapes or of a .toml file, without making weights."""
    with tempfile.TemporaryDirectory(prefix="cflow-claims-") as folder:
        path = Path(folder) / "model.cflow"
        synth_header(shape, path)
        with closing(Model(str(path), header_only=True)) as model:
            read = [t for t in model.reading_order if t.stripe_rows and t.role not in _UNORDERED]
            return Planned(
                plan=model.plan,
                file_bytes=model.header.file_bytes,
                quantised_bytes=sum(op.bytes for op in model.ops if not op.name.endswith("route")),
                n_matrices=len(read),
                ordered=1 + sum(later.offset > earlier.offset for earlier, later in pairwise(read)),
            )


def shape_text(
    arm: str, d: int, n_layers: int, *, d_ff: int, n_experts: int, top_k: int, d_expert: int
) -> str:
    reads = ARMS.get(arm, ARMS["sequential"])
    head_dim = min(64, d)
    return f"""\
architecture = "{arm}"
n_layers = {n_layers}
d_model = {d}
vocab_size = 512
context = 2048
tied = false
norm_eps = 1e-5

[layer]
n_heads = {d // head_dim}
n_kv_heads = {d // head_dim}
head_dim = {head_dim}
d_ff = {d_ff}
activation = "gelu_tanh"
activation_on_up = true
n_experts = {n_experts}
top_k = {top_k}
d_expert = {d_expert}
renormalise = true
dense_source = "{reads.dense_source}"
expert_anchor = "{reads.expert_anchor}"
expert_delay = {reads.expert_delay}

[layer.rope]
kind = "half"
dim = {head_dim}
base = 10000.0
"""


class _Line(msgspec.Struct):
    """A line that tests/bench/arms.h prints."""

    group: str
    arm: str
    threads: int
    gb_s: tuple[float, ...]


def output(command: Sequence[str]) -> str:
    """The output of a program. LabError: it cannot be run, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise LabError(f"{command[0]} cannot be run: {error}; `make claims` builds it") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise LabError(f"{' '.join(command)} failed with status {done.returncode}: {last[0]}")
    return done.stdout


def _read_misses(command: Sequence[str]) -> int:
    with tempfile.NamedTemporaryFile("r", prefix="cflow-cachegrind-") as counts:
        output([command[0], f"--cachegrind-out-file={counts.name}", *command[1:]])
        fields = dict(line.partition(": ")[::2] for line in counts if ": " in line)
    totals = dict(zip(fields["events"].split(), fields["summary"].split(), strict=True))
    return int(totals["D1mr"])
