"""Whether the engine can take a request now, and when to come back if not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.engine import Answer, Engine
from cflow.server.api.prompts import Prompt
from cflow.server.errors import ENGINE_STATUS, RequestError, shorten
from cflow.server.metrics import Metrics

MAX_RETRY_S = 120  # SDKs do not retry at all when asked to wait longer
UNKNOWN_RETRY_S = 5

WHY = {
    "loading": "The model is still loading.",
    "restarting": "The engine is being restarted.",
    "stuck": "The engine does not answer and is being restarted.",
    "draining": "The server is shutting down.",
    "closed": "The server is shutting down.",
}


def retry_after_s(engine: Engine, metrics: Metrics) -> int:
    """Seconds until the queue, at the rate at which answers ended in the last minute, has drained."""
    rate = metrics.finished.rate()
    if not rate:
        return UNKNOWN_RETRY_S
    return max(1, min(MAX_RETRY_S, math.ceil(engine.queue_depth / rate)))


def check_ready(engine: Engine, metrics: Metrics) -> None:
    """Refuses (503) while the engine cannot serve; before the body is read."""
    state = engine.state
    if state == "ready":
        return
    headers = {"Retry-After": str(UNKNOWN_RETRY_S)}
    if state in ("draining", "closed"):
        headers["Connection"] = "close"
    metrics.rejections.labels(reason=state).inc()
    raise RequestError(WHY[state], code=state, status=503, headers=headers)


def check_model(engine: Engine, model: str | None) -> None:
    """A name left out means the one model there is."""
    if model is not None and model != engine.card.name:
        message = (
            f"The model {shorten(model)} does not exist; this server has {engine.card.name!r}."
        )
        raise RequestError(message, code="model_not_found", param="model", status=404)


def check_priority(priority: int) -> None:
    """Where there are keys, nobody may overtake the others, only let them pass."""
    if priority < 0:
        message = f"priority: {priority} is less than 0, which this server does not allow."
        raise RequestError(message, param="priority")


def _refuse(error: EngineError, engine: Engine, metrics: Metrics) -> RequestError:
    metrics.rejections.labels(reason=error.code).inc()
    status = ENGINE_STATUS.get(error.code, 500)
    wait_s = retry_after_s(engine, metrics) if status == 429 else UNKNOWN_RETRY_S
    headers = {"Retry-After": str(wait_s)}
    return RequestError(str(error), code=error.code, status=status, headers=headers)


def submit_all(
    engine: Engine,
    metrics: Metrics,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    *,
    n_choices: int,
    key: str,
    is_shared: bool,
    priority: int,
    timeout_s: float | None,
) -> list[Answer]:
    """One answer a prompt, all or none. is_shared: with other keys."""
    n_answers = len(prompts) * n_choices
    most = (engine.capacity + 1) // 2 if is_shared else engine.capacity
    if n_answers > most:
        room = f"{most} for one of several API keys" if is_shared else f"{most}"
        message = f"n: {n_answers} answers in one request; this server has room for {room}."
        raise RequestError(message, param="n")
    if not engine.queue_depth:
        metrics.finished.restart()  # idle seconds say nothing about how fast a queue drains
    answers: list[Answer] = []
    try:
        engine.check_room(n_answers, key if is_shared else None)
        for prompt, how in zip(prompts, sampling, strict=True):
            answer = engine.submit(
                prompt.ids,
                n_choices=n_choices,
                sampling=how,
                key=key,
                priority=priority,
                place=len(answers) * n_choices,
                timeout_s=timeout_s,
            )
            answers.append(answer)
    except EngineError as error:
        for answer in answers:
            answer.cancel()
        raise _refuse(error, engine, metrics) from None
    return answers
