"""A real HTTP server over a fake engine, in a thread; talk to it with httpx or bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import suppress
from typing import Any

import httpx
import uvloop

from cflow.server.config import ServerConfig, server_config
from cflow.server.http.app import create_app
from cflow.server.http.listen import listen
from cflow.server.http.server import http_server
from cflow.server.http.tls import read_certificate
from harness.fake_engine import FakeEngine
from harness.waiting import LIMIT_S


class Live:
    """engine: may be changed between requests."""

    def __init__(self, engine: FakeEngine, config: ServerConfig | None = None) -> None:
        self.engine = engine
        (self._socket,) = listen(["127.0.0.1"], 0)
        self.port: int = self._socket.getsockname()[1]
        config = config or server_config({})
        app = create_app(config, engine)
        self.metrics = app.state.service.metrics
        self.tracing = app.state.service.tracing
        self.tls = read_certificate(config.tls_cert, config.tls_key)
        self._server = http_server(app, config, self.tls)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.client = httpx.Client(
            base_url=f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}",
            timeout=LIMIT_S,
            verify=False,
        )

    @property
    def timeout_keep_alive(self) -> int:
        return self._server.config.timeout_keep_alive

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, self._socket:
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields if body is None else body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", **fields)

    def chat(self, **fields: Any) -> httpx.Response:
        fields.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.post("/v1/chat/completions", **fields)

    def raw(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        sock.sendall(data)
        return sock

    def metric(self, name: str) -> float:
        """The value of one sample; name: with its labels, as in the exposition."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    sock.settimeout(LIMIT_S)
    data = b""
    with suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked to be in the one shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return error
