"""A byte-level BPE tokenizer from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import AddedToken, normalizers

from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.pretokenizers import guess, pre_tokenizer
from cflow.engine.files.models.vocabulary import (
    SPECIAL,
    Vocabulary,
    byte_characters,
    byte_level_bpe,
    byte_vocabulary,
    token_text,
)


class Kind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that always end an answer: GGUF has room for one end token only, and the list
# in generation_config.json is lost.
END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
)
SHOWN = 5  # token texts in a note
GENERATION_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def vocabulary(file: GgufFile, vocab_size: int, pre: str | None = None) -> Vocabulary:
    """The vocabulary of the file, or one token a byte if it declares none. pre: the pre-tokenizer
    instead of the file's."""
    keys = Fields(file.metadata, str(file.path))
    model = keys.text("tokenizer.ggml.model")
    if model in ("no_vocab", "none"):
        return byte_vocabulary(vocab_size)
    if model != "gpt2":
        raise keys.error(
            "tokenizer.ggml.model",
            f"is {model!r}; only byte-level BPE (gpt2) is supported, SentencePiece is not yet",
        )
    return _bpe(keys, file.metadata, pre)


def _bpe(keys: Fields, metadata: Mapping[str, Any], named: str | None) -> Vocabulary:
    texts, kinds = _tokens(keys, metadata)
    notes = []
    name = named or keys.text("tokenizer.ggml.pre", "")
    if not name:
        name = guess(keys.text("general.architecture", ""), set(texts), str(keys.origin))
        notes.append(
            f"the file lacks tokenizer.ggml.pre; its architecture and vocabulary suggest {name!r}. "
            "If text is split wrongly, name another: cflow convert --pre NAME"
        )
    pre = pre_tokenizer(name, str(keys.origin))
    vocab = {text: token for token, text in enumerate(texts) if kinds[token] != Kind.UNUSED}
    notes += _twice(texts, kinds, vocab)
    added = [
        AddedToken(text, normalized=False, special=kinds[token] != Kind.USER_DEFINED)
        for text, token in vocab.items()
        if kinds[token] in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
    ]
    try:
        tokenizer = byte_level_bpe(
            vocab,
            _merges(keys, metadata),
            list(pre.patterns),
            added,
            ignore_merges=pre.ignore_merges,
            normalizer=normalizers.NFC() if pre.nfc else None,
        )
    except Exception as error:  # the library raises nothing narrower
        raise keys.error("tokenizer.ggml.merges", f"do not fit the tokens: {error}") from error
    return Vocabulary(
        tokenizer_json=tokenizer.to_str().encode(),
        tokens=_table(texts, kinds),
        bos_id=_token(keys, "tokenizer.ggml.bos_token_id", len(texts)),
        add_bos=keys.flag("tokenizer.ggml.add_bos_token", pre.add_bos),
        end_id=_end_id(keys, len(texts)),
        eos_ids=_ends(keys, texts, kinds),
        pad_id=_token(keys, "tokenizer.ggml.padding_token_id", len(texts)),
        chat_template=keys.text("tokenizer.chat_template", "") or None,
        tool_template=keys.text("tokenizer.chat_template.tool_use", "") or None,
        generation={name: keys.number(key) for key, name in GENERATION_KEYS.items() if key in keys},
        notes=tuple(notes),
    )


def _twice(texts: list[str], kinds: Any, vocab: dict[str, int]) -> list[str]:
    """A note if ids share a text. The last id encodes it, as in llama.cpp and in the BPE vocabulary
    of Hugging Face, which are maps that later entries overwrite; every id decodes."""
    lost = [
        token
        for token, text in enumerate(texts)
        if kinds[token] != Kind.UNUSED and vocab[text] != token
    ]
    shown = ", ".join(f"{texts[i]!r} ({i} and {vocab[texts[i]]})" for i in lost[:SHOWN])
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return [f"token texts with two ids, of which the last encodes: {shown}{more}"] if lost else []


def _tokens(keys: Fields, metadata: Mapping[str, Any]) -> tuple[list[str], Any]:
    texts = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not texts:
        raise keys.error("tokenizer.ggml.tokens", "is not a list of strings")
    kinds = metadata.get("tokenizer.ggml.token_type", np.ones(len(texts), np.int32))
    if not isinstance(kinds, np.ndarray) or kinds.shape != (len(texts),):
        raise keys.error("tokenizer.ggml.token_type", f"does not hold {len(texts)} numbers")
    if not np.isin(kinds, list(Kind)).all():
        raise keys.error("tokenizer.ggml.token_type", "holds an unknown type")
    return texts, kinds


def _merges(keys: Fields, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise keys.error("tokenizer.ggml.merges", "is not a list of strings")
    pairs = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not left or not space or not right:
            raise keys.error("tokenizer.ggml.merges", f"holds {line!r}, which is not two tokens")
        pairs.append((left, right))
    return pairs


def _table(texts: list[str], kinds: Any) -> list[tuple[bytes, int]]:
    """The tokens up to the last one in use; the rest pads the embedding."""
    table = byte_characters()
    rows = []
    for text, kind in zip(texts, kinds.tolist(), strict=True):
        if kind == Kind.UNUSED:
            rows.append((b"", SPECIAL))
        elif kind == Kind.NORMAL:
            rows.append((token_text(text, table), 0))
        else:
            rows.append((text.encode(), 0 if kind == Kind.USER_DEFINED else SPECIAL))
    used = np.flatnonzero(kinds != Kind.UNUSED)
    return rows[: int(used[-1]) + 1] if used.size else []


def _token(keys: Fields, key: str, n_tokens: int) -> int | None:
    return keys.count(key, high=n_tokens - 1) if key in keys else None


def _end_id(keys: Fields, n_tokens: int) -> int | None:
    adds = keys.flag("tokenizer.ggml.add_eos_token", False)
    return _token(keys, "tokenizer.ggml.eos_token_id", n_tokens) if adds else None


def _ends(keys: Fields, texts: list[str], kinds: Any) -> list[int]:
    """The ids that end an answer, the one that the file names as such first."""
    names = ("eos", "eot", "eom")
    named = [_token(keys, f"tokenizer.ggml.{name}_token_id", len(texts)) for name in names]
    control = np.flatnonzero(kinds == Kind.CONTROL).tolist()
    found = [*named, *(token for token in control if texts[token] in END_TEXTS)]
    return list(dict.fromkeys(token for token in found if token is not None))
