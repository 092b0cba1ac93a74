"""One connection: heads bounded in size and time, upgrades declined, refusals in the one shape."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from cflow.server.http import protocol
from harness.live import Live, read_all, request
from harness.waiting import LIMIT_S, until

BODY = b'{"prompt": "abc"}'


def answers(live: Live, data: bytes) -> bytes:
    with live.raw(data) as sock:
        return read_all(sock)


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of an answer that is the only one and closes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/json" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


@pytest.mark.parametrize("size", [100_000, 20_000_000])
@pytest.mark.parametrize("is_ended", [True, False])
def test_a_long_header_is_refused_and_seen_to_be(live: Live, size: int, is_ended: bool) -> None:
    head = b"GET /live HTTP/1.1\r\nHost: x\r\nA: " + b"a" * size + b"\r\n\r\n" * is_ended
    status, error = refusal(answers(live, head))
    assert (status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * 200_000 + b"\r\n",
        b"GET /" + b"l" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"\r\n" * 100_000,
    ],
    ids=["many", "url", "blank"],
)
def test_long_heads(live: Live, head: bytes) -> None:
    assert refusal(answers(live, head))[0] == 431


@pytest.mark.parametrize(
    "tail", [b"1;" + b"x" * 200_000, b"0\r\n" + b"A: b\r\n" * 50_000], ids=["extension", "trailers"]
)
def test_what_surrounds_chunks_is_bounded(live: Live, tail: bytes) -> None:
    head = request("POST", "/v1/completions", b"", "Transfer-Encoding: chunked")
    chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    assert refusal(answers(live, head + chunk + tail))[0] == 431


def test_heads_up_to_the_bound_and_small_heads_after_long_bodies(live: Live) -> None:
    big = request("GET", "/live", b"", "A: " + "a" * 60_000)
    body = json.dumps({"prompt": "abc", "x": "y" * 300_000}).encode()
    last = request("GET", "/live", b"", "Connection: close", "A: " + "a" * 60_000)
    answer = answers(live, big * 3 + request("POST", "/v1/completions", body) + big + last)
    assert answer.count(b"HTTP/1.1 200") == 6


@pytest.mark.parametrize(
    "extra",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA"),
        ("Upgrade: websocket", "connection: keep-alive, upgrade", "Sec-WebSocket-Version: 13"),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("step", [7, 100_000])
def test_an_offered_upgrade_is_declined_and_the_body_kept(
    live: Live, extra: tuple[str, ...], is_chunked: bool, step: int, caplog: Any
) -> None:
    framing = ("Transfer-Encoding: chunked",) if is_chunked else ()
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if is_chunked else BODY
    one = request("POST", "/v1/completions", framed, *extra, *framing)
    data = one * 3 + request("GET", "/live", b"", "Connection: close")
    with live.raw() as sock, caplog.at_level(logging.WARNING):
        for start in range(0, len(data), step):
            sock.sendall(data[start : start + step])
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.count(b'"ABC"') == 3
    assert not caplog.records


def test_many_upgrades_in_one_write(live: Live) -> None:
    one = request("GET", "/live", b"", "Connection: Upgrade", "Upgrade: h2c")
    last = request("GET", "/live", b"", "Connection: close")
    assert answers(live, one * 500 + last).count(b"HTTP/1.1 200") == 501


@pytest.mark.parametrize(
    "data",
    [
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA b: x\r\n\r\n",
        request("POST", "/live", b"x", "Content-Length: 1", "Content-Length: 2"),
        request("POST", "/live", b"x", "Content-Length: 1", "Transfer-Encoding: chunked"),
        request("POST", "/v1/completions", b"zz\r\n", "Transfer-Encoding: chunked"),
    ],
    ids=range(9),
)
def test_what_is_not_http(live: Live, data: bytes, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        status, error = refusal(answers(live, data))
    assert (status, error["code"]) == (400, "invalid_http")
    assert not caplog.records


def test_garbage_after_a_request_is_not_taken_for_its_answer(live: Live) -> None:
    answer = answers(live, request("POST", "/v1/completions", BODY) + b"FOO / HTTP/1.1\r\n\r\n")
    assert b"invalid_http" not in answer


class TestTime:
    @pytest.fixture
    def live(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> Live:
        monkeypatch.setattr(protocol, "READ_S", 0.4)
        monkeypatch.setattr(protocol, "STALL_S", 0.4)
        live: Live = serve()
        return live

    @pytest.mark.parametrize(
        "data", [b"GET /live HT", request("POST", "/v1/completions", BODY)[:-1]]
    )
    def test_a_request_that_does_not_end(self, live: Live, data: bytes) -> None:
        status, error = refusal(answers(live, data))
        assert (status, error["code"]) == (408, "request_timeout")

    def test_a_head_that_drips(self, live: Live) -> None:
        with live.raw(b"GET /live HTTP/1.1\r\nA: ") as sock:
            sock.settimeout(0.1)

            def is_answered() -> bool:
                sock.send(b"a")
                with suppress(TimeoutError):
                    return sock.recv(12) == b"HTTP/1.1 408"
                return False

            until(is_answered)

    def test_a_body_that_comes_slowly_is_read(
        self, live: Live, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each piece that arrives starts READ_S anew."""
        monkeypatch.setattr(protocol, "READ_S", LIMIT_S)
        starts: list[object] = []
        restart = protocol.Protocol._restart_read_timer

        def counted(connection: protocol.Protocol) -> None:
            starts.append(connection)
            restart(connection)

        monkeypatch.setattr(protocol.Protocol, "_restart_read_timer", counted)
        with live.raw(request("POST", "/v1/completions", BODY)[: -len(BODY)]) as sock:
            until(lambda: len(starts) == 2)  # by the connection and by the head
            for n, byte in enumerate(BODY[:-1], 3):
                sock.sendall(bytes([byte]))
                until(partial(lambda n: len(starts) == n, n))
            sock.sendall(BODY[-1:])
            assert sock.recv(12) == b"HTTP/1.1 200"

    def test_a_connection_that_says_nothing_is_closed(self, live: Live) -> None:
        assert answers(live, b"") == b""

    @pytest.mark.parametrize("connection", ["keep-alive", "close"])
    def test_an_answer_that_is_not_read(self, live: Live, connection: str) -> None:
        open_ = live._server.server_state.connections
        fields = {"prompt": ["a" * 60] * 256, "n": 2, "echo": True, "max_tokens": 0, "logprobs": 20}
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", live.port))
            line = f"Connection: {connection}"
            sock.sendall(request("POST", "/v1/completions", json.dumps(fields).encode(), line))
            until(lambda: bool(open_))
            until(lambda: not open_)
