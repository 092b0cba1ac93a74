"""`cflow lab storage`: layers read from disk, in both orders of the file, with and without hints.

A delayed model as `.cflow` (layer by layer) and as `.vflow` (in the order that stages read). Each run
is a process of its own, tests/bench/streamed.c, that opens the file cold, decodes and exits. Runs
alternate, round by round, and must give the same bytes of all logits.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from cflow.engine.files.synth import synth
from cflow.engine.files.target import SUFFIXES
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.measurements import Bench, Samples, output
from cflow.engine.memory.layer_memory import EVERYTHING
from cflow.engine.native import LayerRecords, Model

RESULTS = "docs/results/storage.json"
HINTS = ("none", "t0", "t1")
OWN_HINT = "t0"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    d_model: int = 1536
    n_layers: int = 32
    tokens: int = 4  # of a run; the first one is cold
    rounds: int = 9


class Setting(NamedTuple):
    """How to run. memory: for layers, a key of `budgets`. io: how they are read."""

    order: str
    memory: str
    io: str
    hint: str = OWN_HINT


SETTINGS = (
    *(Setting("layer", "25 %", "direct", hint) for hint in HINTS),
    Setting("stage", "25 %", "direct"),
    *(Setting(order, "least", "direct") for order in SUFFIXES),
    *(Setting(order, "25 %", "cached") for order in SUFFIXES),
    *(Setting(order, "all", "direct") for order in SUFFIXES),
)


def budgets(records: LayerRecords) -> dict[str, int]:
    """Bytes for layers: a quarter of them, the fewest possible, or 0 for all, which then stay."""
    slots = {"25 %": records.n_records / 4, "least": records.n_least, "all": 0}
    return {name: int(n * records.slot_bytes) for name, n in slots.items()}


# ---- results ----


class Run(msgspec.Struct, frozen=True):
    """The figures of a setting; tuples have one value a round."""

    order: str
    memory: str
    io: str
    hint: str
    memory_bytes: int  # for layers; 0: all stay in memory
    token_reads: float  # a token, after the first
    token_bytes: float
    token_storage_bytes: float  # of these, read from storage as the kernel counts
    cold_storage_bytes: float  # up to the first token, with everything that stays in memory
    load_s: tuple[float, ...]
    first_s: tuple[float, ...]  # of the first token, after load_s
    tok_s: tuple[float, ...]  # of the other tokens

    @property
    def setting(self) -> Setting:
        return Setting(self.order, self.memory, self.io, self.hint)

    @property
    def rate(self) -> Samples:
        return Samples(self.tok_s)

    @property
    def load(self) -> Samples:
        return Samples(self.load_s)

    @property
    def cold(self) -> Samples:
        """Seconds from the start to the first token."""
        pairs = zip(self.load_s, self.first_s, strict=True)
        return Samples(tuple(load + first for load, first in pairs))


class Storage(msgspec.Struct, frozen=True):
    """storage.json."""

    machine: str
    date: str
    command: str
    n_layers: int
    file_bytes: int
    slot_bytes: dict[str, int]  # by order: the largest piece that one read fetches
    runs: Annotated[tuple[Run, ...], msgspec.Meta(min_length=len(SETTINGS))]

    def run(self, order: str, memory: str, io: str = "direct", hint: str = OWN_HINT) -> Run:
        return next(r for r in self.runs if r.setting == (order, memory, io, hint))


# ---- measuring ----


class _Counts(msgspec.Struct):
    reads: int
    bytes: int
    storage_bytes: int


class _Line(msgspec.Struct):
    """The output of tests/bench/streamed.c."""

    loaded: _Counts
    first: _Counts
    rest: _Counts
    direct: bool
    load_s: float
    first_s: float
    tok_s: float


class _File(NamedTuple):
    path: Path
    records: LayerRecords


def measure(bench: Bench, here: str, sizes: Sizes | None = None) -> Storage:
    """Makes files of 2.4 GB under build/bench, measures, and removes them.

    here: the name of this machine. LabError: a program is missing or fails, runs differ in a bit, or
    the disk has no direct reads."""
    sizes = sizes or Sizes()
    d = sizes.d_model
    shape = bench.shape(
        "arch2_4_combined", d, sizes.n_layers, d_ff=4 * d, n_experts=4, top_k=2, d_expert=d
    )
    with tempfile.TemporaryDirectory(dir=bench.folder, prefix="storage-") as scratch:
        files = {
            order: _make(bench, shape, Path(scratch) / f"model{suffix}")
            for order, suffix in SUFFIXES.items()
        }
        lines = _in_turn(bench, files, sizes)
        file_bytes = files["layer"].path.stat().st_size
    return Storage(
        machine=here,
        date=date.today().isoformat(),
        command="cflow lab storage",
        n_layers=sizes.n_layers,
        file_bytes=file_bytes,
        slot_bytes={order: file.records.slot_bytes for order, file in files.items()},
        runs=tuple(
            _run(setting, files[setting.order], found, sizes.tokens - 1)
            for setting, found in lines.items()
        ),
    )


def _make(bench: Bench, shape: Path, path: Path) -> _File:
    synth(str(shape), path, progress=partial(bench.report, f"synth {path.name}"))
    with closing(Model(str(path), header_only=True, weights_memory=EVERYTHING)) as model:
        if model.layer_records is None:
            raise ValueError(f"{path} has no layers")
        return _File(path, model.layer_records)


def _in_turn(bench: Bench, files: Mapping[str, _File], sizes: Sizes) -> dict[Setting, list[_Line]]:
    """Each round in another order, as a run finds memory in the state that the last one left."""
    found: dict[Setting, list[_Line]] = {setting: [] for setting in SETTINGS}
    want = b""
    for done in range(sizes.rounds):
        bench.report("storage", done, sizes.rounds)
        for setting in random.Random(done).sample(SETTINGS, len(SETTINGS)):
            line, logits = _stream(bench, files[setting.order], setting, sizes.tokens)
            want = want or logits
            if logits != want:
                raise LabError(f"{setting} gives other logits than the runs before it")
            found[setting].append(line)
    bench.report("storage", sizes.rounds, sizes.rounds)
    return found


def _stream(bench: Bench, file: _File, setting: Setting, tokens: int) -> tuple[_Line, bytes]:
    logits = file.path.with_suffix(".logits")
    program = bench.folder / f"streamed_{setting.hint}"
    memory = budgets(file.records)[setting.memory]
    arguments = (file.path, memory, setting.io, tokens, bench.threads, logits)
    line = msgspec.json.decode(output([str(program), *map(str, arguments)]), type=_Line)
    if line.direct != (setting.io == "direct" and memory > 0):
        raise LabError(f"{file.path}: this disk has no direct reads; use a folder on another one")
    return line, logits.read_bytes()


def _run(setting: Setting, file: _File, lines: list[_Line], n_tokens: int) -> Run:
    """n_tokens: of a run, without the first."""
    n = n_tokens * len(lines)
    cold = sum(line.loaded.storage_bytes + line.first.storage_bytes for line in lines)
    return Run(
        **setting._asdict(),
        memory_bytes=budgets(file.records)[setting.memory],
        token_reads=sum(line.rest.reads for line in lines) / n,
        token_bytes=sum(line.rest.bytes for line in lines) / n,
        token_storage_bytes=sum(line.rest.storage_bytes for line in lines) / n,
        cold_storage_bytes=cold / len(lines),
        load_s=tuple(line.load_s for line in lines),
        first_s=tuple(line.first_s for line in lines),
        tok_s=tuple(line.tok_s for line in lines),
    )
