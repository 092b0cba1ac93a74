"""A worker that is slow, one that hangs, one that is silent."""

from cflow.engine.base.messages import Heartbeat
from cflow.engine.client.watchdog import Watchdog


def seconds_until_alarm(watchdog: Watchdog, *, stages: list[int], in_step: bool) -> int | None:
    """Two heartbeats a second, with the given stage counts."""
    for second, n in enumerate(stages):
        watchdog.beat(Heartbeat(n, in_step))
        watchdog.beat(Heartbeat(n, in_step))
        if watchdog.tick():
            return second + 1
    return None


def new() -> Watchdog:
    return Watchdog(tick_s=1.0, stuck_s=20.0)


def test_a_step_that_makes_progress_may_take_any_time() -> None:
    assert seconds_until_alarm(new(), stages=list(range(1000)), in_step=True) is None


def test_a_step_without_progress_is_stuck() -> None:
    assert seconds_until_alarm(new(), stages=[5] * 100, in_step=True) == 21


def test_an_idle_worker_makes_no_progress_and_is_well() -> None:
    assert seconds_until_alarm(new(), stages=[5] * 1000, in_step=False) is None


def silence(watchdog: Watchdog) -> int:
    for second in range(1000):
        if watchdog.tick():
            return second + 1
    raise AssertionError("no alarm")


def test_silence_of_ten_seconds_is_death() -> None:
    watchdog = new()
    watchdog.beat(Heartbeat(0, False))
    assert silence(watchdog) == 11


def test_a_start_may_take_longer() -> None:
    assert silence(new()) == 61
