"""Reading JSON request bodies: bounded size and nesting, strict UTF-8, no NaN."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request

from cflow.server.errors import ClientGone, RequestError, shorten

_JSON_TYPE = re.compile(r"application/([a-z0-9.]+\+)?json\s*(;.*)?", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:]')
MAX_LOOK = 1 << 20  # bytes of a rejected body that are searched for the fault
MAX_DIGITS = 4300  # of an integer; Python's own limit
DEEP = 200  # nesting that is named as the fault; the parser's own limit is higher


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
    """The body, of at most `limit` bytes. Raises RequestError (413, 415, 400) as early as possible,
    ClientGone if the client disconnects."""
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


def _is_torn(value: object) -> bool:
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _find(value: Any, is_bad: Callable[[object], bool], path: str = "") -> str | None:
    """Path of the first bad value or key, such as `messages[0].content`; None if there is none."""
    if is_bad(value):
        return path
    if isinstance(value, dict):
        if any(map(is_bad, value)):
            return path or "the body"
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    return next((found for at, item in items if (found := _find(item, is_bad, at))), None)


def _find_depth(body: bytes) -> str | None:
    """The top-level key under which the nesting is too deep."""
    depth, last, key = 0, b"", b""
    for match in _MARKS.finditer(body[:MAX_LOOK]):
        mark = match[0]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        elif mark != b":":
            last = mark
        elif depth == 1:
            key = last
        if depth > DEEP:
            return key[1:-1].decode(errors="replace")[:80] or None
    return None


def _explain(body: bytes, error: Exception) -> RequestError:
    """The error to send for a body that msgspec rejected."""
    if not body.strip():
        return RequestError("The request body is empty; send a JSON object.", code="invalid_json")
    if len(body) <= MAX_LOOK and (fault := _explain_value(body)):
        return fault
    text = str(error).removeprefix("JSON is malformed: ")
    return RequestError(f"The request body is not valid JSON: {text}.", code="invalid_json")


def _explain_value(body: bytes) -> RequestError | None:
    """The error if a single value is at fault, which Python's more lenient parser accepts."""
    try:
        value = json.loads(body, parse_int=_read_int)
    except (ValueError, RecursionError):
        return None
    if where := _find(value, _is_torn):
        message = f"{where[:80]} holds half of a UTF-16 surrogate pair, which is not text."
        return RequestError(message, code="invalid_unicode", param=where[:80])
    if where := _find(value, _is_no_number):
        message = f"{where[:80]} is not a number that JSON and 64 bits can hold."
        return RequestError(message, code="invalid_json", param=where[:80])
    return None


def _read_int(digits: str) -> float:
    return int(digits) if len(digits) < MAX_DIGITS else math.inf


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, without null fields: null means absent."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        where = _find_depth(body)
        message = f"{where or 'The request body'} is nested too deeply."
        raise RequestError(message, code="invalid_json", param=where) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _explain(body, error) from None
    if not isinstance(value, dict):
        message = f"The request body is {shorten(value)}; it must be a JSON object."
        raise RequestError(message, code="invalid_json")
    return {key: item for key, item in value.items() if item is not None}
