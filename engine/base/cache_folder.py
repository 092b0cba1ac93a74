"""The folder for files that can be made again: $XDG_CACHE_HOME/cflow, else ~/.cache/cflow."""

from __future__ import annotations

import os
from pathlib import Path

from cflow.engine.base.errors import ModelError


def cache_folder() -> Path:
    """The folder, created if it is missing. ModelError if it cannot be created."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "cflow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache folder {folder} ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    return folder


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # no HOME, and the user is in no passwd file
        raise ModelError(
            "this user has no home folder, so there is no place for converted models; set HOME, or "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
