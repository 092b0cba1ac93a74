"""How fast the disk under a model gives its experts."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cflow.engine.experts import ExpertBank

MAX_BYTES = 1 << 29
MAX_S = 3.0


def probe_disk(path: Path, bank: ExpertBank, n_reads: int) -> float:
    """Bytes a second of direct reads of whole records in random order, n_reads in flight; through the
    page cache where the file system has no direct reads. For 512 MiB or 3 s."""
    start = path.stat().st_size - bank.n_bytes
    places = [start + offset for offset in bank.offsets]
    random.Random(0).shuffle(places)
    todo = deque(places[: max(n_reads, MAX_BYTES // bank.record_bytes)])
    fd = _open(path)
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(n_reads) as pool:
            readers = [
                pool.submit(_read, fd, todo, bank.record_bytes, began + MAX_S)
                for _ in range(n_reads)
            ]
            n_bytes = sum(reader.result() for reader in readers)
        return n_bytes / (time.perf_counter() - began)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def _read(fd: int, todo: deque[int], record_bytes: int, deadline: float) -> int:
    """Reads what the others leave, one record at a time: how many bytes came."""
    n_bytes = 0
    with mmap.mmap(-1, record_bytes) as buffer:
        while time.perf_counter() < deadline:
            try:
                place = todo.popleft()
            except IndexError:
                break
            n_bytes += os.preadv(fd, [buffer], place)
    return n_bytes
