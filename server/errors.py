"""The one shape of every error answer, and the HTTP status of each cause."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

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


def error_response(error: RequestError) -> Response:
    body = error_object(str(error), code=error.code, param=error.param, status=error.status)
    return Response(
        msgspec.json.encode(body),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _fail(_request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return error_response(answer_failure(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {shorten(request.url.path)}"
    if error.status_code == 404:
        message, code = f"There is no route {path}.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{path} is not allowed; use {allowed}.", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    return error_response(
        RequestError(message, code=code, status=error.status_code, headers=error.headers)
    )


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _crash(_request: Request, _error: Exception) -> Response:
    """A 500 for an unexpected exception. uvicorn closes the connection after it, so the answer
    says so: a client must not send its next request there."""
    return error_response(our_fault(connection="close"))


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(EngineError, _fail)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _crash)
