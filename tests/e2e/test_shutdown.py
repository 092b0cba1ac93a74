"""Start and end: ready only when it is, SIGTERM drains, nothing is left."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cflow.engine.files.hub import BUNDLED_FILE
from harness.servers import Server, Stream, assert_failed, children_of, is_alive
from harness.waiting import LIMIT_S, until

PATIENT = ("--drain-timeout", "600")  # beyond LIMIT_S: a server that ends did not wait for it


def end(server: Server) -> None:
    """It exits with 0 and leaves no worker."""
    workers = server.workers()
    assert server.process.wait(LIMIT_S) == 0, server.log
    assert not any(is_alive(worker) for worker in workers)
    assert "Traceback" not in server.log


def test_never_ready_before_it_can_answer(start: Callable[..., Server]) -> None:
    server = start()
    seen = set()
    while True:
        state = server.http.get("/health").json()["status"]
        response = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert server.status("/live") == 200
        seen.add((state, response.status_code))
        if response.status_code == 200:
            break
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "loading"
        assert 1 <= int(response.headers["retry-after"]) <= 120
    assert ("ok", 503) not in seen


def test_more_connections_than_the_usual_limit_are_taken() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(hard, 100), hard)
    )  # what the server starts with
    try:
        server = Server(BUNDLED_FILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with ExitStack() as stack:
        stack.callback(server.stop)
        sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(120)
        ]
        for sock in sockets:
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_running_streams_finish(start: Callable[..., Server]) -> None:
    server = start(*PATIENT).ready()
    stream = Stream(server, n=4, max_tokens=150)
    until(lambda: len(stream.events) > 3)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.status("/ready") == 503)
    assert server.status("/live") == 200
    refused = server.http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["connection"] == "close"
    events = stream.join()
    assert events[-1] == {"done": True}
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert ends.count("length") == 4
    end(server)


def test_a_signal_to_every_process_is_the_front_ends_to_answer(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """As of a terminal that closes, and of systemd, which stops whole control groups."""
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    server = start("--api-keys", str(keys), *PATIENT).ready()
    server.http.headers["Authorization"] = "Bearer k"
    server.chat("hi", max_tokens=1)  # which starts the process for templates
    stream = Stream(server, n=4, max_tokens=150)
    until(lambda: len(stream.events) > 3)
    children = children_of(server.process.pid)
    assert len(children) > len(server.workers()) == 1
    for number in (signal.SIGHUP, signal.SIGTERM):
        for pid in (*children, server.process.pid):
            os.kill(pid, number)
    until(lambda: server.status("/ready") == 503)
    events = stream.join()
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert ends.count("length") == 4
    assert "starting again" not in server.log
    end(server)


def test_streams_past_the_limit_get_an_error(start: Callable[..., Server]) -> None:
    server = start("--drain-timeout", "1").ready()
    stream = Stream(server, n=8)
    until(lambda: len(stream.events) > 3)
    server.process.send_signal(signal.SIGTERM)
    assert_failed(stream.join(), "draining")
    end(server)


def test_a_second_signal_is_quick(start: Callable[..., Server]) -> None:
    server = start(*PATIENT).ready()
    stream = Stream(server, n=8)
    until(lambda: len(stream.events) > 3)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.status("/ready") == 503)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    end(server)
    assert_failed(stream.join(), "draining")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_ends_at_once(start: Callable[..., Server], number: signal.Signals) -> None:
    server = start(*PATIENT).ready()
    server.process.send_signal(number)
    end(server)


def test_a_damaged_model_ends_it_with_one_line(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.cflow"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    server = Server(damaged)
    assert server.process.wait(LIMIT_S) == 1
    server.stop()
    (line,) = [line for line in server.log.splitlines() if line.startswith("cflow: error: ")]
    assert "checksum" in line
    assert "altered" in line


def test_signal_while_loading(start: Callable[..., Server]) -> None:
    server = start(*PATIENT)
    server.process.send_signal(signal.SIGTERM)
    end(server)


def test_sighup_reads_the_keys_again(start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: one\n")
    server = start("--api-keys", str(keys)).ready()

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.get("/v1/models", headers=headers).status_code

    assert (status("one"), status("two")) == (200, 401)
    keys.write_text("alice: two\n")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: status("two") == 200)
    assert status("one") == 401
    keys.write_text("")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "holds no key" in server.log)
    assert status("two") == 200
