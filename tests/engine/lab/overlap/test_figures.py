"""The figures of overlap.json by hand, as the claims table, the command and the picture show them."""

from pathlib import Path
from typing import Any

import pytest

from cflow.engine.lab import claims, results
from cflow.engine.lab.overlap.figures import ARMS, RESULTS, Cell, Overlap
from cflow.engine.lab.overlap.picture import draw
from cflow.server.commands.lab import _cell_rows

ROOT = Path(__file__).parents[4]


def cell(**fields: object) -> Cell:
    values: dict[str, Any] = {
        "routing": "uniform",
        "threads": 1,
        "experts": 2,
        "read_rate": 1e9,
        "slots": 25,
        "records": 768,
        "misses": 48.0,
        "hits": 0.0,
        "compute_ms": (50.0, 50.0, 50.0),
        "beside_ms": (52.0, 53.0, 54.0),
        "io_ms": (46.0, 45.0, 44.0),
        "none_ms": (90.0, 99.0, 108.0),
        "layer_ms": (75.0, 90.0, 90.0),
        "delay_ms": (50.0, 55.0, 60.0),
        "io_eff_ms": 47.5,
        "read_ms": {window: (0.4,) * 3 for window in ("none", "layer", "delay")},
        "wake_ms": 0.05,
        "late_ms": 0.1,
        "compute_speed": 1.0,
        "predicted_ms": {
            "none": (90.0, 100.0, 110.0),
            "layer": (85.0,) * 3,
            "delay": (45.0, 55.0, 55.0),
        },
    }
    return Cell(**(values | fields))


def results_of(*cells: Cell) -> Overlap:
    return Overlap("a disk", "2026-11-29", "x", 829440, 24, cells)


def test_figures_of_a_cell_by_hand() -> None:
    one = cell()
    assert (one.c, one.io, one.ms("none")) == (50, 45, 99)
    assert one.net("delay") == pytest.approx(99 / 55)
    assert one.net("layer") == pytest.approx(99 / 90)  # the rounds gave 1.2, 1.1 and 1.2
    assert one.law == pytest.approx(95 / 50)
    assert one.law_error == pytest.approx(1.9 / 1.8 - 1)
    assert one.predicted("delay") == 55
    assert one.recursion("delay") == pytest.approx(100 / 55)
    assert one.recursion_error("delay") == pytest.approx(100 / 99 - 1)
    assert one.is_balanced
    assert not cell(hits=0.5).is_balanced
    assert not cell(io_ms=(41.0, 41.0, 41.0)).is_balanced


def test_the_row_says_what_the_figures_do() -> None:
    claim = claims.overlap_claim(results_of(cell(), cell(routing="real", hits=4.0)))
    assert claim.ours.startswith("1.80x, 1.10x in the window of one layer; law off by up to 5.6 %")
    assert claim.verdict.startswith(
        "the gain holds; the law does not hold within 1 %; the schedule"
    )
    assert claim.machine == "a disk"
    assert (
        "| uniform, 2 | 1 | 25 of 768 | 1.00 | 48.0 | 50.0 | 45.0 | 99.0 | 90.0 | 55.0 |"
        in claim.text
    )
    slow = results_of(cell(delay_ms=(60.0, 66.0, 72.0)))
    assert claims.overlap_claim(slow).verdict.startswith("less than 1.75x")
    assert claims.overlap_claim(results_of(cell(hits=1.0))).ours.startswith("no cell with C and IO")
    assert claims.overlap_claim(None).verdict == "not yet measured"
    assert claims.overlap_net(results_of(cell())) == "1.80x"


def test_the_command_tells_every_arm_beside_its_prediction() -> None:
    rows = dict(_cell_rows(cell(), ARMS))
    assert rows["window of the delay"] == "55.0 ms a token; recursion 55.0"
    assert rows["synchronous"] == "99.0 ms a token; recursion 100.0"


def test_the_picture(tmp_path: Path) -> None:
    draw(results_of(cell(), cell(routing="real")), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_figures_can_be_read() -> None:
    assert results.read(ROOT / RESULTS, Overlap)
