"""Speed of random reads from a model file."""

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
    """Bytes a second of direct reads of whole records in random order, with n_reads in flight, into
    memory like that of an expert cache. Stops after 2 GiB or 3 s. Reads through the page cache if
    the file system has no direct reads."""
    places = list(bank.offsets)
    random.shuffle(places)  # a new order each time: storage below may cache reads
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
    """Slots for records, more than the processor's caches hold, all touched before timing starts.
    Huge pages, because the kernel splits a disk request at every physical discontinuity: with small
    pages reads take up to three times as long."""
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
    """Read records of a shared queue into slots until `deadline`; returns the bytes read."""
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
