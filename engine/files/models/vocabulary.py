"""Tokens of a model: tokenizer.json, the bytes of every id, and ids with a meaning.

Byte-level BPE is built here: GPT-2's table maps each byte to one of 256 printable characters.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from cflow.engine.base.errors import ModelError

SPECIAL = 1  # flag of a token that is never shown
LONGEST = 1024  # characters of a token that merges form


class Kind(IntEnum):
    """What a token is, in tokenizer.ggml.token_type and in SentencePiece's files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


USED = tuple(kind for kind in Kind if kind != Kind.UNUSED)


@dataclass(frozen=True)
class Vocabulary:
    """tokens: (bytes, flags) by id. An undefined id has no bytes and is special."""

    tokenizer_json: bytes
    tokens: list[tuple[bytes, int]]
    bos_id: int | None = None
    add_bos: bool = False
    end_id: int | None = None  # what the tokenizer puts behind a text to embed
    eos_ids: list[int] = field(default_factory=list)
    pad_id: int | None = None
    chat_template: str | None = None
    tool_template: str | None = None  # for requests with tools; None: chat_template
    generation: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a user should know about how it was read

    def section(self) -> bytes:
        """The token-bytes table of docs/format.md."""
        ends = np.cumsum([len(text) for text, _ in self.tokens], dtype=np.uint32)
        flags = bytes(flag for _, flag in self.tokens)
        text = b"".join(text for text, _ in self.tokens)
        return struct.pack("<I", len(self.tokens)) + ends.astype("<u4").tobytes() + flags + text

    def metadata(self) -> dict[str, Any]:
        return {
            "chat_template": self.chat_template,
            "tool_template": self.tool_template,
            "bos_id": self.bos_id,
            "add_bos": self.add_bos,
            "end_id": self.end_id,
            "eos_ids": self.eos_ids,
            "pad_id": self.pad_id,
            "generation": self.generation,
        }

    def within(self, vocab_size: int, origin: str) -> Vocabulary:
        """The vocabulary without meanings for undefined ids. Raises ModelError if a token has no row
        in the embedding."""
        n_tokens = len(self.tokens)
        check_rows(n_tokens, vocab_size, origin)
        bos, pad, end = (
            None if token is None or token >= n_tokens else token
            for token in (self.bos_id, self.pad_id, self.end_id)
        )
        return replace(
            self,
            bos_id=bos,
            add_bos=self.add_bos and bos is not None,
            pad_id=pad,
            end_id=end,
            eos_ids=[token for token in self.eos_ids if token < n_tokens],
        )


def check_rows(n_tokens: int, vocab_size: int, origin: str) -> None:
    if n_tokens > vocab_size:
        raise ModelError(
            f"{origin}: the tokenizer has {n_tokens:,} tokens, "
            f"the embedding only {vocab_size:,} rows"
        )


def byte_characters() -> dict[str, int]:
    """GPT-2's table: byte by character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


def token_text(token: str, table: dict[str, int]) -> bytes:
    """The bytes of a vocabulary entry; a token with characters outside the table is plain text."""
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def ids_of(kinds: Any, *wanted: Kind) -> list[int]:
    """The ids of some kinds of tokens. kinds: an array by id."""
    ids: list[int] = np.flatnonzero(np.isin(kinds, wanted)).tolist()
    return ids


def added_tokens(
    texts: Sequence[str], kinds: Any, eats_spaces: Callable[[str], bool] = lambda _: False
) -> list[AddedToken]:
    """The tokens that are found in a text before anything else is done with it. eats_spaces: whether
    the token, by its text, removes the white space behind it."""
    return [
        AddedToken(
            texts[token],
            normalized=False,
            special=bool(kinds[token] != Kind.USER_DEFINED),
            rstrip=eats_spaces(texts[token]),
        )
        for token in ids_of(kinds, Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
    ]


def merges_of(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece. pieces: the one to form first in front; those of more
    than LONGEST characters, which would take long, are left out."""
    ordered = [piece for piece in pieces if len(piece) <= LONGEST]
    known = set(ordered)
    return [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    patterns: list[str],
    added: list[AddedToken],
    *,
    ignore_merges: bool = False,
    normalizer: Any = None,
) -> Tokenizer:
    """patterns: regular expressions that split the text, one after the other."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(added)
    return tokenizer


def byte_vocabulary(vocab_size: int) -> Vocabulary:
    """A vocabulary of one token a byte, for models without a tokenizer."""
    characters = sorted(byte_characters().items(), key=lambda item: item[1])[:vocab_size]
    tokenizer = byte_level_bpe({char: byte for char, byte in characters}, [], [], [])
    tokens = [(bytes([byte]), 0) for _, byte in characters]
    return Vocabulary(tokenizer.to_str().encode(), tokens)
