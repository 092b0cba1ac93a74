"""Cancels that reach the worker while a step begins, on a link without a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import (
    Cancel,
    Drain,
    Failed,
    Heartbeat,
    SamplingParams,
    Step,
    Submit,
)
from cflow.engine.worker.link import Link
from cflow.engine.worker.worker import Worker
from harness.waiting import until
from oracles.toy_worker import load


class ScriptedLink:
    """Delivers lists of messages, and cancels a request while its first step is announced."""

    def __init__(self, *inbox: list[Any]) -> None:
        self.inbox = list(inbox)
        self.sent: list[Any] = []
        self.heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(0, False)
        self.on_cancel: Callable[[int], None] = lambda request_id: None

    def receive(self, timeout_s: float | None) -> list[Any]:
        return self.inbox.pop(0) if self.inbox else []

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Step) and message.progress:
            self.on_cancel(message.progress[0].request_id)


def test_a_cancel_before_the_step_is_repeated_by_the_heartbeat() -> None:
    """Without a heartbeat that repeats it, the step would take its ten minutes."""
    submit = Submit(7, (10, 11, 12), 1, SamplingParams(max_tokens=5))
    link = ScriptedLink([submit], [Cancel(7), Drain(0)])
    loaded = load(EngineConfig(model="step_s=600"), "", lambda *_: None)
    worker = Worker(cast(Link, link), EngineConfig(model=""), loaded)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()

    def has_ended() -> bool:
        link.heartbeat()
        return not thread.is_alive()

    until(has_ended)
    assert [m.code for m in link.sent if isinstance(m, Failed)] == ["cancelled"]
