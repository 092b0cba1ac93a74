"""Server-sent events: framing, pings on idle streams, and detecting that the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cflow.server.errors import answer_failure, error_object

DONE = b"data: [DONE]\n\n"
STALL_S = 60.0  # a client that reads nothing for this long counts as gone
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Events = AsyncGenerator[bytes, None]


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def ended(chunks: Events) -> Events:
    """The chunks, an error event if one fails, then [DONE]."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        refusal = answer_failure(error)
        yield event(
            error_object(str(refusal), code=refusal.code, param=None, status=refusal.status)
        )
    yield DONE


# Characters that some clients take for ends of lines. In JSON they only stand in strings.
SEPARATORS = {"\u2028": rb"\u2028", "\u2029": rb"\u2029", "\u0085": rb"\u0085"}


def _without_separators(events: bytes) -> bytes:
    for character, escape in SEPARATORS.items():
        events = events.replace(character.encode(), escape)
    return events


@asynccontextmanager
async def watching(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call on_gone if the client disconnects inside this block. A half-closed connection counts as
    disconnected."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class EventStream(StreamingResponse):
    """A response that sends events as they come.

    It sends its headers at once, so a request must be rejected before an EventStream is made."""

    def __init__(
        self,
        events: Events,
        *,
        on_gone: Callable[[], None],
        state: Callable[[], str],
        ping_s: float,
        headers: dict[str, str],
    ) -> None:
        """state: what the client waits for, said in pings; "" for nothing. ping_s: seconds between
        pings on an idle stream."""
        super().__init__(events, media_type="text/event-stream", headers=HEADERS | headers)
        self._events = events
        self._on_gone = on_gone
        self._state = state
        self._ping_s = ping_s
        self._last_s = 0.0
        self._is_sending = False

    async def _write(self, send: Send, chunk: bytes) -> None:
        self._is_sending = True
        if b"\xe2\x80" in chunk or b"\xc2\x85" in chunk:
            chunk = _without_separators(chunk)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False
        self._last_s = asyncio.get_running_loop().time()

    async def _tick(self, send: Send, stall: asyncio.Timeout) -> None:
        """Ping an idle stream; end a stream whose client reads nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._ping_s, 1.0))
            idle_s = loop.time() - self._last_s
            if self._is_sending and idle_s >= STALL_S:
                stall.reschedule(loop.time())
            elif not self._is_sending and idle_s >= self._ping_s:
                state = self._state()
                ping = f": ping, {state}\n\n" if state else ": ping\n\n"
                await self._write(send, ping.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async with (
                asyncio.timeout(None) as stall,
                watching(receive, self._on_gone),
                aclosing(self._events),
            ):
                await self._send_all(send, stall)
        finally:
            self._on_gone()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send, stall: asyncio.Timeout) -> None:
        self._last_s = asyncio.get_running_loop().time()
        ticker = asyncio.create_task(self._tick(send, stall))
        try:
            async for chunk in self._events:
                await self._write(send, chunk)
        finally:
            ticker.cancel()
