"""ASGI middleware that delivers answers sent before the request's body was read.

Closing a socket with unread data resets it, and the client loses the answer. Leaving it open lets
the rest of the body pass for the next request, as does a client that waits for 100 Continue: it
sends its next request instead. So the answer says Connection: close, and the body is read for
another moment before the answer ends. While the server drains, every answer says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAIN_S = 1.0
DRAIN_BYTES = 16 << 20
SMALL_BODY = 64 << 10  # bytes; the HTTP parser skips announced bodies up to this size


def _has_long_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return b"transfer-encoding" in headers or (
        length.isdigit() and not 0 <= int(length[:20]) <= SMALL_BODY
    )


async def _drain(receive: Receive) -> None:
    left = DRAIN_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))


class Linger:
    """The middleware. Bodies up to SMALL_BODY and requests whose body was read pass unchanged."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self.app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        expects = any(name == b"expect" for name, _ in scope["headers"])
        is_read = not (expects or _has_long_body(scope))

        async def watch() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (not is_read or self._is_draining()):
                headers = [h for h in message.get("headers", ()) if h[0].lower() != b"connection"]
                headers.append((b"connection", b"close"))
                await send({**message, "headers": headers})
            elif is_read or message.get("more_body", False) or expects:
                await send(message)
            else:
                await send({**message, "more_body": True})
                try:
                    async with asyncio.timeout(DRAIN_S):
                        await _drain(receive)
                except TimeoutError:
                    pass
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app(scope, watch, answer)
