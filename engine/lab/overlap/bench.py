"""Makes the model files of `cflow lab overlap` and measures every cell."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from cflow.engine.base import machine
from cflow.engine.base.reports import Report, silent
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.files.synth import synth
from cflow.engine.lab.measurements import shape_text
from cflow.engine.lab.overlap.cell import CellBench
from cflow.engine.lab.overlap.figures import Cell, Overlap
from cflow.engine.lab.overlap.resident import Resident
from cflow.engine.lab.overlap.streams import (
    Case,
    decode_case,
    local_tokens,
    open_case,
    story,
    uniform_tokens,
)
from cflow.engine.lab.overlap.tiers import Tiers, held_rate
from cflow.engine.lab.overlap.widen import widen

LEVEL_PASSES = 4  # of decoding, to choose how many experts make reads as long as compute


@dataclass(frozen=True)
class Widths:
    """Widths of a model whose compute takes about as long as its reads."""

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
    threads: tuple[int, ...] = ()  # default: 1, 2, 4, ... and all cores but one

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """One core stays free for the reader and its checksums: were all computing, the kernel would
        decide which thread runs, and no schedule could predict it."""
        most = max(machine.cores().threads - 1, 1)
        return self.threads or (*(t for t in (1, 2, 4, 8, 16) if t < most), most)


def measure(
    folder: Path,
    here: str,
    *,
    sizes: Sizes | None = None,
    read_rate: float | None = None,
    report: Report = silent,
) -> Overlap:
    """Makes model files of some 3 GB in folder, measures every cell, and removes them.

    here: the name of this machine. read_rate: limit on reads in bytes a second, by default what the
    disk holds. LabError: arms differ in a bit, or the disk has no direct reads."""
    sizes = sizes or Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="overlap-") as scratch:
        bench = Bench(Path(scratch), sizes, read_rate, report)
        cells = [*bench.random_cells(), *bench.trained_cells()]
    return Overlap(
        machine=here,
        date=date.today().isoformat(),
        command="cflow lab overlap",
        record_bytes=bench.record_bytes,
        n_layers=sizes.n_layers,
        cells=tuple(cells),
    )


class Bench:
    """record_bytes: of the random model, once its cells are measured."""

    def __init__(self, folder: Path, sizes: Sizes, rate: float | None, report: Report) -> None:
        self._folder = folder
        self._sizes = sizes
        self._asked_rate = rate
        self._report = report
        self.record_bytes = 0

    def random_cells(self) -> list[Cell]:
        """Uniform tokens with each count of threads, every expert a miss; then local tokens, with a
        quarter and half of the records in memory."""
        path = self._make_random()
        with closing(self._open(path)) as resident:
            self.record_bytes = resident.records.bytes
            levels, cells = list[Case](), list[Cell]()
            for threads in self._sizes.thread_counts:
                most, rate = self._uniform(resident, threads), self._rate(resident)
                levels.append(self._level(resident, most, rate))
                for case in (levels[-1], most):
                    cells.append(self._cell(resident, resident.least_slots, case, rate))
            local = self._local(resident, levels[0])
            for share in (4, 2):
                slots = resident.records.n // share
                cells.append(self._cell(resident, slots, local, self._rate(resident)))
        path.unlink()
        return cells

    def trained_cells(self) -> list[Cell]:
        """The bundled model's own routing, with the fewest slots and with half of the records."""
        path = self._make_trained()
        with closing(self._open(path)) as resident:
            tokens = story(resident.model, 4 * self._sizes.tokens)
            threads = self._sizes.thread_counts[0]
            case = Case("real", tokens, threads, resident.layers[0].top_k)
            cells = [
                self._cell(resident, slots, case, self._rate(resident))
                for slots in (resident.least_slots, resident.records.n // 2)
            ]
        path.unlink()
        return cells

    # ---- files ----

    def _make_random(self) -> Path:
        sizes = self._sizes
        path, shape = self._folder / "random.cflow", self._folder / "random.toml"
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
        return path

    def _make_trained(self) -> Path:
        path, widths = self._folder / "trained.cflow", self._sizes.trained
        self._report("widen", 0, 1)
        widen(BUNDLED_FILE, path, widths.d_ff, widths.d_expert)
        self._report("widen", 1, 1)
        return path

    def _open(self, path: Path) -> Resident:
        with open(path, "rb") as file:
            os.fsync(
                file.fileno()
            )  # so that the disk is not still writing it during the measurement
        return Resident(path, self._sizes.thread_counts[-1])

    def _rate(self, resident: Resident) -> float:
        return self._asked_rate or held_rate(resident.path, resident.records)

    # ---- cases ----

    def _uniform(self, resident: Resident, threads: int) -> Case:
        tokens = uniform_tokens(resident.model.header.n_tokens, self._sizes.tokens)
        return Case("uniform", tokens, threads, self._sizes.top_k)

    def _local(self, resident: Resident, level: Case) -> Case:
        tokens = local_tokens(resident.model.header.n_tokens, 2 * self._sizes.tokens)
        return replace(level, routing="Zipf-like", tokens=tokens)

    def _level(self, resident: Resident, most: Case, rate: float) -> Case:
        """The case with as many experts as make reads as long as compute, or just longer. At least
        two, so that no record of a token is still cached for the next."""
        with closing(open_case(resident.model, most)) as context:
            compute_s = statistics.median(
                s for _ in range(LEVEL_PASSES) for s in decode_case(context, most).seconds
            )
        chosen = math.ceil(compute_s / self._sizes.n_layers * rate / resident.records.bytes)
        return replace(most, chosen=min(max(chosen, 2), most.chosen))

    def _cell(self, resident: Resident, slots: int, case: Case, rate: float) -> Cell:
        rounds = self._sizes.rounds
        name = f"{case.routing}, {case.threads} threads, {case.chosen} experts"
        tiers = Tiers(resident.path, resident.records, slots, rate, case.threads)
        with closing(tiers):
            return CellBench(resident, tiers, case).measure(
                rounds, lambda done: self._report(name, done, rounds)
            )
