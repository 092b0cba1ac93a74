"""The ASGI application: its routes and middlewares, and the service they share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from cflow.engine.base.errors import CflowError
from cflow.engine.client.engine import Engine
from cflow.server.api.stored import ResponseStore
from cflow.server.config import ServerConfig
from cflow.server.http.auth import ApiKeys, Authentication
from cflow.server.http.errors import install_error_handlers
from cflow.server.http.http_metrics import HttpMetrics
from cflow.server.http.linger import Linger
from cflow.server.http.openapi import describe
from cflow.server.http.routes import (
    chat,
    completions,
    embeddings,
    health,
    messages,
    models,
    page,
    responses,
    tokens,
)
from cflow.server.http.service import Service
from cflow.server.http.sub_path import SubPath
from cflow.server.metrics import Metrics
from cflow.server.version import version

if TYPE_CHECKING:
    from cflow.server.http.tracing import Tracing

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    embeddings.router,
    models.router,
    tokens.router,
    health.router,
    page.router,
)


# Standard variables that name a collector. The exporter reads the other OTEL_* itself.
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _check_experts(config: ServerConfig, top_k: int) -> None:
    if config.moe_top_k is not None and config.moe_top_k > top_k:
        has = f"this model uses {top_k}" if top_k else "this model has no experts"
        raise CflowError(f"moe_top_k = {config.moe_top_k}: {has}")


def _start_tracing(config: ServerConfig) -> Tracing | None:
    endpoint = config.otlp_traces_endpoint
    if endpoint is None and not any(os.environ.get(name) for name in OTLP_ENDPOINTS):
        return None
    try:
        from cflow.server.http.tracing import Tracing
    except ModuleNotFoundError as error:
        raise CflowError(
            f"otlp_traces_endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) needs {error.name}, which comes "
            "with: pip install 'cflow[otel]'"
        ) from None
    return Tracing(endpoint, version())


def create_app(config: ServerConfig, engine: Engine) -> FastAPI:
    """The application over a started engine; all its state is app.state.service.

    Raises CflowError if the configuration does not fit the model or names unusable files."""
    _check_experts(config, engine.card.top_k)
    app = FastAPI(title="cflow", redirect_slashes=False, docs_url=None, redoc_url=None)
    metrics = Metrics(engine)
    tracing = _start_tracing(config)
    keys = ApiKeys(config.api_keys) if config.api_keys is not None else None
    store = ResponseStore(config.response_memory, config.response_age_s)
    app.state.service = Service(config, engine, metrics, tracing, keys, store)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    describe(app)
    # The middleware added last is the outermost.
    if tracing is not None:
        tracing.watch(app)
    if keys is not None:
        app.add_middleware(Authentication, keys=keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(
                "Retry-After",
                "x-request-id",
                "x-should-retry",
                "x-cflow-ignored-params",
            ),
        )
    app.add_middleware(SubPath, root_path=config.root_path, trusted=config.trusted_proxies)
    app.add_middleware(Linger, is_draining=lambda: engine.status.state == "draining")
    routes = [
        (route.path, method)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    ]
    app.add_middleware(HttpMetrics, metrics=metrics, routes=routes)
    return app
