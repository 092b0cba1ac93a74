"""Running the server: engine, listening socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn
import uvloop
from fastapi import FastAPI

from cflow.engine.base.errors import CflowError, EngineError
from cflow.engine.client.engine import Engine
from cflow.engine.client.local import LocalEngine
from cflow.server.commands.progress import announce, console, wait_ready
from cflow.server.config import ServerConfig
from cflow.server.http.app import create_app
from cflow.server.http.auth import ApiKeys
from cflow.server.http.protocol import Protocol
from cflow.server.http.service import Service
from cflow.server.http.tls import load_certificate, read_certificate

CLOSE_S = 5  # what connections get to end once all answers are over
BACKLOG = 2048
MOST_DESCRIPTORS = 1 << 16
RETRY_S = 0.5
PASSING = frozenset({"worker_died", "worker_stuck", "draining"})  # not the model's fault
KEEP_ALIVE_S = 75  # longer than the 60 s idle limit of common proxies, which must close first

log = logging.getLogger("cflow.server")


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to us."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(app: FastAPI, tls: ssl.SSLContext | None = None) -> HttpServer:
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
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
    )


class Shutdown:
    """First signal: refuse new requests, let running ones finish within the drain timeout.
    Second: stop at once."""

    def __init__(self, server: HttpServer, engine: Engine, timeout_s: float) -> None:
        self._server = server
        self._engine = engine
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        if self._task is None:
            log.info("shutting down: running requests have %g s to finish", self._timeout_s)
            self._task = asyncio.create_task(self._drain())
        else:
            log.info("shutting down at once")
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        try:
            await self._engine.drain(self._timeout_s)
        finally:
            self._server.should_exit = True

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise CflowError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}"
        ) from None


def _address(sock: socket.socket, tls: ssl.SSLContext | None) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reload_files(config: ServerConfig, keys: ApiKeys | None, tls: ssl.SSLContext | None) -> None:
    """Reads the files of secrets again; one that is of no use changes nothing."""
    try:
        if keys is not None:
            keys.reload()
        if tls is not None and config.tls_cert is not None:
            load_certificate(tls, config.tls_cert, config.tls_key)
    except CflowError as error:
        log.error("%s; what was read before stays in use", error)


async def _serve(config: ServerConfig) -> None:
    with listen(config.host, config.port) as sock:
        engine = await LocalEngine.start(config.engine)
        try:
            await _serve_engine(config, engine, sock)
        finally:
            await engine.close()


async def _serve_engine(config: ServerConfig, engine: Engine, sock: socket.socket) -> None:
    app = create_app(config, engine)
    service: Service = app.state.service
    tls = read_certificate(config.tls_cert, config.tls_key)
    server = http_server(app, tls)
    shutdown = Shutdown(server, engine, config.drain_timeout_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.on_signal)
    if config.api_keys or tls:
        loop.add_signal_handler(signal.SIGHUP, reload_files, config, service.keys, tls)
    loading = asyncio.create_task(_load(engine, server, _address(sock, tls)))
    try:
        await server.serve(sockets=[sock])
    finally:
        loading.cancel()
        shutdown.cancel()
        if service.tracing is not None:
            service.tracing.close()
    with suppress(asyncio.CancelledError):
        await loading


async def _load(engine: Engine, server: HttpServer, address: str) -> None:
    """Announces the model once it is loaded. One that never will be ends the server."""
    console.print(f"cflow: listening at {address}, loading {engine.card.name}", markup=False)
    while True:
        try:
            announce(engine, await wait_ready(engine), address)
            return
        except EngineError as error:
            if error.code not in PASSING:
                server.should_exit = True
                raise
            await asyncio.sleep(RETRY_S)


def _allow_connections() -> None:
    """The usual limit of 1,024 descriptors is less than may wait, and a connection beyond it is closed
    without an answer; what is set as hard limit may be taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(config: ServerConfig) -> None:
    """Serves until a signal. config.engine.model: a .cflow file."""
    _allow_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))
