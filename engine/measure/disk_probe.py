"""How fast the disk under a model gives its experts."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from cflow.engine.memory.experts import ExpertBank

MAX_BYTES = 1 << 31
MAX_S = 3.0
MEMORY_BYTES = 256 << 20
HUGE_PAGE = 2 << 20


def probe_disk(path: Path, bank: ExpertBank, n_reads: int) -> float:
    """Bytes a second of direct reads of whole records in random order, n_reads in flight, into memory
    like that of an expert cache; through the page cache where the file system has no direct reads.
    For 2 GiB or 3 s."""
    places = list(bank.offsets)
    random.shuffle(places)  # others each time: what lies below the disk may have a cache
    places = places[: max(n_reads, MAX_BYTES // bank.record_bytes)]
    fd = _open(path)
    try:
        with ThreadPoolExecutor(n_reads) as pool, _memory(n_reads, bank.record_bytes) as memory:
            slots = cycle(range(0, len(memory), _slot_bytes(bank.record_bytes)))
            todo = deque(zip(places, slots, strict=False))
            began = time.perf_counter()
            readers = [
                pool.submit(_read, fd, todo, memory, bank.record_bytes, began + MAX_S)
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


def _slot_bytes(record_bytes: int) -> int:
    return -(-record_bytes // HUGE_PAGE) * HUGE_PAGE


def _memory(n_reads: int, record_bytes: int) -> mmap.mmap:
    """Slots for records, more than the processor's caches hold, and all there before the clock runs.
    In huge pages: in small ones a request to the disk ends where the next page lies elsewhere, and
    reads take up to three times as long."""
    slot = _slot_bytes(record_bytes)
    n_slots = max(n_reads, MEMORY_BYTES // slot)
    memory = mmap.mmap(-1, n_slots * slot, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
    return memory


def _read(
    fd: int, todo: deque[tuple[int, int]], memory: mmap.mmap, record_bytes: int, deadline: float
) -> int:
    """Reads records that the others leave, from their places into their slots: how many bytes came."""
    n_bytes = 0
    with memoryview(memory) as whole:
        while time.perf_counter() < deadline:
            try:
                place, slot = todo.popleft()
            except IndexError:
                break
            with whole[slot : slot + record_bytes] as out:
                n_bytes += os.preadv(fd, [out], place)
    return n_bytes
