"""A disk that misbehaves: what a process reads of one file with pread, as bad_disk.c does it."""

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
    """Well when made. environment: of the processes that get to feel it."""

    def __init__(self, file: Path, folder: Path) -> None:
        library, moods = folder / "bad_disk.so", folder / "moods"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"]
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
        """So many reads that start in begin..end, -1: all of them, until heal()."""
        self.heal()
        moods = self._moods
        moods.n_struck, moods.times, moods.begin, moods.end = 0, times, begin, end
        moods.value = wait_ms if kind == Kind.WAITS else error
        moods.kind = kind

    def disturb(
        self, *, interrupted: int = 0, short: int = 0, delayed: int = 0, delay_ms: int = 0
    ) -> None:
        """So many percent of all reads, each as it comes."""
        moods = self._moods
        moods.n_struck, moods.interrupted, moods.short = 0, interrupted, short
        moods.delay_ms, moods.delayed = delay_ms, delayed

    def heal(self) -> None:
        """No mood, and whoever hangs goes on."""
        self._moods.kind = Kind.WELL
        while self.n_hanging:
            time.sleep(0.002)

    @property
    def n_struck(self) -> int:
        return int(self._moods.n_struck)

    @property
    def n_hanging(self) -> int:
        return int(self._moods.n_hanging)
