"""A stand-in of the hub's HTTP API: one repository, whose files it serves."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """files: by path. fetched: the paths that were read. refusal: status and X-Error-Code for all."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.fetched: list[str] = []
        self.refusal: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0]).lstrip("/")
        if self.server.refusal is not None:
            status, code = self.server.refusal
            return self._send(status, b"{}", with_body, {"X-Error-Code": code})
        if path.startswith("api/models/org/repo/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.server.files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), with_body)
        if path.startswith("api/models/org/repo"):
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": "org/repo", "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), with_body)
        _, _, name = path.partition(f"resolve/{COMMIT}/")
        if name not in self.server.files:
            return self._send(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})
        if with_body:
            self.server.fetched.append(name)
        data = self.server.files[name]
        etag = hashlib.sha256(data).hexdigest()
        return self._send(200, data, with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send(
        self, status: int, data: bytes, with_body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


@contextmanager
def hub_of(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
