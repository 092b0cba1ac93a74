"""Jails: processes that work on hostile input within limits on time and memory.

An alarm that kills bounds the time of a job, a limit of the operating system the memory. Jobs come on
stdin, results go to stdout, each as a frame of u32 length and bytes; the first frame is what all jobs
need. A jail runs a module that calls answer_jobs().
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, BinaryIO

MEMORY_BYTES = 512 << 20  # of address space beyond what the process starts with
LENGTH = struct.Struct("<I")


class Jail:
    """A jail and its process, which starts at the first job and again after a job that killed it.
    Any thread may call; jobs run one at a time."""

    def __init__(self, module: str, first: bytes) -> None:
        self._command = (sys.executable, "-P", "-m", module)
        self._first = first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # Ends the process; also runs when this object is collected.
        self._end: Callable[[], object] = lambda: None

    def run(self, job: bytes) -> bytes | None:
        """The result of a job, None if it exceeded its time or memory."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # killed between two jobs: not the fault of this job
            try:
                result = _exchange(*self._pipes(), job)
            except BrokenPipeError:
                result = None
            if result is None:
                self._stop()
            return result

    def close(self) -> None:
        """End the process. It also ends when this process does."""
        with self._lock:
            self._stop()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None:
            pipe = subprocess.PIPE
            process = self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe)
            self._end = weakref.finalize(self, _end, process)
            assert process.stdin is not None
            write_frame(process.stdin, self._first)
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def _stop(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _exchange(stdin: Any, stdout: Any, job: bytes) -> bytes | None:
    write_frame(stdin, job)
    return read_frame(stdout)


def write_frame(stream: Any, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (n,) = LENGTH.unpack(head)
    body = stream.read(n)
    return body if len(body) == n else None


def answer_jobs(prepare: Callable[[bytes], Callable[[bytes], bytes]], time_s: float) -> None:
    """The main function of a jail. prepare: makes the function that answers jobs from the first frame."""
    ignore_signals()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(stdin)
    if first is None:
        return
    answer = prepare(first)
    _limit_memory()
    while (job := read_frame(stdin)) is not None:
        signal.setitimer(signal.ITIMER_REAL, time_s)  # unhandled, so it ends the process
        result = answer(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(stdout, result)


def ignore_signals() -> None:
    """Ignore signals that terminals and service managers send to all processes: the front end decides
    when this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
