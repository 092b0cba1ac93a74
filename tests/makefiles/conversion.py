"""Small models converted, and the edits that make them wrong."""

import struct
from pathlib import Path
from typing import Any

from cflow.engine.base.native_types import TokenBytes
from cflow.engine.files.convert import convert
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.models import gguf_vocabulary
from cflow.engine.files.models.vocabulary import Vocabulary
from cflow.engine.text.tokenizer import Tokenizer
from makefiles.gguf_file import GgufBuilder, Tensor
from oracles.model_file import ModelFile


def converted(source: Path, **options: Any) -> ModelFile:
    out = source.with_name(source.name + ".out.cflow")
    convert(str(source), out, **options)
    return ModelFile(out)


def gguf(folder: Path, builder: GgufBuilder) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(builder.build())
    return path


def keys(builder: GgufBuilder, *changed: tuple[str, str, Any]) -> GgufBuilder:
    """The builder with some keys replaced or added."""
    names = [key[0] for key in changed]
    builder.keys = [key for key in builder.keys if key[0] not in names] + list(changed)
    return builder


def tensor(builder: GgufBuilder, name: str) -> Tensor:
    return next(t for t in builder.tensors if t.name == name)


def vocabulary(builder: GgufBuilder, pre: str = "gpt-2") -> GgufBuilder:
    """Adds a GGUF vocabulary of 8 tokens, the last of them padding."""
    return keys(
        builder,
        ("tokenizer.ggml.model", "s", "gpt2"),
        ("tokenizer.ggml.pre", "s", pre),
        (
            "tokenizer.ggml.tokens",
            "[s",
            ["a", "b", "ab", "Ġ", "<|im_end|>", "</s>", "<t>", "[PAD7]"],
        ),
        ("tokenizer.ggml.token_type", "[i", [1, 1, 1, 1, 3, 3, 4, 5]),
        ("tokenizer.ggml.merges", "[s", ["a b"]),
        ("tokenizer.ggml.eos_token_id", "I", 5),
        ("tokenizer.ggml.bos_token_id", "I", 5),
    )


def bare_vocabulary(path: Path, folder: Path, pre: str | None = None) -> Vocabulary:
    """The vocabulary of a GGUF file that has no tensors: it is copied to folder with one."""
    data = path.read_bytes()
    info = struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 0)
    data = data[:8] + struct.pack("<Q", 1) + data[16:] + info
    copy = folder / path.name
    copy.write_bytes(data + bytes(-len(data) % 32) + bytes(4))
    with GgufFile(copy) as file:
        return gguf_vocabulary.vocabulary(file, 1 << 20, pre)


def encoder(found: Vocabulary) -> Tokenizer:
    table = TokenBytes([text for text, _ in found.tokens], bytes(f for _, f in found.tokens))
    return Tokenizer(found.tokenizer_json, table, found.metadata())
