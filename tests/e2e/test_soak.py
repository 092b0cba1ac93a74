"""The soak in short, and what it must not overlook."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cflow.engine.files.hub import BUNDLED_FILE
from e2e import soak as program
from e2e.soak import Ask, Report, Soak, record, soak


def test_mixed_load_and_two_kills() -> None:
    report = soak(BUNDLED_FILE, minutes=0.2, kill_every_s=4, clients=6, n_least=6)
    assert report.wrong == report.hung == []
    assert report.kills == len(report.recovery_s) == 2


def made(**fields: Any) -> Soak:
    return Soak(None, [], Report(1, 1), 1.0, 0, **fields)  # type: ignore[arg-type]


def test_another_letter_is_a_wrong_answer() -> None:
    one, ask = made(), Ask({}, ("abc", "def"))
    one._compare("whole", ("abc", "def"), ask)
    one._check_beginning(["ab", ""], ask)
    assert not one.report.wrong
    one._compare("whole", ("abc", "deg"), ask)
    one._check_beginning(["ab", "x"], ask)
    assert len(one.report.wrong) == 2


def test_a_failure_without_a_kill_is_wrong() -> None:
    one = made(killed=100.0)
    one._fail("worker_died", 105.0)
    assert one.report.failed == Counter(worker_died=1)
    one._fail("worker_died", 200.0)
    assert one.report.wrong == ["worker_died, and nothing had been killed"]


@pytest.mark.parametrize("way", ["_stream", "_leave"])
def test_an_error_event_is_seen_however_far_a_client_reads(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def events(*_: object) -> AsyncIterator[dict[str, Any]]:
        yield {"error": {"code": "numeric"}}

    monkeypatch.setattr(Soak, "_events", events)
    one = made()
    asyncio.run(getattr(one, way)(None, Ask({}, ("abc",)), Random(1)))
    assert one.report.wrong == ["numeric, and nothing had been killed"]
    assert not one.report.done


def test_its_figures_are_written_where_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(program, "RESULTS", tmp_path / "soak.json")
    monkeypatch.setattr(program, "PAGE", page)
    report = Report(
        30, 12, kills=2, done=Counter(whole=1200, leave=7), failed=Counter(worker_died=3),
        recovery_s=[1.004, 2.5], front_bytes=[100 << 20] * 60 + [110 << 20] * 60,
        worker_bytes=[300 << 20] * 120, tokens=5000,
    )  # fmt: skip
    summary = {"model": "m"} | report.summary()
    page.write_text("a\n<!-- make soak -->\n<!-- end -->\nb\n")
    for _ in range(2):  # the second one in place of the first
        record(summary)
    assert json.loads((tmp_path / "soak.json").read_text()) == summary
    text = page.read_text()
    assert text.startswith(
        "a\n<!-- make soak -->\n|  |  |\n| --- | --- |\n| model, load | m, 12 clients"
    )
    assert text.endswith("<!-- end -->\nb\n")
    for row in (
        "| answers | 1,200 whole, 0 streamed, 7 left in the middle |", "| wrong answers | 0 |", "| workers killed | 2 |",
        "| failed or refused around a kill | 3 worker_died |", "1.75 s (median), 2.50 s (longest)",
        "| memory of the front end | 100 to 110 MiB, the last minutes 1.1 times",
    ):  # fmt: skip
        assert text.count(row) == 1


def test_growth_is_seen() -> None:
    report = Report(1, 1)
    assert report.growth([9] * 10 + [100] * 50) == 1
    assert report.growth([100 + i for i in range(60)]) == pytest.approx(1.4, abs=0.1)
