"""llama.cpp's source package from pip, unpacked and not compiled: real templates and vocabularies."""

import fcntl
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from cflow.engine.base.cache_folder import cache_folder

PACKAGE = "llama-cpp-python==0.3.36"
KEPT = ("models/", "convert_hf_to_gguf.py", "conversion/", "gguf-py/")  # of vendor/llama.cpp
PIP = [
    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"),
    *("--disable-pip-version-check", "--no-binary=:all:", "--no-build-isolation"),
]


@cache
def source() -> Path:
    """The folder of llama.cpp, fetched once by one process for all; skips the test where it cannot
    be had."""
    folder = cache_folder() / PACKAGE
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                _fetch(Path(scratch)).rename(folder)
    return folder


def templates() -> list[Path]:
    return sorted((source() / "models/templates").glob("*.jinja"))


def _fetch(scratch: Path) -> Path:
    done = subprocess.run([*PIP, "--dest", str(scratch), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be had: {done.stderr[-500:]}")
    (archive,) = scratch.glob("*.tar.gz")
    root = archive.name.removesuffix(".tar.gz") + "/vendor/llama.cpp/"
    with tarfile.open(archive) as tar:
        tar.extractall(
            scratch,
            [m for m in tar if m.name.startswith(tuple(root + kept for kept in KEPT))],
            filter="data",
        )
    return scratch / root
