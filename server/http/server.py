"""uvicorn as cflow runs it."""

from __future__ import annotations

import math
import ssl
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from cflow.server.config import ServerConfig
from cflow.server.http.protocol import Protocol

CLOSE_S = 5  # for connections to close once all answers have ended


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `commands.serve` installs its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(
    app: FastAPI, config: ServerConfig, tls: ssl.SSLContext | None = None
) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(config.keep_alive_s),
            timeout_graceful_shutdown=CLOSE_S,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
    )
