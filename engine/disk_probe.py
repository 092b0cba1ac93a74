"""How fast the disk under a model gives its experts."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cflow.engine.experts import ExpertBank

MAX_BYTES = 1 << 31
MAX_S = 3.0
HUGE_PAGE = 2 << 20


def probe_disk(path: Path, bank: ExpertBank, n_reads: int) -> float:
    """Bytes a second of direct reads of whole records in random order, n_reads in flight; through the
    page cache where the file system has no direct reads. For 2 GiB or 3 s."""
    start = path.stat().st_size - bank.n_bytes
    places = [start + offset for offset in bank.offsets]
    random.shuffle(places)  # others each time: what lies below the disk may have a cache
    todo = deque(places[: max(n_reads, MAX_BYTES // bank.record_bytes)])
    fd = _open(path)
    try:
        with ThreadPoolExecutor(n_reads) as pool, _memory(n_reads, bank.record_bytes) as memory:
            began = time.perf_counter()
            slots = range(0, len(memory), len(memory) // n_reads)
            readers = [
                pool.submit(_read, fd, todo, memory, slot, bank.record_bytes, began + MAX_S)
                for slot in slots
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


def _memory(n: int, n_bytes: int) -> mmap.mmap:
    """n slots for so many bytes, in huge pages like an expert cache: in small ones a request to the
    disk ends where the next page lies elsewhere, and reads take up to three times as long."""
    slot = -(-n_bytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, n * slot, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(
        len(memory) // mmap.PAGESIZE
    )  # all there before the clock runs
    return memory


def _read(
    fd: int, todo: deque[int], memory: mmap.mmap, slot: int, record_bytes: int, deadline: float
) -> int:
    """Reads what the others leave into memory from `slot`, one record at a time: how many bytes."""
    n_bytes = 0
    with memoryview(memory)[slot : slot + record_bytes] as out:
        while time.perf_counter() < deadline:
            try:
                place = todo.popleft()
            except IndexError:
                break
            n_bytes += os.preadv(fd, [out], place)
    return n_bytes
