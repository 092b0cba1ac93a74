"""A disk that misbehaves: bad_disk.c, preloaded, alters what a process reads of one file with pread."""

from __future__ import annotations

import ctypes
import errno
import mmap
import subprocess
import time
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class Kind(IntEnum):
    WELL = 0
    FAILS = 1
    IS_CUT = 2
    ALTERS = 3
    WAITS = 4
    HANGS = 5


class _Moods(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("device", "inode", "begin", "end")),
        *((name, ctypes.c_int64) for name in ("times", "n_struck", "n_hanging")),
        *((name, ctypes.c_int32) for name in ("kind", "value")),
        *((name, ctypes.c_int32) for name in ("interrupted", "short", "delayed", "delay_ms")),
    )


class BadDisk:
    """Healthy at first. environment: for the processes that are to be affected."""

    def __init__(self, file: Path, folder: Path) -> None:
        library, moods = folder / "bad_disk.so", folder / "moods"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        moods.write_bytes(bytes(ctypes.sizeof(_Moods)))
        with moods.open("r+b") as shared:
            self._moods = _Moods.from_buffer(mmap.mmap(shared.fileno(), 0))
        status = file.stat()
        self._moods.device, self._moods.inode = status.st_dev, status.st_ino
        self.environment = {"LD_PRELOAD": str(library), "BAD_DISK": str(moods)}

    def strike(
        self,
        kind: Kind,
        *,
        times: int = -1,
        begin: int = 0,
        end: int = 1 << 62,
        error: int = errno.EIO,
        wait_ms: int = 0,
    ) -> None:
        """Strikes the next `times` reads that start in begin..end (-1: all) until heal()."""
        self.heal()
        moods = self._moods
        moods.n_struck, moods.times, moods.begin, moods.end = 0, times, begin, end
        moods.value = wait_ms if kind == Kind.WAITS else error
        moods.kind = kind

    def disturb(
        self, *, interrupted: int = 0, short: int = 0, delayed: int = 0, delay_ms: int = 0
    ) -> None:
        """Disturbs a random share of all reads; interrupted, short and delayed are in percent."""
        moods = self._moods
        moods.n_struck, moods.interrupted, moods.short = 0, interrupted, short
        moods.delay_ms, moods.delayed = delay_ms, delayed

    def heal(self) -> None:
        """Stops striking; reads that hang go on."""
        self._moods.kind = Kind.WELL
        while self.n_hanging:
            time.sleep(0.002)

    @property
    def n_struck(self) -> int:
        return int(self._moods.n_struck)

    @property
    def n_hanging(self) -> int:
        return int(self._moods.n_hanging)
