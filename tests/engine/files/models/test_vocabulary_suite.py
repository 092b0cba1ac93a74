"""llama.cpp's vocabularies: every one opens, and its tests' texts become the expected ids."""

import os
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from makefiles.conversion import bare_vocabulary, encoder
from oracles import llama_cpp

BORDER = "\n__ggml_vocab_test__\n"
FILES = sorted((llama_cpp.source() / "models").glob("ggml-vocab-*.gguf"))
SMALL = 3 << 20  # bytes; the larger ones take most of a minute together: make test-vocabularies
SHOWN = [path for path in FILES if path.stat().st_size < SMALL or "CFLOW_TEST_TEXTS" in os.environ]


def test_the_suite_is_whole() -> None:
    expected = [path for path in FILES if path.with_name(path.name + ".out").exists()]
    assert (len(FILES), len(expected)) == (19, 15)


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_a_vocabulary_opens_and_encodes_as_expected(path: Path, tmp_path: Path) -> None:
    found = bare_vocabulary(path, tmp_path)
    ours = encoder(found)
    given, wanted = (path.with_name(path.name + end) for end in (".inp", ".out"))
    if not given.exists():
        assert ours.decode(ours.encode("Hello world", add_bos=False)).strip() == "Hello world"
        return
    texts = given.read_text().removesuffix(BORDER).split(BORDER)
    lines = wanted.read_text().removesuffix("\n").split("\n")
    for text, line in zip(texts, lines, strict=True):
        ids = [int(id) for id in line.split()]
        if unicodedata.is_normalized("NFC", text):
            assert ours.encode(text, add_bos=False, trusted=()) == ids, text
        else:  # llama.cpp does not compose accents; Qwen's own tokenizer does
            assert found.tokenizer_json.count(b'{"type":"NFC"}') == 1
            bare = found.tokenizer_json.replace(b'{"type":"NFC"}', b"null")
            same = encoder(replace(found, tokenizer_json=bare))
            assert same.encode(text, add_bos=False, trusted=()) == ids, text
