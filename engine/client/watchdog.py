"""A watchdog that tells a slow worker from a hung one."""

from __future__ import annotations

from cflow.engine.base.messages import Heartbeat

SILENCE_S = 10.0  # longest time between two heartbeats
STARTUP_S = 60.0  # longest time until the first


class Watchdog:
    """Checks that a worker sends heartbeats, and that its steps advance within stuck_s seconds.

    It counts its own ticks instead of reading the clock: after the machine was suspended, the clock
    has moved on while the worker's heartbeats are still unread.
    """

    def __init__(self, *, tick_s: float, stuck_s: float) -> None:
        self._tick_s = tick_s
        self._stuck_s = stuck_s
        self._has_lived = False
        self._silent_s = 0.0
        self._stalled_s = 0.0
        self._stages = -1

    def beat(self, heartbeat: Heartbeat) -> None:
        self._has_lived = True
        self._silent_s = 0.0
        if heartbeat.stages != self._stages or not heartbeat.in_step:
            self._stalled_s = 0.0
        self._stages = heartbeat.stages

    def tick(self) -> str | None:
        """Call every tick_s seconds. Returns what is wrong with the worker, None if nothing is."""
        self._silent_s += self._tick_s
        self._stalled_s += self._tick_s
        if self._silent_s > (SILENCE_S if self._has_lived else STARTUP_S):
            return f"no heartbeat for {self._silent_s:g} s"
        if self._has_lived and self._stalled_s > self._stuck_s:
            return f"no progress within a step for {self._stalled_s:g} s"
        return None
