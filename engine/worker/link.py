"""The worker's end of the socket pair: a thread that listens, a lock around sending."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cflow.engine.base.messages import (
    Cancel,
    Down,
    FrameSplitter,
    Heartbeat,
    Up,
    decode_down,
    encode_frame,
)

HEARTBEAT_S = 0.5
READ_BYTES = 1 << 16


class Link:
    """Messages for the main thread wait in an inbox. The listening thread also sends the heartbeat,
    hands each Cancel to on_cancel at once, and ends the process when the front end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._inbox: deque[Any] = deque()
        self._has_mail = threading.Condition()
        self.heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(0, False)
        self.on_cancel: Callable[[int], None] = lambda request_id: None
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    def send(self, message: Up) -> None:
        frame = encode_frame(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            _end_process()

    def post(self, item: Any) -> None:
        """Puts something into the inbox, from any thread of this process."""
        with self._has_mail:
            self._inbox.append(item)
            self._has_mail.notify()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Everything in the inbox: Down, and what was posted; waits for it so long (None: for ever;
        0: not)."""
        if not self._inbox and timeout_s == 0:
            return []
        with self._has_mail:
            self._has_mail.wait_for(lambda: self._inbox, timeout_s)
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def _listen(self) -> None:
        splitter = FrameSplitter()
        readable = select.poll()  # select() takes no descriptor above 1023, and ours is inherited
        readable.register(self._socket, select.POLLIN)
        next_beat = time.monotonic()
        while True:
            if time.monotonic() >= next_beat:
                self.send(self.heartbeat())
                next_beat = time.monotonic() + HEARTBEAT_S
            wait_s = max(next_beat - time.monotonic(), 0)
            if not readable.poll(1000 * wait_s):
                continue
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                _end_process()
            for body in splitter.feed(data):
                self._deliver(decode_down(body))

    def _deliver(self, message: Down) -> None:
        self.post(message)
        if isinstance(message, Cancel):
            self.on_cancel(message.request_id)


def _end_process() -> None:
    """Nobody is left to answer to; whatever step runs is cut off."""
    os._exit(0)
