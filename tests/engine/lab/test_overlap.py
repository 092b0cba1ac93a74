"""The overlap of compute and reads: the schedule by hand, the measurement on small models."""

import re
import subprocess
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cflow.engine.base.reports import silent
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.files.synth import synth, synth_header
from cflow.engine.lab import claims, overlap
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.measurements import shape_text
from cflow.engine.lab.overlap import Case, Cell, Overlap, Sizes, Widths
from cflow.engine.lab.overlap_picture import draw
from cflow.engine.lab.schedule import Cache, Disk, Schedule, Stage, Step, plan_step
from cflow.engine.lab.widen import widen
from cflow.engine.native import Model, TierStats, const
from cflow.server.commands.lab import _cell_rows

SMALL = Sizes(
    random=Widths(64, 128, 32),
    trained=Widths(128, 1024, 256),
    n_layers=16,
    top_k=8,
    tokens=3,
    rounds=2,
    threads=(1,),
)


# ---- the schedule, by hand ----

# Two layers whose experts start in stage 2 and 4 and end one later. Layer 0 lands where layer 1
# routes. An expert takes 0.5 s and 0.25 s.
STEP = Step(
    stages=(
        Stage(1.0, routed=(0,)),
        Stage(2.0, routed=(1,), landed=(0,)),
        Stage(0.0, starts=(0,)),
        Stage(1.0, ends=(0,)),
        Stage(0.0, starts=(1,)),
        Stage(0.0, ends=(1,)),
    ),
    gated_s=0.5,
    down_s=0.25,
    rest_s=1.0,
)
TRACE = [[[10, 11], [20]]]


@pytest.mark.parametrize(
    ("window", "seconds"),
    [
        # Read 3-6 and 6-9, compute 9-10, stage 3 with both downs 10-11.5, read 11.5-14.5.
        ("none", 14.5 + 0.5 + 0.25 + 1),
        # Asked at 1: 10 comes at 4, is through at 4.75; 11 at 7, gated until 7.5, down with stage 3
        # until 8.75; layer 1 lands behind all routers, so it is read when its own stage begins.
        ("layer", 11.75 + 0.5 + 0.25 + 1),
        # Asked at 0: 10 comes at 3, as its stage begins, 11 at 6, 20 at 9 (asked at 1). Stage 3 is over
        # at 6.5 + 1.25 = 7.75, stage 4 waits until 9.
        ("delay", 9 + 0.5 + 0.25 + 1),
    ],
)
def test_schedule_by_hand(window: str, seconds: float) -> None:
    plan = Schedule(STEP, Disk(interval_s=3.0, read_s=[3.0]), n_slots=3, window=window)
    assert sum(plan.token_seconds(TRACE)) == pytest.approx(seconds)
    assert plan.cache.n_reads == 3


def test_pauses_do_not_count_but_the_reader_rests() -> None:
    """A reader that owes time when a token ends has paid it when the next begins."""
    step = Step((Stage(1.0, routed=(0,)), Stage(0.0, starts=(0,)), Stage(0.0, ends=(0,))), 0, 0, 0)
    trace = [[[1]], [[2]]]
    paced = Disk(interval_s=3.0, read_s=[0.5])
    # Reads at 0 and, 3 s after, at 3; the second token begins at 1, or at 2 behind a pause.
    together = Schedule(step, paced, 1, "delay").token_seconds(trace)
    assert together == pytest.approx([1, 2.5])
    assert Schedule(step, paced, 1, "delay").token_seconds(trace, 1.0) == pytest.approx([1, 1.5])


def test_all_in_memory_takes_what_the_stages_take() -> None:
    plan = Schedule(STEP, Disk(3.0, [3.0]), n_slots=3, window="none")
    plan.token_seconds(TRACE)
    assert sum(plan.token_seconds(TRACE)) == pytest.approx(1 + 2 + 1 + 3 * 0.75 + 1)
    assert plan.cache.n_reads == 3


def test_compute_is_slower_beside_reads_and_waking_takes_time() -> None:
    step = Step(
        (Stage(1.0, routed=(0,)), Stage(4.0), Stage(0.0, starts=(0,)), Stage(0.0, ends=(0,))),
        0,
        0,
        0,
    )
    slowed = Disk(1.0, [1.0], compute_speed=0.5)
    beside = Schedule(step, slowed, n_slots=3, window="delay")
    # Two reads of a second each beside compute, which does half of that meanwhile.
    assert sum(beside.token_seconds([[[1, 2]]])) == pytest.approx(2 + 5 - 1)
    woken = Schedule(step, Disk(1.0, [1.0], wake_s=0.25), n_slots=3, window="none")
    # The reader once, and whoever waited for the second read; for the first it waited meanwhile.
    assert sum(woken.token_seconds([[[1, 2]]])) == pytest.approx(5 + 2 + 0.25 + 0.25)


@pytest.mark.parametrize(("read_s", "late_s"), [([0.5], 0.0), ([0.5], 0.25), ([1.5, 0.5], 0.25)])
def test_a_bounded_disk_paces_the_beginnings(read_s: list[float], late_s: float) -> None:
    cache = Cache(Disk(interval_s=2.0, read_s=read_s, late_s=late_s), n_slots=4)
    cache.idle(10.0)
    cache.demand([1, 2])
    cache.wait([1])
    assert cache.now == pytest.approx(10 + read_s[0])
    cache.wait([2])
    assert cache.now == pytest.approx(12 - 1e-3 + late_s + 0.5)  # a millisecond ahead


def test_a_read_that_outlasts_the_interval_is_followed_at_once() -> None:
    cache = Cache(Disk(interval_s=2.0, read_s=[3.0, 1.0], wake_s=0.5, late_s=0.25), n_slots=4)
    cache.idle(10.0)
    cache.demand([1, 2])
    cache.wait([1, 2])
    cache.wait([2])
    assert cache.now == pytest.approx(10 + 0.5 + 3 + 1 + 0.5)  # no timer; the asker waits again


def test_the_reads_of_a_histogram() -> None:
    def counted(reads: int, read_ns: int, **classes: int) -> TierStats:
        latencies = tuple(classes.get(f"c{i}", 0) for i in range(const.CFLOW_LATENCIES))
        values: dict[str, Any] = {field.name: 0 for field in fields(TierStats)}
        values |= {"reads": reads, "read_ns": read_ns, "latencies": latencies}
        return TierStats(**values)

    before = counted(2, 5_000_000, c3=2)
    after = counted(6, 16_000_000, c3=5, c6=1)  # three, and one eight times as long: 11 ms
    assert sorted(overlap.read_seconds(before, after)) == pytest.approx([1e-3] * 3 + [8e-3])
    assert overlap.read_seconds(after, after) == (0.0,)


def test_the_least_recently_used_gives_way() -> None:
    cache = Cache(Disk(1.0, [1.0]), n_slots=2)
    for record, n_reads in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        cache.demand([record])
        cache.wait([record])
        cache.release([record])
        assert cache.n_reads == n_reads


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(LabError, match="1 slots are too few"):
        Schedule(STEP, Disk(1.0, [1.0]), n_slots=1, window="none").token_seconds(TRACE)


def shape(folder: Path, widths: Widths = SMALL.random, n_layers: int = 16) -> str:
    path = folder / "shape.toml"
    text = shape_text(
        "arch2_4_combined",
        widths.d_model,
        n_layers,
        d_ff=widths.d_ff,
        n_experts=8,
        top_k=2,
        d_expert=widths.d_expert,
    )
    path.write_text(text)
    return str(path)


def test_windows_of_the_plan(tmp_path: Path) -> None:
    """docs/delays.md: layer 1 chooses in stage 8 and starts in stage 22, where layer 3 has routed in
    stage 20; the last three land together."""
    synth_header(shape(tmp_path), tmp_path / "m.cflow")
    ops = Model(str(tmp_path / "m.cflow"), header_only=True).ops
    n_stages = 1 + max(op.stage for op in ops)
    step = plan_step(ops, [1.0] * n_stages, 5.0, top_k=2, chosen=1)
    assert n_stages == 97
    assert step.stages[8].routed == (1,)
    assert step.stages[20].landed == (1,)
    assert step.stages[22].starts == step.stages[23].ends == (1,)
    assert step.stages[92].landed == step.stages[94].starts == (13, 14, 15)
    assert step.stages[14].landed == (0,)
    assert sum(len(stage.routed) for stage in step.stages) == 16
    assert step.seconds == pytest.approx(n_stages + 5.0)  # every second is somebody's


# ---- widened models ----


def test_a_widened_model_has_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "wide.cflow"
    widen(BUNDLED_FILE, path, 1024, 256)
    with closing(Model(str(BUNDLED_FILE))) as narrow, closing(Model(str(path))) as wide:
        assert [(layer.d_ff, layer.d_expert) for layer in wide.layers] == [(1024, 256)] * 6
        assert path.stat().st_size > 1.4 * BUNDLED_FILE.stat().st_size
        case = Case("real", overlap.story(narrow, 40), 1, 2)
        assert len(set(case.tokens)) > 20
        got, want = (
            overlap._decode(overlap._open_context(model, case), case) for model in (wide, narrow)
        )
        assert (got.choices, got.crc) == (want.choices, want.crc)


def test_no_model_becomes_narrower(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="gate of 512 x 128 exceeds 256"):
        widen(BUNDLED_FILE, tmp_path / "x.cflow", 256, 256)


# ---- the measurement ----


def test_streams_are_what_they_are_called() -> None:
    uniform = np.bincount(overlap.uniform_tokens(16, 4000), minlength=16)
    assert uniform.min() > 180
    local = np.array(overlap.local_tokens(64, 4000))
    counts = np.sort(np.bincount(local, minlength=64))[::-1]
    assert counts[0] > 5 * counts[20] > 0
    again = np.mean([token in local[max(i - 4, 0) : i] for i, token in enumerate(local)])
    assert again > 0.5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Overlap:
    folder = tmp_path_factory.mktemp("overlap")
    seen: set[str] = set()
    found = overlap.measure(
        folder, "here", sizes=SMALL, read_rate=50e6, report=lambda what, *_: seen.add(what)
    )
    assert not list(folder.iterdir())
    assert {"synth", "widen", "real, 1 threads, 2 experts"} <= seen
    return found


def test_cells_of_several_counts_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local tokens are for the first one, as the trained model is."""
    seen: list[Case] = []
    monkeypatch.setattr(
        overlap._Bench, "_level", lambda _, file, most, rate: replace(most, chosen=2 * most.threads)
    )
    monkeypatch.setattr(
        overlap._Bench, "_cell", lambda _, file, slots, case, rate: seen.append(case)
    )
    overlap._Bench(tmp_path, replace(SMALL, threads=(1, 2)), 50e6, silent).random_cells()
    uniform = [("uniform", 1, 2), ("uniform", 1, 8), ("uniform", 2, 4), ("uniform", 2, 8)]
    local = [("Zipf-like", 1, 2)] * 2
    assert [(case.routing, case.threads, case.chosen) for case in seen] == uniform + local


def test_cells(found: Overlap) -> None:
    assert {cell.routing for cell in found.cells} == {"uniform", "Zipf-like", "real"}
    for cell in found.cells:
        n = SMALL.rounds * SMALL.tokens * {"uniform": 1, "Zipf-like": 2, "real": 4}[cell.routing]
        assert all(len(cell.times(window)) == n for window in overlap.ARMS)
        assert len(cell.compute_ms) == len(cell.io_ms) == len(cell.predicted_ms["none"]) == n
        assert cell.predicted_ms.keys() == overlap.ARMS.keys()
        n_layers = 6 if cell.routing == "real" else 16
        assert cell.misses + cell.hits == pytest.approx(n_layers * cell.experts)
        if cell.routing == "uniform":
            assert cell.hits == 0
        assert cell.io >= 0.9 * cell.misses * found.record_bytes / 50e6 * 1e3 or n_layers == 6
    assert msgspec.json.decode(msgspec.json.encode(found), type=Overlap) == found


def test_the_schedule_reads_what_the_engine_reads(tmp_path: Path) -> None:
    """With hits and misses: a synchronous arm's order of use depends on no clock."""
    path = tmp_path / "m.cflow"
    synth(shape(tmp_path), path)
    with (
        closing(overlap._File(path, 1)) as file,
        closing(overlap._Tiers(file, 40, 1e9, 1)) as tiers,
    ):
        case = Case("Zipf-like", overlap.local_tokens(file.model.header.n_tokens, 20), 1, 2)
        trace = file.trace(case)
        n_stages = file.model.plan.n_stages
        plan = Schedule(
            plan_step(file.ops, [1e-3] * n_stages, 0.0, 2, 2),
            Disk(1e-3, [1e-3]),
            tiers.slots,
            "none",
        )
        before = tiers.stats("none").reads
        with closing(overlap._open_context(tiers.models["none"], case)) as context:
            overlap._decode(context, case)  # whatever the cache held is gone behind it
            reads = tiers.stats("none").reads
            overlap._decode(context, case)
        plan.token_seconds(trace)
        n_reads = plan.cache.n_reads
        plan.token_seconds(trace)
        assert reads > before
        assert plan.cache.n_reads - n_reads == tiers.stats("none").reads - reads
        assert plan.cache.n_reads - n_reads < 20 * 16 * 2


def test_what_compute_keeps_beside_reads(tmp_path: Path) -> None:
    # 10 s became 12.5, a read was under way in 8 of 10: compute went at 0.75 in these.
    assert overlap.compute_speed(10, 12.5, 0.8) == pytest.approx(0.75)
    path = tmp_path / "m.cflow"
    synth(shape(tmp_path), path)
    case = Case("uniform", (1, 2), 1, 2)
    with (
        closing(overlap._File(path, 1)) as file,
        closing(overlap._Tiers(file, 10, 1e9, 1)) as tiers,
    ):
        traffic, before = tiers.traffic(), tiers.stats("beside")
        with closing(overlap._open_context(file.model, case)) as context:
            want = overlap._decode(context, case)
            stream = overlap._tokens(context, case)
            for _ in range(2):
                with traffic:
                    one = next(stream)
        reading_s = (tiers.stats("beside").read_ns - before.read_ns) / 1e9
        assert 0 < reading_s < traffic.seconds
        assert one.crc == want.crc


def test_other_bits_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.cflow"
    synth(shape(tmp_path), path)
    with (
        closing(overlap._File(path, 1)) as file,
        closing(overlap._Tiers(file, 10, 1e9, 1)) as tiers,
    ):
        cell = overlap._Cell(file, tiers, Case("uniform", (1, 2), 1, 2))
        one = overlap.Pass((1.0, 1.0), (3, 4), 5)
        cell._same("delay", replace(one, seconds=(2.0, 3.0)), one)
        for other in (replace(one, choices=(3, 5)), replace(one, crc=6)):
            with pytest.raises(LabError, match="the arm `delay` gives other tokens"):
                cell._same("delay", other, one)


# ---- figures ----


def cell(**fields: object) -> Cell:
    values = {
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
    rows = dict(_cell_rows(cell(), overlap.ARMS))
    assert rows["window of the delay"] == "55.0 ms a token; recursion 55.0"
    assert rows["synchronous"] == "99.0 ms a token; recursion 100.0"


def test_the_picture(tmp_path: Path) -> None:
    draw(results_of(cell(), cell(routing="real")), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_rate_that_is_none() -> None:
    command = [sys.executable, "-m", "cflow.server", "lab", "overlap", "--read-rate", "fast"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"flag --read-rate: 'fast' is not a size", done.stderr)
