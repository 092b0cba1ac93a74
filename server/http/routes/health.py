"""Routes without a key: /live, /health, /ready, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from cflow.engine.client.engine import Status
from cflow.server.api.wire import encode
from cflow.server.http.service import Service, service_of
from cflow.server.version import version

router = APIRouter()

SERVING = ("ready", "draining")


def state_of(status: Status) -> str:
    """The engine's state, or `failing` if it serves but its disk fails every request."""
    return "failing" if status.is_failing and status.state in SERVING else status.state


def _state(service: Service, serving: tuple[str, ...]) -> Response:
    """200 if the engine is in one of the `serving` states, else 503; the body names the state."""
    status = service.engine.status
    state = state_of(status)
    is_serving = state in serving
    body: dict[str, Any] = {"status": "ok" if is_serving else state}
    if status.loading is not None and status.state in ("loading", "restarting"):
        body |= {"done_bytes": status.loading.done_bytes, "total_bytes": status.loading.total_bytes}
    if status.ready is not None and is_serving:
        body |= {"isa": status.ready.isa, "threads": status.ready.n_threads}
    return Response(
        encode(body), status_code=200 if is_serving else 503, media_type="application/json"
    )


@router.head("/live", include_in_schema=False)
@router.get("/live")
async def live() -> Response:
    """200 while the front end runs, whatever the state of the engine."""
    return Response(encode({"status": "ok"}), media_type="application/json")


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """503 while the engine loads, is dead or stuck, or fails every request because of its disk."""
    return _state(service_of(request), SERVING)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Like /health, but 503 while draining: whether to send requests here."""
    return _state(service_of(request), ("ready",))


@router.get("/version")
async def show_version() -> Response:
    return Response(encode({"version": version()}), media_type="application/json")


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(request: Request) -> Response:
    """Prometheus text format 0.0.4."""
    text = service_of(request).metrics.exposition()
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
