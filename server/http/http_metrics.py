"""ASGI middleware that counts, times and identifies each HTTP request and logs it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cflow.server.metrics import Metrics

REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[!-~]{1,128}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
log = logging.getLogger("cflow.access")


def _request_id(scope: Scope) -> bytes:
    """The client's x-request-id if it is safe to repeat, else a new one."""
    given = (value for name, value in scope["headers"] if name == REQUEST_ID)
    value: bytes = next(given, b"")
    return value if _ID.fullmatch(value) else uuid4().hex.encode()


class HttpMetrics:
    """Counts and times requests by route.

    Labels are route templates, never raw paths, and requests without a route are counted but not
    timed: scanners must not grow /metrics. A request whose client left before a status was sent
    counts as 499."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Iterable[tuple[str, str]]) -> None:
        """routes: (path template, method). POST routes and the scrape appear in /metrics from the
        start, the others after their first request."""
        self.app = app
        self.metrics = metrics
        self.routes = frozenset(routes)
        for path, method in sorted(self.routes):
            if method == "POST" or path == "/metrics":
                metrics.http_seconds.labels(path, method)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: bytes) -> None:
        handler = getattr(scope.get("route"), "path", scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        if (handler, method) in self.routes:
            self.metrics.http_seconds.labels(handler, method).observe(seconds)
        else:
            handler = "unmatched"
        self.metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        key = scope.get("state", {}).get("key", "-")
        text = request_id.decode()
        log.info("%s %s %d %.3fs %s %s", method, handler, status, seconds, key, text)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, request_id = 499, _request_id(scope)
        scope.setdefault("state", {})["id"] = request_id.decode()
        started = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self._record(scope, status, time.perf_counter() - started, request_id)
