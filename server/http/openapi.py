"""Additions to /openapi.json that FastAPI cannot infer: request bodies and error answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from cflow.server.api.schemas import REF, SHAPES
from cflow.server.http.auth import is_open

REFUSALS = {
    400: "The request is at fault; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "No such model or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    503: "The engine is loading, draining or being restarted.",
}
OF_POST = tuple(REFUSALS)
OF_GET = (401, 404, 503)
# Statuses of open paths that can fail.
OF_PROBE: dict[str, tuple[int, ...]] = {"/health": (503,), "/ready": (503,)}
TEXT = {"type": "string"}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": TEXT}}
NAME = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": TEXT, "type": TEXT, "param": NAME, "code": NAME},
        }
    },
}


ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": TEXT,
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
        "request_id": NAME,
    },
}


def _refusals(path: str, method: str) -> dict[str, Any]:
    if is_open(path):
        statuses, schema = OF_PROBE.get(path, ()), {"type": "object"}
    else:
        statuses = OF_POST if method == "post" else OF_GET
        name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        schema = {"$ref": REF.format(model=name)}
    content = {"application/json": {"schema": schema}}
    return {
        str(status): {"description": REFUSALS[status], "content": content} for status in statuses
    }


def _streams(operation: dict[str, Any]) -> bool:
    content = operation.get("requestBody", {}).get("content", {})
    return any("stream" in kind["schema"].get("properties", {}) for kind in content.values())


def describe(app: FastAPI) -> None:
    """Extend the application's OpenAPI document."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(SHAPES | {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR})
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)
                operation["responses"].update(_refusals(path, method))
                if _streams(operation):
                    content = operation["responses"]["200"]["content"]
                    content["text/event-stream"] = {"schema": EVENT}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
