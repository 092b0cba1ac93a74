"""Errors as HTTP responses: one for each exception that a route may raise."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cflow.engine.base.errors import EngineError
from cflow.server.errors import (
    ClientGone,
    RequestError,
    answer_failure,
    error_object,
    our_fault,
    shorten,
)


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
