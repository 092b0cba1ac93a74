"""Reading a JSON request body: bounded in every framing, strict UTF-8, no NaN, bounded nesting."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from fastapi import Request

from cflow.server.errors import ClientGone, RequestError, shorten

_JSON_TYPE = re.compile(r"application/([a-z0-9.]+\+)?json\s*(;.*)?", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")


def _too_large(limit: int) -> RequestError:
    message = f"The request body is larger than this server's limit of {limit} bytes."
    return RequestError(message, code="body_too_large", status=413)


def _check_headers(request: Request, limit: int) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {shorten(encoding)} is not supported; send the body plain."
        raise RequestError(message, code="unsupported_encoding", status=415)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    kind = request.headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(kind):
        message = f"Content-Type is {shorten(kind)}; it must be application/json."
        raise RequestError(message, code="invalid_content_type")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes; refuses (413, 415, 400) as soon as it can."""
    _check_headers(request, limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _find_surrogate(value: Any, path: str) -> str | None:
    """Where the first half of a surrogate pair without its other half stands."""
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        if any(_SURROGATE.search(key) for key in value):
            return path or "the body"
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    return next((found for at, item in items if (found := _find_surrogate(item, at))), None)


def _explain(body: bytes, error: Exception) -> RequestError:
    """Why msgspec refused the body."""
    if not body.strip():
        return RequestError("The request body is empty; send a JSON object.", code="invalid_json")
    if b"\\ud" in body.lower():
        try:
            where = _find_surrogate(json.loads(body), "")
        except (ValueError, RecursionError):
            where = None
        if where:
            message = f"{where[:80]} holds half of a UTF-16 surrogate pair, which is not text."
            return RequestError(message, code="invalid_unicode", param=where[:80])
    text = str(error).removeprefix("JSON is malformed: ")
    return RequestError(f"The request body is not valid JSON: {text}.", code="invalid_json")


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body` without its null fields: null means absent."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        message = "The request body is nested too deeply."
        raise RequestError(message, code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _explain(body, error) from None
    if not isinstance(value, dict):
        message = f"The request body is {shorten(value)}; it must be a JSON object."
        raise RequestError(message, code="invalid_json")
    return {key: item for key, item in value.items() if item is not None}
