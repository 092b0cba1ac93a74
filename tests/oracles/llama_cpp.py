"""llama.cpp's source package from pip: real templates and vocabularies, and its tokenizer."""

import fcntl
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
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


# What its tokenizer is compiled from; the other files need a model.
BUILT = ("include/", "src/", "ggml/include/", "ggml/src/")
C = [f"ggml/src/{name}.c" for name in ("ggml", "ggml-alloc", "ggml-quants")]
CPP = [
    *(f"src/{name}.cpp" for name in ("unicode", "unicode-data")),
    *(f"src/llama-{name}.cpp" for name in ("vocab", "impl", "arch", "hparams", "mmap")),
    "src/llama-model-loader.cpp",
    *(f"ggml/src/{name}.cpp" for name in ("ggml", "gguf", "ggml-threading")),
    *(f"ggml/src/ggml-backend{end}.cpp" for end in ("", "-reg", "-dl", "-meta")),
]
FLAGS = ["-O1", "-w", "-D_GNU_SOURCE", *(f"-I{name}" for name in BUILT)]


def source() -> Path:
    """The folder of llama.cpp, not compiled; skips the test where it cannot be had."""
    return _cached(PACKAGE, lambda scratch: _fetch(scratch, KEPT))


def tokenizer() -> Path:
    """The program of llama_tokenizer.cpp, compiled in some minutes with llama.cpp's tokenizer."""
    return _cached(f"{PACKAGE}-tokenizer", _compile) / "tokenizer"


def encode(model: Path, texts: Iterable[str], pre: str) -> list[list[int]]:
    """What llama.cpp makes of each text, without special tokens. pre: instead of the file's."""
    framed = b"".join(
        struct.pack("<I", len(raw)) + raw for raw in (text.encode() for text in texts)
    )
    command = [str(tokenizer()), str(model), pre]
    done = subprocess.run(command, input=framed, capture_output=True, check=True)
    return [[int(id) for id in line.split()] for line in done.stdout.decode().splitlines()]


@cache
def _cached(name: str, make: Callable[[Path], Path]) -> Path:
    """The folder `name` of the cache, made once by one process for all."""
    folder = cache_folder() / name
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                make(Path(scratch)).rename(folder)
    return folder


def _compile(scratch: Path) -> Path:
    root = _fetch(scratch, BUILT)
    (root / "ggml/src/ggml-version.h").write_text(
        '#define GGML_VERSION "0"\n#define GGML_COMMIT "0"\n'
    )
    built = scratch / "built"
    built.mkdir()
    main = str(Path(__file__).with_name("llama_tokenizer.cpp"))
    for name in (*C, *CPP, main):
        compiler = ["gcc"] if name in C else ["g++", "-std=c++17"]
        out = built / (Path(name).name + ".o")
        subprocess.run([*compiler, *FLAGS, "-c", name, "-o", out], cwd=root, check=True)
    objects = sorted(built.glob("*.o"))
    subprocess.run(["g++", "-o", built / "tokenizer", *objects, "-ldl", "-lpthread"], check=True)
    for path in objects:
        path.unlink()
    return built


def templates() -> list[Path]:
    return sorted((source() / "models/templates").glob("*.jinja"))


def _fetch(scratch: Path, kept: tuple[str, ...]) -> Path:
    done = subprocess.run([*PIP, "--dest", str(scratch), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be had: {done.stderr[-500:]}")
    (archive,) = scratch.glob("*.tar.gz")
    root = archive.name.removesuffix(".tar.gz") + "/vendor/llama.cpp/"
    with tarfile.open(archive) as tar:
        tar.extractall(
            scratch,
            [m for m in tar if m.name.startswith(tuple(root + name for name in kept))],
            filter="data",
        )
    return scratch / root
