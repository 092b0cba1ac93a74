"""One cell: what its arms read, by count, and its figures from given times."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap import bench, tiers
from cflow.engine.lab.overlap.cell import SLOWEST, CellBench, Round, compute_speed
from cflow.engine.lab.overlap.resident import Resident, first_seen
from cflow.engine.lab.overlap.schedule import Disk, Schedule, plan_step
from cflow.engine.lab.overlap.streams import (
    Case,
    Pass,
    decode_case,
    local_tokens,
    open_case,
    passes,
)
from cflow.engine.lab.overlap.tiers import Tiers, read_seconds
from cflow.engine.native import TierStats, const


@pytest.fixture(scope="module")
def resident(model_path: Path) -> Iterator[Resident]:
    with closing(Resident(model_path, 1)) as resident:
        yield resident


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of a wake-up and of a timer is enough where no time counts."""
    monkeypatch.setattr(tiers, "READS", 1)


def opened(resident: Resident, slots: int) -> Tiers:
    return Tiers(resident.path, resident.records, slots, 1e9, 1)


def n_reads(tiers: Tiers, arm: str) -> int:
    return sum(tiers.stats(arm).latencies)


def test_records_are_numbered_as_the_engine_counts_them(resident: Resident) -> None:
    assert resident.records.n == 16 * 8
    assert resident.records.of(3, [1, 5]) == [25, 29]
    assert sorted(resident.records.shuffled()) == list(range(128))
    with closing(opened(resident, 4)) as tiers:
        model = tiers.models["none"]
        resident.records.read_together(model, [25, 29])
        assert model.expert_uses.nonzero()[0].tolist() == [25, 29]
        for record, reads in ((29, 2), (30, 3), (25, 3), (30, 3)):
            resident.records.read(model, record)
            assert n_reads(tiers, "none") == reads


def test_reads_alone_read_each_record_once(resident: Resident) -> None:
    with closing(opened(resident, 4)) as tiers:
        before = n_reads(tiers, "io")
        tiers.read_token([[100, 101], [102], [103, 104]])
        assert n_reads(tiers, "io") - before == 5
        tiers.read_token([[103, 104]])  # still cached
        assert n_reads(tiers, "io") - before == 5


def test_traffic_reads_only_while_it_is_entered(resident: Resident) -> None:
    case = Case("uniform", (1, 2), 1, 2)
    with (
        closing(opened(resident, 10)) as tiers,
        closing(open_case(resident.model, case)) as context,
    ):
        traffic = tiers.traffic()
        want, stream = decode_case(context, case), passes(context, case)
        for _ in case.tokens:
            before = n_reads(tiers, "beside")
            with traffic:
                one = next(stream)
                while n_reads(tiers, "beside") == before:  # the token may come first
                    time.sleep(1e-3)
            assert not traffic._thread.is_alive()
        assert one.crc == want.crc
        assert one.choices == want.choices


def test_the_schedule_reads_what_the_engine_reads(resident: Resident) -> None:
    """With hits and misses: a synchronous arm uses records in an order that depends on no clock."""
    case = Case("Zipf-like", local_tokens(resident.model.header.n_tokens, 20), 1, 2)
    with closing(opened(resident, 40)) as tiers:
        n_stages = resident.model.plan.n_stages
        step = plan_step(resident.ops, [1e-3] * n_stages, 0.0, 2, 2)
        plan = Schedule(step, Disk(1e-3, [1e-3]), tiers.slots, "none")
        before = tiers.stats("none").reads
        with closing(open_case(tiers.models["none"], case)) as context:
            decode_case(context, case)  # evicts whatever the cache held
            reads = tiers.stats("none").reads
            decode_case(context, case)
        trace = resident.trace(case)
        plan.token_seconds(trace)
        n_reads = plan.cache.n_reads
        plan.token_seconds(trace)
        assert reads > before
        assert plan.cache.n_reads - n_reads == tiers.stats("none").reads - reads
        assert plan.cache.n_reads - n_reads < 20 * 16 * 2


def test_other_bits_are_an_error(resident: Resident) -> None:
    with closing(opened(resident, 10)) as tiers:
        cell = CellBench(resident, tiers, Case("uniform", (1, 2), 1, 2))
        one = Pass((1.0, 1.0), (3, 4), 5)
        cell.check_same("delay", replace(one, seconds=(2.0, 3.0)), one)
        for other in (replace(one, choices=(3, 5)), replace(one, crc=6)):
            with pytest.raises(LabError, match="the arm `delay` gives other tokens"):
                cell.check_same("delay", other, one)


def test_stages_begin_when_they_are_first_seen() -> None:
    """Of five stages the third is over before anybody looks. The count grows as a stage begins."""
    looks = [(7, 0.0), (8, 1.5), (9, 2.0), (9, 2.5), (11, 4.0), (12, 5.0)]
    assert first_seen(looks, 1.0, 5).tolist() == [1.0, 2.0, 4.0, 4.0, 5.0, 5.0]
    with pytest.raises(LabError, match="5 stages ran, the plan has 6"):
        first_seen(looks, 1.0, 6)


# ---- figures from given times ----


def rounds(alone: float, beside: float, reading: float) -> list[Round]:
    return [Round({"compute": (alone,) * 3, "beside": (beside,) * 3}, {}, reading)]


@pytest.mark.parametrize(
    ("alone", "beside", "reading", "speed"),
    [
        (10, 12.5, 0.8, 0.75),  # a read was in flight for 10 of 12.5 s, which did 7.5 s of work
        (10, 9.0, 0.8, 1.0),
        (10, 40.0, 0.5, SLOWEST),  # of a busy machine: less than nothing would be left
        (10, 12.5, 0.0, 1.0),
        (10, 12.5, 1.3, 0.8),
    ],
)
def test_what_compute_keeps_beside_reads(
    alone: float, beside: float, reading: float, speed: float
) -> None:
    assert compute_speed(rounds(alone, beside, reading)) == pytest.approx(speed)


def test_the_reads_of_a_histogram() -> None:
    def counted(reads: int, read_ns: int, **classes: int) -> TierStats:
        latencies = tuple(classes.get(f"c{i}", 0) for i in range(const.CFLOW_LATENCIES))
        values: dict[str, Any] = {field.name: 0 for field in fields(TierStats)}
        values |= {"reads": reads, "read_ns": read_ns, "latencies": latencies}
        return TierStats(**values)

    before = counted(2, 5_000_000, c3=2)
    after = counted(6, 16_000_000, c3=5, c6=1)  # three, and one eight times as long: 11 ms
    assert sorted(read_seconds(before, after)) == pytest.approx([1e-3] * 3 + [8e-3])
    assert read_seconds(after, after) == (0.0,)


@pytest.mark.parametrize(("compute_s", "chosen"), [(1e-3, 2), (0.16, 5), (9.9, 8)])
def test_a_level_case_has_reads_as_long_as_compute(
    resident: Resident, monkeypatch: pytest.MonkeyPatch, compute_s: float, chosen: int
) -> None:
    """A layer computes for a 16th of a token; at 450 records a second 0.01 s are 4.5 records."""
    monkeypatch.setattr(bench, "decode_case", lambda *_: Pass((compute_s,), (1,), 0))
    made = bench.Bench(Path(), bench.Sizes(), None, lambda *_: None)
    case = Case("uniform", (1,), 1, 8)
    assert made._level(resident, case, 450 * resident.records.bytes).chosen == chosen
