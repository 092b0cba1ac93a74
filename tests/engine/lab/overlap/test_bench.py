"""`cflow lab overlap` whole, on small models."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cflow.engine.base import machine
from cflow.engine.base.reports import silent
from cflow.engine.lab.overlap.bench import Bench, Sizes, Widths, measure
from cflow.engine.lab.overlap.figures import ARMS, Overlap
from cflow.engine.lab.overlap.streams import Case

SMALL = Sizes(
    random=Widths(64, 128, 32),
    trained=Widths(128, 1024, 256),
    n_layers=16,
    top_k=8,
    tokens=3,
    rounds=2,
    threads=(1,),
)


def test_cells(tmp_path: Path) -> None:
    """Counts only: how long anything takes is not asserted."""
    seen: set[str] = set()
    found = measure(
        tmp_path, "here", sizes=SMALL, read_rate=50e6, report=lambda what, *_: seen.add(what)
    )
    assert not list(tmp_path.iterdir())
    assert {"synth", "widen", "real, 1 threads, 2 experts"} <= seen
    routings = [cell.routing for cell in found.cells]
    assert routings == ["uniform"] * 2 + ["Zipf-like"] * 2 + ["real"] * 2
    for cell in found.cells:
        n = SMALL.rounds * SMALL.tokens * {"uniform": 1, "Zipf-like": 2, "real": 4}[cell.routing]
        assert all(len(cell.times(window)) == n for window in ARMS)
        assert len(cell.compute_ms) == len(cell.io_ms) == len(cell.predicted_ms["none"]) == n
        assert cell.predicted_ms.keys() == cell.read_ms.keys() == ARMS.keys()
        n_layers = 6 if cell.routing == "real" else 16
        assert cell.misses + cell.hits == pytest.approx(n_layers * cell.experts)
        if cell.routing == "uniform":
            assert cell.hits == 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Overlap) == found


def test_cells_of_several_counts_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local tokens run with the first count only, as the trained model does."""
    seen: list[Case] = []
    monkeypatch.setattr(
        Bench, "_level", lambda _, resident, most, rate: replace(most, chosen=2 * most.threads)
    )
    monkeypatch.setattr(Bench, "_cell", lambda _, resident, slots, case, rate: seen.append(case))
    Bench(tmp_path, replace(SMALL, threads=(1, 2)), 50e6, silent).random_cells()
    uniform = [("uniform", 1, 2), ("uniform", 1, 8), ("uniform", 2, 4), ("uniform", 2, 8)]
    local = [("Zipf-like", 1, 2)] * 2
    assert [(case.routing, case.threads, case.chosen) for case in seen] == uniform + local


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, (1,)), (2, (1,)), (6, (1, 2, 4, 5)), (9, (1, 2, 4, 8))]
)
def test_one_core_is_left_to_the_reader(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(cores, "", cores, 1, None))
    assert Sizes().thread_counts == threads
    assert Sizes(threads=(3,)).thread_counts == (3,)


def test_an_invalid_rate_is_named() -> None:
    command = [sys.executable, "-m", "cflow.server", "lab", "overlap", "--read-rate", "fast"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"flag --read-rate: 'fast'", done.stderr)
