"""Reading files by offset, never mapped: a file that shrinks is an error, not a signal."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Self

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.magic import LOOK_BYTES, refuse_stand_in


class InputFile:
    """An open file of a known size. ModelError for an empty file, a Git LFS pointer, an HTML page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelError(f"cannot open {path}: {error.strerror}") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ModelError(f"cannot open {path}: it is not a regular file")
        self.n_bytes = status.st_size
        try:
            refuse_stand_in(path, self.read(0, min(self.n_bytes, LOOK_BYTES)))
        except ModelError:
            self.close()
            raise

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Exactly n_bytes from offset. Raises ModelError if the file ends before."""
        parts = []
        while n_bytes > 0:
            try:
                part = os.pread(self._fd, n_bytes, offset)
            except OSError as error:
                raise ModelError(f"cannot read {self.path}: {error.strerror}") from error
            if not part:
                raise ModelError(f"{self.path} ended at byte {offset:,} while it was read")
            parts.append(part)
            offset += len(part)
            n_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
