"""Errors as HTTP responses: one for each exception that a route may raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cflow.engine.base.errors import EngineError
from cflow.server.api.messages import error_type
from cflow.server.errors import (
    ClientGone,
    RequestError,
    answer_failure,
    error_object,
    our_fault,
    shorten,
)

if TYPE_CHECKING:
    from starlette.types import Scope


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client expects errors and models in Anthropic's shape."""
    names = (name for name, _ in scope["headers"])
    return scope["path"].startswith("/v1/messages") or b"anthropic-version" in names


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """scope: of the request, if it has been read; its client decides the shape of the body."""
    body: dict[str, Any]
    if scope is not None and speaks_anthropic(scope):
        inner = {"type": error_type(error.status), "message": str(error)}
        request_id = scope.get("state", {}).get("id")
        body = {"type": "error", "error": inner, "request_id": request_id}
    else:
        body = error_object(str(error), code=error.code, param=error.param, status=error.status)
    return Response(
        msgspec.json.encode(body),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _fail(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return error_response(answer_failure(error), request.scope)


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
        RequestError(message, code=code, status=error.status_code, headers=error.headers),
        request.scope,
    )


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _crash(request: Request, _error: Exception) -> Response:
    """A 500 for an unexpected exception. uvicorn closes the connection after it, so the answer
    says so: a client must not send its next request there."""
    return error_response(our_fault(connection="close"), request.scope)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(EngineError, _fail)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _crash)
