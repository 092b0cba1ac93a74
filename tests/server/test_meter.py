"""The sliding window of a rate."""

from __future__ import annotations

from cflow.server.meter import Meter


def test_rate_over_the_window() -> None:
    now = [100.0]
    meter = Meter(10, lambda: now[0])
    assert meter.rate() == 0
    meter.add(20)
    assert meter.rate() == 2
    now[0] = 109.9
    meter.add(10)
    assert meter.rate() == 3
    now[0] = 110.0
    assert meter.rate() == 1
    now[0] = 500.0
    assert meter.rate() == 0
    meter.add(5)
    assert meter.rate() == 0.5


def test_rate_since_a_restart() -> None:
    now = [100.0]
    meter = Meter(10, lambda: now[0])
    meter.add(50)
    meter.restart()
    assert meter.rate() == 0
    meter.add(6)
    now[0] = 102.0
    assert meter.rate() == 2
    now[0] = 109.0
    meter.add(4)
    assert meter.rate() == 1
    now[0] = 119.0
    assert meter.rate() == 0
