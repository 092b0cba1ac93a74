"""Waits for another thread or process, all with one limit.

LIMIT_S is far above what anything here takes on a slow and busy machine: only a hang reaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 120.0


def until(condition: Callable[[], object], log: Callable[[], str] = str) -> None:
    """Block until `condition()` is true. log: what explains a hang."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"still waiting after {LIMIT_S:g} s\n{log()}"
        time.sleep(0.01)


async def until_async(condition: Callable[[], object]) -> None:
    """until() for tests that run on the loop whose work they wait for."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)
