"""ASGI middleware: one count and one time per HTTP request, and a line in the access log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cflow.server.metrics import Metrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
log = logging.getLogger("cflow.access")


class HttpMetrics:
    """Labels are route templates, never raw paths: scanners must not grow /metrics.

    A request that ends before a status was sent counts as 499: its client left.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, templates: Iterable[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.templates = frozenset(templates)

    def _handler(self, scope: Scope) -> str:
        path = getattr(scope.get("route"), "path", scope["path"])
        return path if path in self.templates else "unmatched"

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        handler = self._handler(scope)
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self.metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self.metrics.http_seconds.labels(handler, method).observe(seconds)
        key = scope.get("state", {}).get("key", "-")
        log.info("%s %s %d %.3fs %s", method, handler, status, seconds, key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499
        started = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self._record(scope, status, time.perf_counter() - started)
