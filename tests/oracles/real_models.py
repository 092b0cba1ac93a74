"""Real checkpoints of the catalogue, with the GGUF file they were converted from."""

import fcntl
from pathlib import Path
from typing import NamedTuple

import pytest

from cflow.engine.base.cache_folder import cache_folder
from cflow.engine.base.errors import ModelError
from cflow.engine.files import catalogue, hub


class RealModel(NamedTuple):
    name: str
    gguf: Path
    cflow: Path

    @staticmethod
    def fetch(name: str) -> "RealModel":
        """From the cache, or downloaded into it, by one process for all; skips the test where it
        cannot be had."""
        entry = catalogue.entries()[name]
        gguf = cache_folder() / f"{name}-{entry.sha256[:12]}.gguf"
        with open(gguf.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not gguf.exists():
                part = gguf.with_suffix(".part")
                part.unlink(missing_ok=True)
                try:
                    catalogue.fetch(entry, part, lambda _what, _done, _total: None)
                except ModelError as error:
                    pytest.skip(str(error))
                part.rename(gguf)
        return RealModel(name, gguf, hub.resolve(str(gguf)))
