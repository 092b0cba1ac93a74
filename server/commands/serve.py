"""Running the server: engine, listening socket, signals, and an orderly end.

The modules that speak HTTP are imported once the engine has started: a model that cannot be used fails
before, and the engine loads meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from cflow.engine.base.errors import CflowError, EngineError
from cflow.engine.client.engine import Engine
from cflow.engine.client.local import LocalEngine
from cflow.server.commands.progress import say
from cflow.server.commands.startup import announce, wait_ready
from cflow.server.config import ServerConfig
from cflow.server.http.listen import listen
from cflow.server.http.tls import load_certificate, read_certificate

if TYPE_CHECKING:
    from cflow.server.http.auth import ApiKeys
    from cflow.server.http.server import HttpServer
    from cflow.server.http.service import Service

MOST_DESCRIPTORS = 1 << 16
RETRY_S = 0.5
PASSING = frozenset({"worker_died", "worker_stuck", "draining"})  # not the model's fault

log = logging.getLogger("cflow.server")


class Shutdown:
    """First signal: reject new requests, let running ones finish within the drain timeout.
    Second signal: stop at once."""

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


def _address(sock: socket.socket, tls: ssl.SSLContext | None) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reload_files(config: ServerConfig, keys: ApiKeys | None, tls: ssl.SSLContext | None) -> None:
    """Read keys and certificate again. An unusable file is logged and changes nothing."""
    try:
        if keys is not None:
            keys.reload()
        if tls is not None and config.tls_cert is not None:
            load_certificate(tls, config.tls_cert, config.tls_key)
    except CflowError as error:
        log.error("%s; the previous contents stay in use", error)


async def _serve(config: ServerConfig) -> None:
    tls = read_certificate(config.tls_cert, config.tls_key)
    with ExitStack() as opened:
        sockets = [opened.enter_context(sock) for sock in listen(config.host, config.port)]
        engine = await LocalEngine.start(config.engine)
        try:
            await _serve_engine(config, engine, sockets, tls)
        finally:
            await engine.close()


async def _serve_engine(
    config: ServerConfig, engine: Engine, sockets: list[socket.socket], tls: ssl.SSLContext | None
) -> None:
    from cflow.server.http.app import create_app
    from cflow.server.http.server import http_server

    app = create_app(config, engine)
    service: Service = app.state.service
    server = http_server(app, config, tls)
    shutdown = Shutdown(server, engine, config.drain_timeout_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.on_signal)
    if config.api_keys or tls:
        loop.add_signal_handler(signal.SIGHUP, reload_files, config, service.keys, tls)
    loading = asyncio.create_task(_load(engine, server, _address(sockets[0], tls)))
    try:
        await server.serve(sockets=sockets)
    finally:
        loading.cancel()
        shutdown.cancel()
        if service.tracing is not None:
            service.tracing.close()
    with suppress(asyncio.CancelledError):
        await loading


async def _load(engine: Engine, server: HttpServer, address: str) -> None:
    """Announce the model once it is loaded. A model that cannot load ends the server."""
    say(f"listening at {address}, loading {engine.card.name}")
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
    """Raise the soft limit on descriptors to the hard one, or to MOST_DESCRIPTORS if that is less.

    With the usual 1,024, fewer connections fit than requests may wait, and the kernel closes the rest
    without an answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(config: ServerConfig) -> None:
    """Serve until a signal. config.engine.model: a .cflow or .vflow file."""
    import uvloop

    _allow_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))
