"""A worker process, and the front end's end of its socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import cast

from cflow.engine.base.messages import Down, FrameSplitter, Up, decode_up, encode_frame

COMMAND = (sys.executable, "-P", "-m", "cflow.engine.worker")
Receive = Callable[[Up], None]


class WorkerProcess(asyncio.Protocol):
    """A running worker.

    Its messages are passed to `receive`. `ended` is set when its end of the socket is closed, which
    happens at once however the process ends.
    """

    def __init__(self, receive: Receive) -> None:
        self.ended = asyncio.Event()
        self._receive = receive
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def spawn(cls, command: Sequence[str], receive: Receive) -> WorkerProcess:
        """Start a worker. command: its socket's descriptor is added as the last argument.

        Raises OSError if the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        self = cls(receive)
        with theirs:
            fd = theirs.fileno()
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    str(fd),
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )
            try:
                self._process = await asyncio.shield(starting)
                await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            except BaseException:
                ours.close()
                if not starting.done() or starting.exception() is None:  # no process is left behind
                    process = await starting
                    process.kill()
                    await process.wait()
                raise
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: Down) -> None:
        """Send a message. It is lost if the worker has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self, grace_s: float) -> int:
        """Close the socket, wait for the process to end, and kill it after grace_s seconds.

        Returns its exit status, negative for a signal.
        """
        assert self._process is not None
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(grace_s):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()
        finally:
            self.kill()  # if this task was cancelled

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            self._receive(decode_up(body))

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()


def describe_exit(status: int) -> str:
    """An exit status of a process in words, as "exit status 3" or "SIGSEGV"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # real-time signals have no name
        return f"signal {-status}"
