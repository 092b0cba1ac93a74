"""The worker's end of the socket: a listening thread, and sends under a lock."""

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
    """Collects messages in an inbox for the main thread. The listening thread also sends the
    heartbeat, passes each Cancel to on_cancel at once, and ends the process when the front end is
    gone."""

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
        """Put an item into the inbox, from any thread."""
        with self._has_mail:
            self._inbox.append(item)
            self._has_mail.notify()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """All items of the inbox. Waits up to timeout_s for the first one; None: without limit."""
        if not self._inbox and timeout_s == 0:
            return []
        with self._has_mail:
            self._has_mail.wait_for(lambda: self._inbox, timeout_s)
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def _listen(self) -> None:
        splitter = FrameSplitter()
        readable = select.poll()  # select() fails for descriptors above 1023, and ours is inherited
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
    """End at once, even during a step: the front end is gone."""
    os._exit(0)
