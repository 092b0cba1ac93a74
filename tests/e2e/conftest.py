"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.servers import Server, serving
from oracles.real_models import RealModel

# Few sequences and a short context: small KV memory, quick start.
FLAGS = ("--context", "2048", "--max-sequences", "16")


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct."""
    return RealModel.fetch("smollm2-135m").cflow


@pytest.fixture(scope="session")
def shared(model: Path) -> Iterator[Server]:
    """A server for tests that leave it as it was."""
    with serving(model, *FLAGS) as server:
        yield server
    assert "starting again" not in server.log


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Server]]:
    """start(*flags): a server of the test's own, not yet ready."""
    running: list[Server] = []

    def make(*flags: str) -> Server:
        running.append(Server(model, *FLAGS, *flags))
        return running[-1]

    yield make
    for server in running:
        server.stop()
