"""Handing requests to the engine, and when to try again if it refuses them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cflow.engine.base.errors import EngineError
from cflow.engine.client.engine import REFUSALS, Answer, Engine, GenerateRequest
from cflow.server.errors import ENGINE_STATUS, RequestError, shorten
from cflow.server.metrics import Metrics

MAX_RETRY_S = 120  # SDKs do not retry after longer waits
UNKNOWN_RETRY_S = 5


def retry_after_s(engine: Engine, metrics: Metrics) -> int:
    """Seconds until the queue is empty, at the rate of answers that ended in the last minute."""
    rate = metrics.finished.rate()
    if not rate:
        return UNKNOWN_RETRY_S
    return max(1, min(MAX_RETRY_S, math.ceil(engine.status.queue_depth / rate)))


def check_ready(engine: Engine, metrics: Metrics) -> None:
    """Reject (503) before the body is read if the engine cannot serve."""
    state = engine.status.state
    if state == "ready":
        return
    headers = {"Retry-After": str(UNKNOWN_RETRY_S)}
    if state in ("draining", "closed"):
        headers["Connection"] = "close"
    metrics.rejections.labels(reason=state).inc()
    raise RequestError(_sentence(REFUSALS[state][1]), code=state, status=503, headers=headers)


def check_model(engine: Engine, model: str | None) -> None:
    """Reject (404) the name of another model. No name means the served model."""
    if model is not None and model != engine.card.name:
        message = (
            f"The model {shorten(model)} does not exist; this server has {engine.card.name!r}."
        )
        raise RequestError(message, code="model_not_found", param="model", status=404)


def check_priority(priority: int) -> None:
    """Reject priorities that overtake others. Called if the server has API keys."""
    if priority < 0:
        message = f"priority: {priority} is less than 0, which this server does not allow."
        raise RequestError(message, param="priority")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _rejection(error: EngineError, engine: Engine, metrics: Metrics) -> RequestError:
    if error.code == "too_many_answers":
        return RequestError(f"n: {error}.", param="n")
    metrics.rejections.labels(reason=error.code).inc()
    status = ENGINE_STATUS.get(error.code, 500)
    wait_s = retry_after_s(engine, metrics) if status == 429 else UNKNOWN_RETRY_S
    headers = {"Retry-After": str(wait_s)}
    return RequestError(str(error), code=error.code, status=status, headers=headers)


async def submit(
    engine: Engine, metrics: Metrics, request: GenerateRequest, is_embedding: bool = False
) -> Sequence[Answer]:
    """One answer a prompt, all or none. Raises RequestError."""
    if not engine.status.queue_depth:
        metrics.finished.restart()  # idle time says nothing about how fast the queue drains
    try:
        return await (engine.embed(request) if is_embedding else engine.submit(request))
    except EngineError as error:
        raise _rejection(error, engine, metrics) from None
