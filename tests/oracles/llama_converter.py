"""Converts Hugging Face folders to GGUF with llama.cpp's own converter, in a process of its own, since
it brings its own version of the gguf package.

It leaves the vocabulary out: it knows tokenizers by a hash of what they encode, which a tiny one cannot
have.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any


def convert(folders: dict[Path, Path]) -> None:
    """Writes an f32 file for each folder. folders: to the file that is written."""
    from oracles import llama_cpp  # not in the process below

    pairs = [str(path) for pair in folders.items() for path in pair]
    command = [sys.executable, __file__, str(llama_cpp.source()), *pairs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]


def _subclasses(kind: Any) -> list[Any]:
    found = [kind]
    for below in kind.__subclasses__():
        found += _subclasses(below)
    return found


def _main(source: str, *pairs: str) -> None:
    sys.path[:0] = [source, f"{source}/gguf-py"]
    conversion = importlib.import_module("conversion")
    text_model = importlib.import_module("conversion.base").TextModel
    f32 = importlib.import_module("gguf").LlamaFileType.ALL_F32
    for folder, out in zip(pairs[::2], pairs[1::2], strict=True):
        config = conversion.ModelBase.load_hparams(Path(folder), False)
        kind = conversion.get_model_class(config["architectures"][0])
        for each in _subclasses(text_model):
            each.set_vocab = text_model._set_vocab_none
        kind(Path(folder), f32, Path(out)).write()


if __name__ == "__main__":
    _main(*sys.argv[1:])
