"""An event loop on a simulated clock: what sleeps for minutes takes no time."""

from __future__ import annotations

import asyncio
import selectors
from types import TracebackType
from typing import Any


class SimulatedLoop(asyncio.SelectorEventLoop):
    """When nothing is ready, time() jumps to the next timer."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, wait_s: float) -> None:
        self._now_s += wait_s

    def __enter__(self) -> SimulatedLoop:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _Jump(selectors.DefaultSelector):
    """A selector that jumps where others block."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "every task waits, and no timer is set"
        self._loop.jump(max(timeout, 0))
        return super().select(0)
