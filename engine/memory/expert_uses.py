"""How often each expert was used, kept in a file across restarts, so that a cache can start warm.

The file's name is a hash of the model's header, which has checksums of all its parts. The file may
be deleted at any time. Little-endian: magic, u32 count, u64 per record, CRC-32C of all before it.
Any other content is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cflow.engine.native import crc32c, sizeof

MAGIC = b"cflowuse"
_HEAD = struct.Struct("<8sI")
_CRC = struct.Struct("<I")

Uses = NDArray[np.uint64]  # (n_records,)

log = logging.getLogger("cflow.worker")


def uses_path(model: Path, folder: Path) -> Path:
    """The path of the uses of a model file."""
    with model.open("rb") as file:
        header = file.read(sizeof("cflow_header"))
    return folder / f"experts-{hashlib.blake2b(header, digest_size=16).hexdigest()}.uses"


def read_uses(path: Path, n_records: int) -> Uses | None:
    """The uses in a file; None if there is none or, with a log line, if it is invalid."""
    n_bytes = _HEAD.size + 8 * n_records + _CRC.size
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would block
            log.warning("the expert cache starts cold: %s is not a regular file", path)
            return None
        with path.open("rb") as file:
            data = file.read(n_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the expert cache starts cold: cannot read %s: %s", path, error.strerror)
        return None
    if len(data) != n_bytes or data[: _HEAD.size] != _HEAD.pack(MAGIC, n_records):
        log.warning("the expert cache starts cold: %s belongs to another model", path)
        return None
    if _CRC.pack(crc32c(data[: -_CRC.size])) != data[-_CRC.size :]:
        log.warning("the expert cache starts cold: %s is damaged", path)
        return None
    return np.frombuffer(data, "<u8", n_records, _HEAD.size).astype(np.uint64)


def write_uses(path: Path, uses: Uses) -> None:
    """Write the file as a whole or not at all. OSError."""
    data = _HEAD.pack(MAGIC, len(uses)) + uses.astype("<u8").tobytes()
    fd, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with open(fd, "wb") as file:
            file.write(data + _CRC.pack(crc32c(data)))
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
