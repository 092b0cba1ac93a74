"""Work on hostile input, in a process of its own with bounds that no input can get around.

Time is bounded by an alarm that kills, memory by a limit of the operating system. Jobs come on
stdin, results go to stdout, each a frame of u32 length and bytes; the first frame is what all jobs
need. Such a process is a module whose main() calls answer_jobs().
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, BinaryIO

MEMORY_BYTES = 512 << 20  # of address space beyond what the process starts with
LENGTH = struct.Struct("<I")


class Jail:
    """The process, started at the first use and again after a job has cost it its life. Any thread
    may call; one job at a time gets through."""

    def __init__(self, module: str, first: bytes, files: Sequence[int] = ()) -> None:
        """files: descriptors that the process has too, under the same numbers."""
        self._files = files
        self._command = (sys.executable, "-P", "-m", module)
        self._first = first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process, also with this object

    def run(self, job: bytes) -> bytes | None:
        """The result; None: the job took more than its time or memory."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # somebody killed it between two jobs; this one is not to blame
            try:
                result = _exchange(*self._pipes(), job)
            except BrokenPipeError:
                result = None
            if result is None:
                self._stop()
            return result

    def close(self) -> None:
        """Ends the process; it would end by itself when ours does."""
        with self._lock:
            self._stop()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None:
            pipe = subprocess.PIPE
            process = self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, pass_fds=self._files
            )
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
    """None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (n,) = LENGTH.unpack(head)
    body = stream.read(n)
    return body if len(body) == n else None


def answer_jobs(prepare: Callable[[bytes], Callable[[bytes], bytes]], time_s: float) -> None:
    """The process's whole life. prepare: from the first frame to what answers each job."""
    ignore_signals()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(stdin)
    if first is None:
        return
    answer = prepare(first)
    _limit_memory()
    while (job := read_frame(stdin)) is not None:
        signal.setitimer(signal.ITIMER_REAL, time_s)  # nobody handles it: the process ends
        result = answer(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(stdout, result)


def ignore_signals() -> None:
    """Terminals and service managers signal all processes; when to end is the front end's to say."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
