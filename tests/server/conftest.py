"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cflow.server.config import server_config
from harness.fake_engine import FakeEngine
from harness.live import Live

Serve = Callable[..., Live]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(engine, **settings): a live server, closed at the end of the test."""
    running: list[Live] = []

    def start(engine: FakeEngine | None = None, **settings: Any) -> Live:
        live = Live(engine or FakeEngine(), server_config(settings))
        running.append(live)
        return live

    yield start
    for live in running:
        live.close()


@pytest.fixture(scope="session")
def _shared() -> Iterator[Live]:
    live = Live(FakeEngine(), server_config({}))
    yield live
    live.close()


@pytest.fixture
def live(_shared: Live) -> Live:
    """A shared server with default settings and a fresh engine. Only /metrics remembers other tests."""
    _shared.engine.become(FakeEngine())
    return _shared
