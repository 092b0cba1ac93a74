"""HTTP/1.1 on one connection: uvicorn's protocol with limits and our error shape.

The size of everything but bodies is limited, and so is the time spent waiting for the client.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from cflow.server.errors import RequestError
from cflow.server.http.errors import error_response
from cflow.server.http.sse import STALL_S

MAX_HEAD = 64 << 10  # bytes of request line and headers, of trailers, of a chunk's extensions
SLICE = 8 << 10  # bytes parsed between two checks of the head's length
READ_S = 60.0  # for a whole head; for the next bytes of a body
LINGER_S = 1.0  # input is discarded for this long after a rejection, so that the client sees it


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """Answer in HTTP/1.0, which has no chunks: the end of the connection ends a body without a length."""
    send, is_open = cycle.send, False

    async def answer(message: Any) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if is_open else None
        elif is_open:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = answer  # type: ignore[method-assign]


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stage: Literal["idle", "head", "body"] = "idle"  # of the message being read
        self._has_moved = False  # the last slice completed a head, a message or a piece of a body
        self._n_head = 0  # bytes since something was completed
        self._is_refused = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_read_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        has_moved = False
        for start in range(0, len(data), SLICE):
            if self._is_refused:
                return
            self._has_moved = False
            piece = data[start : start + SLICE]
            self._parse(piece)
            has_moved |= self._has_moved
            self._n_head = 0 if self._has_moved else self._n_head + len(piece)
            if self._n_head > MAX_HEAD:
                message = f"The request's headers are larger than {MAX_HEAD} bytes."
                self._refuse(RequestError(message, code="headers_too_large", status=431))
        if self._stage == "idle":
            self._stop_read_timer()
        elif has_moved or self._read_timer is None:
            self._restart_read_timer()

    # ---- parsing ----

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse_syntax()
                    return
                data = self._decline_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse_syntax()
                return

    def _decline_upgrade(self) -> bytes:
        """The head of the message without its Upgrade header, for a new parser.

        httptools takes what follows an Upgrade header for another protocol. To a client that only
        offers an upgrade (Java's does), it is the body of an ordinary request."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def _should_upgrade(self) -> bool:
        """Keep uvicorn from answering a message with Upgrade: _decline_upgrade parses it again."""
        return True

    def on_message_begin(self) -> None:
        self._stage = "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        is_old = self.parser.get_http_version() == "1.0"
        if is_old:
            self.expect_100_continue = False
        super().on_headers_complete()
        if is_old:
            _end_with_the_connection(self.cycle)
        self._stage = "body"
        self._has_moved = True

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stage = "idle"
        self._has_moved = True
        super().on_message_complete()

    # ---- refusing ----

    def _refuse_syntax(self) -> None:
        message = "The request is not valid HTTP/1.1."
        self._refuse(RequestError(message, code="invalid_http"))

    def _can_answer(self) -> bool:
        """Whether the message being read is the next to be answered and has no answer yet."""
        cycle = self.cycle
        if self.pipeline:
            return False
        if self._stage == "body":
            return not (cycle.response_started or cycle.disconnected)
        return cycle is None or cycle.response_complete

    def _refuse(self, error: RequestError) -> None:
        """Answer the message being read with `error`, if possible, and close the connection."""
        self._is_refused = True
        self._stop_read_timer()
        if not self._can_answer():
            self._close()
            return
        if self._stage == "body":
            self.cycle.disconnected = True  # so that its handler does not answer as well
            self.cycle.message_event.set()
        response = error_response(error)
        headers = [*self.server_state.default_headers, *response.raw_headers]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        head = STATUS_LINE[error.status] + b"".join(lines) + b"connection: close\r\n\r\n"
        self.transport.write(head + bytes(response.body))
        if self.transport.can_write_eof():  # TLS cannot half-close
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self._close)

    # ---- waiting for the client ----

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _restart_read_timer(self) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(READ_S, self._on_slow)

    def _on_slow(self) -> None:
        if self._stage == "idle":
            self._close()
            return
        message = f"The request did not arrive: nothing more of it came for {READ_S:g} s."
        self._refuse(RequestError(message, code="request_timeout", status=408))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._write_timer is None:
            self._watch_unsent()

    def _close(self) -> None:
        self.transport.close()
        if self._write_timer is None:
            self._watch_unsent()

    def _watch_unsent(self, before: int | None = None) -> None:
        """Close the connection if its client reads nothing of the rest of an answer."""
        self._write_timer = None
        n_unsent = self.transport.get_write_buffer_size()
        if n_unsent and n_unsent == before:
            self.transport.abort()
        elif n_unsent:
            self._write_timer = self.loop.call_later(STALL_S, self._watch_unsent, n_unsent)
