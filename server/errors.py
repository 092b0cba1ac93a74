"""The one shape of every error answer, and the HTTP status of each cause.

`http.errors` makes HTTP responses of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cflow.engine.base.errors import CflowError, EngineError

MAX_ECHO = 200  # characters of the client's text that an error repeats


log = logging.getLogger("cflow.server")


class RequestError(CflowError):
    """A request that is at fault, or cannot be served now.

    code: a stable word for programs. param: the field at fault. status: the HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


# HTTP status by code of an EngineError; any other code is a 500.
ENGINE_STATUS = {
    "invalid_request": 400,
    "template_error": 400,
    "queue_full": 429,
    "key_queue_full": 429,
    "loading": 503,
    "draining": 503,
    "worker_died": 503,
    "worker_stuck": 503,
    "timeout": 503,
    "out_of_memory": 503,
}


def shorten(value: object) -> str:
    """A client's value for use in an error, cut so that errors do not amplify requests."""
    if isinstance(value, str | bytes):
        value = value[: MAX_ECHO + 1]
    elif isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_object(
    message: str, *, code: str, param: str | None, status: int
) -> dict[str, dict[str, str | None]]:
    kind = error_type(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def our_fault(**headers: str) -> RequestError:
    """A 500 whose cause is in the log only."""
    message = "The server failed on this request; its log has the cause."
    headers = {"x-should-retry": "false"} | headers
    return RequestError(message, code="internal", status=500, headers=headers)


def answer_failure(error: Exception) -> RequestError:
    """The error of a request that failed after it was accepted.

    x-should-retry tells SDKs whether sending it again can help: only if the server is shutting
    down or the request timed out. An exception that is not an EngineError is a bug of ours."""
    if not isinstance(error, EngineError):
        log.error("a request failed", exc_info=error)
        return our_fault()
    status = ENGINE_STATUS.get(error.code, 500)
    retry = "true" if error.code in ("draining", "timeout") else "false"
    headers = {"x-should-retry": retry}
    return RequestError(str(error), code=error.code, status=status, headers=headers)
