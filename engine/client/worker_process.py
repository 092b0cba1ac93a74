"""The front end's end of the socket pair, and the process behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import cast

from cflow.engine.base.messages import Down, FrameSplitter, Up, decode_up, encode_frame

COMMAND = (sys.executable, "-P", "-m", "cflow.engine.worker")
Receive = Callable[[Up], None]


class WorkerProcess(asyncio.Protocol):
    """A running worker. Its messages go to `receive`; `ended` is set once it has closed its end,
    which death of any kind does at once."""

    def __init__(self, receive: Receive) -> None:
        self.ended = asyncio.Event()
        self._receive = receive
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def spawn(cls, command: Sequence[str], receive: Receive) -> WorkerProcess:
        """command: takes the number of its socket as last argument. OSError if there is no process
        to be had."""
        ours, theirs = socket.socketpair()
        self = cls(receive)
        try:
            with theirs:
                fd = theirs.fileno()
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    str(fd),
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: Down) -> None:
        """Lost if the worker is gone; `ended` tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self, grace_s: float) -> int:
        """Hangs up, waits, kills after grace_s: the exit status, negative for a signal."""
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
            self.kill()  # also when nobody waits any more

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio.Transport by inheritance.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            self._receive(decode_up(body))

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()
