"""The schedule of a token: times by hand, and the engine's own plan."""

from pathlib import Path

import pytest

from cflow.engine.files.synth import synth_header
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap.schedule import Cache, Disk, Schedule, Stage, Step, plan_step
from cflow.engine.native import Model

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


def test_windows_of_the_plan(shape: str, tmp_path: Path) -> None:
    """docs/delays.md: layer 1 chooses in stage 8 and starts in stage 22, where layer 3 has routed in
    stage 20; the last three land together."""
    synth_header(shape, tmp_path / "m.cflow")
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
