"""The soak in short, and what it must not overlook."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from soak import Ask, Report, Soak, soak

from cflow.engine.hub import BUNDLED_FILE


def test_mixed_load_and_two_kills() -> None:
    report = soak(BUNDLED_FILE, minutes=0.4, kill_every_s=8, clients=6)
    assert report.wrong == report.hung == []
    assert report.kills == len(report.recovery_s) == 2
    assert min(report.done[way] for way in ("whole", "stream", "leave")) > 5


def made(**fields: Any) -> Soak:
    return Soak(None, [], Report(1, 1), 1.0, **fields)  # type: ignore[arg-type]


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


def test_growth_is_seen() -> None:
    report = Report(1, 1)
    assert report.growth([9] * 10 + [100] * 50) == 1
    assert report.growth([100 + i for i in range(60)]) == pytest.approx(1.4, abs=0.1)
