"""GET /, the page and its files, and GET /status, which the page shows."""

from __future__ import annotations

from importlib import resources
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from cflow.server.api.prompts import context_of
from cflow.server.api.wire import encode
from cflow.server.http.auth import is_open
from cflow.server.http.routes.health import state_of
from cflow.server.http.service import Service, service_of
from cflow.server.version import version

router = APIRouter()

TYPES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _file(name: str, media_type: str) -> Response:
    text = (resources.files("cflow.server.http") / "web" / name).read_bytes()
    return Response(text, media_type=media_type, headers=HEADERS)


@router.get("/")
async def show_root(request: Request) -> Response:
    """The page if the client accepts HTML, else a JSON object that lists the routes."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html", "text/html")
    paths = request.app.openapi()["paths"]
    body = {
        "name": "cflow",
        "version": version(),
        "model": service_of(request).engine.card.name,
        "api": [path for path in paths if not is_open(path)],
        "openapi": request.scope.get("root_path", "") + "/openapi.json",
    }
    return Response(encode(body), media_type="application/json", headers={"Vary": "Accept"})


@router.get("/web/{name}", include_in_schema=False)
async def show_file(name: str) -> Response:
    if name not in TYPES:
        raise HTTPException(404)
    return _file(name, TYPES[name])


def status(service: Service) -> dict[str, Any]:
    engine, card = service.engine, service.engine.card
    ready = engine.status.ready
    return {
        "version": version(),
        "state": state_of(engine.status),
        "model": {
            "name": card.name,
            "parameters": card.n_params,
            "context": context_of(engine),
            "layers": card.n_layers,
            "experts": card.n_experts,
            "top_k": card.top_k,
            "bytes_per_token": card.bytes_per_token,
            "chat": card.template is not None,
        },
        "machine": ready
        and {
            "isa": ready.isa,
            "threads": ready.n_threads,
            "threads_reason": ready.threads_reason,
            "notes": ready.notes,
        },
    }


@router.get("/status")
async def show_status(request: Request) -> Response:
    """Facts about the model and the machine; `machine` is null until the model is loaded."""
    return Response(encode(status(service_of(request))), media_type="application/json")
