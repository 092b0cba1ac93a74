"""The folder for files that can be made again: $XDG_CACHE_HOME/cflow, else ~/.cache/cflow."""

from __future__ import annotations

import os
from pathlib import Path

from cflow.engine.base.errors import ModelError


def cache_folder() -> Path:
    """The folder, created if it is missing. ModelError if it cannot be created."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cflow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache folder {folder} ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    return folder
