"""Random texts, encoded as by other tokenizers: transformers' for the families that it has, and
llama.cpp's, compiled, for every pre-tokenizer (make test-vocabularies, 10,000 texts each)."""

import json
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import transformers
from transformers.models.bert.tokenization_bert_legacy import BasicTokenizer, WordpieceTokenizer

from cflow.engine.files.models.pretokenizers import PRE_TOKENIZERS
from cflow.engine.files.models.vocabulary import byte_characters, byte_level_bpe
from makefiles.conversion import bare_vocabulary, encoder
from oracles import llama_cpp
from oracles.random_texts import texts

N = int(os.environ.get("CFLOW_TEST_TEXTS", "300"))
GPT2 = "ggml-vocab-gpt-2.gguf"
# By pre-tokenizer: the class that knows its family's.
CLASSES: dict[str, Any] = {
    "gpt-2": transformers.GPT2Tokenizer,
    "mpt": transformers.GPTNeoXTokenizer,
    "command-r": transformers.CohereTokenizer,
    "qwen2": transformers.Qwen2Tokenizer,
    "qwen35": transformers.Qwen3_5Tokenizer,
}
# Where llama.cpp splits otherwise than the published patterns: what texts hold in which it shows.
FAULTS = {
    # Its look-aheads for letters of both cases leave out combining marks.
    **dict.fromkeys(("gpt-4o", "tekken", "kimi-k2"), r"\p{M}"),
    # What stands before a number gets into one part with its first digits, and \b is ignored.
    "tiny_aya": r"\p{N}",
    # And its range of CJK compatibility ideographs begins at U+8C48, the composed form of U+F900.
    "afmoe": r"\p{N}|[\ua000-\uf8ff]",
    # White space beyond ASCII is replaced, but a range of these patterns holds it.
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), r"[\u2000-\u3000]"),
    # \d is ASCII's digits only.
    "superbpe": r"[^\P{N}0-9]",
}
# Patterns that are published otherwise than they are here, for speed.
PUBLISHED = {
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", PRE_TOKENIZERS["gpt-4o"].patterns[0]),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}
# The first name of each pre-tokenizer for byte-level BPE.
NAMES = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items()) if not pre.raw}.values()


@pytest.mark.parametrize("name", CLASSES)
def test_texts_encode_as_in_transformers(name: str, tmp_path: Path) -> None:
    found = bare_vocabulary(llama_cpp.source() / "models" / GPT2, tmp_path, name)
    ours = encoder(found)

    source = json.loads(found.tokenizer_json)["model"]
    theirs = CLASSES[name](vocab=source["vocab"], merges=[tuple(m) for m in source["merges"]])
    for text in texts(N, 1):
        assert ours.encode(text, add_bos=False, trusted=()) == theirs.encode(text), text


def settled(n: int, seed: int) -> list[str]:
    """Random texts without the characters that newer versions of Unicode assign."""
    return [
        text
        for text in texts(n, seed)
        if not any(
            unicodedata.category(character) == "Cn" and regex.match(r"\P{Cn}", character)
            for character in text
        )
    ]


def cut(text: str, patterns: Sequence[str]) -> list[str]:
    """The parts of a text, by another library of regular expressions."""
    parts = [text]
    for pattern in patterns:
        found = regex.compile("(?V1)" + pattern.replace(r"\z", r"\Z"))
        parts = [piece for part in parts for piece in _isolated(part, found)]
    return parts


def _isolated(text: str, pattern: Any) -> Iterator[str]:
    end = 0
    for match in pattern.finditer(text):
        yield from filter(None, (text[end : match.start()], match.group()))
        end = match.end()
    yield from filter(None, (text[end:],))


@pytest.mark.parametrize("name", sorted({*FAULTS, "youtu", "chameleon", "jais-2"} - {*PUBLISHED}))
def test_texts_are_cut_as_by_another_library(name: str) -> None:
    patterns = PRE_TOKENIZERS[name].patterns
    ours = byte_level_bpe(byte_characters(), [], list(patterns), []).pre_tokenizer
    for text in settled(N, 2):
        parts = [text[first:end] for _, (first, end) in ours.pre_tokenize_str(text)]
        assert parts == cut(text, patterns), text


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_cut_as_by_the_published_patterns(name: str) -> None:
    ours, theirs = (
        byte_level_bpe(byte_characters(), [], list(patterns), []).pre_tokenizer
        for patterns in (PRE_TOKENIZERS[name].patterns, PUBLISHED[name])
    )
    numbers = ["1234567", "12345x", "x1234 56789_", "1234\u0663", "\u06631234567", "1" * 200]
    for text in [*texts(N, 4), *numbers]:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.skipif("CFLOW_TEST_TEXTS" not in os.environ, reason="make test-vocabularies")
@pytest.mark.parametrize("name", NAMES)
def test_texts_encode_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    pre, fault = PRE_TOKENIZERS[name], regex.compile(FAULTS.get(name, r"(?!)"))
    compared = [
        text
        for text in settled(N, 3)
        if not fault.search(text) and not (pre.nfc and unicodedata.normalize("NFC", text) != text)
    ]
    assert len(compared) > N / 3
    model = llama_cpp.source() / "models" / GPT2
    ours = encoder(bare_vocabulary(model, tmp_path, name))
    for text, ids in zip(compared, llama_cpp.encode(model, compared, name), strict=True):
        assert ours.encode(text, add_bos=False, trusted=()) == ids, text


@pytest.mark.skipif("CFLOW_TEST_TEXTS" not in os.environ, reason="make test-vocabularies")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("llama-spm", r"(?!)"),
        ("gemma-4", r"(?!)"),
        # The library drops accents behind one that a rule of normalisation composes.
        ("nomic-bert-moe", r"\p{M}"),
    ],
)
def test_pieces_are_those_of_llama_cpp(name: str, fault: str, tmp_path: Path) -> None:
    model = llama_cpp.source() / "models" / f"ggml-vocab-{name}.gguf"
    ours = encoder(bare_vocabulary(model, tmp_path))
    compared = [text for text in settled(N, 3) if not regex.search(fault, text)]
    assert len(compared) > N / 3
    for text, ids in zip(compared, llama_cpp.encode(model, compared, ""), strict=True):
        assert ours.encode(text, add_bos=False, trusted=()) == ids, text


def test_words_are_those_of_the_first_bert(tmp_path: Path) -> None:
    model = llama_cpp.source() / "models/ggml-vocab-bert-bge.gguf"
    found = bare_vocabulary(model, tmp_path)
    ours, vocab = encoder(found), json.loads(found.tokenizer_json)["model"]["vocab"]
    words, parts = BasicTokenizer(do_lower_case=True), WordpieceTokenizer(vocab, "[UNK]")
    # The library has the categories of Unicode 8, and keeps what is not assigned or private.
    newer = regex.compile(r"(?V1)[\p{M}--[\u0300-\u036f]]|[\p{P}--[\u0000-\u007f\u2019]]")
    for text in texts(N, 3):
        if newer.search(text) or not {"Cn", "Co"}.isdisjoint(map(unicodedata.category, text)):
            continue
        ids = [vocab[part] for word in words.tokenize(text) for part in parts.tokenize(word)]
        assert ours.encode(text, add_bos=False, trusted=()) == ids, text
