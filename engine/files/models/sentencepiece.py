"""Tokenizers that spell a space as U+2581: SentencePiece's two kinds, Gemma 4's, and WordPiece.

GGUF metadata and `tokenizer.model` files hold the same: a text, a score and a kind for each id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cflow.engine.base.errors import ModelError
from cflow.engine.files.models.vocabulary import (
    SPECIAL,
    USED,
    Kind,
    added_tokens,
    ids_of,
    merges_of,
)

SPACE = "\u2581"
WORD_CHARACTERS = 100  # WordPiece: a longer word is unknown, as in BERT
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """Texts, kinds and scores by id, and what is done with spaces.

    prefix: where text gets a space in front: "" (nowhere), "first" (where the text begins), "each"
    (there, and behind each added token). eats_spaces: whether an added token, by its text, removes
    the white space behind it. charsmap: rules of normalisation in SentencePiece's form. tidy: whether
    spaces at both ends, and all but one of several, are removed. Raises ModelError for a byte that is
    not spelt <0xNN>, and for a damaged charsmap.
    """

    def __init__(
        self,
        origin: str,
        texts: Sequence[str],
        kinds: Any,
        scores: Any,
        unknown: int | None,
        prefix: str = "",
        eats_spaces: Callable[[str], bool] = lambda _: False,
        charsmap: bytes = b"",
        tidy: bool = False,
    ) -> None:
        # A token that users defined is looked for in the text as it is, before spaces are replaced.
        user_defined = np.asarray(kinds) == Kind.USER_DEFINED
        self.texts = [
            text.replace(SPACE, " ") if defined else text
            for text, defined in zip(texts, user_defined, strict=True)
        ]
        self.kinds, self.scores, self.origin = kinds, scores, origin
        self.unknown, self.prefix, self.eats_spaces = unknown, prefix, eats_spaces
        self.charsmap, self.tidy = charsmap, tidy
        if charsmap:
            check_charsmap(charsmap, origin)
        for token in ids_of(kinds, Kind.BYTE):
            if not BYTE.fullmatch(texts[token]):
                raise ModelError(
                    f"{origin}: token {token} is a byte, but its text is {texts[token]!r}; "
                    "<0x00> to <0xFF> are allowed"
                )

    def of_kind(self, *kinds: Kind) -> dict[str, int]:
        """Ids by text; of several ids with one text the last."""
        return {self.texts[token]: token for token in ids_of(self.kinds, *kinds)}

    def unknown_text(self) -> str:
        """The text of the unknown token. Raises ModelError if there is none."""
        if self.unknown is None:
            raise ModelError(f"{self.origin}: the vocabulary has no unknown token, which it needs")
        return self.texts[self.unknown]

    def table(self) -> list[tuple[bytes, int]]:
        """Bytes and flags by id."""
        rows = [(b"", SPECIAL)] * len(self.texts)
        for token in ids_of(self.kinds, Kind.NORMAL, Kind.USER_DEFINED):
            rows[token] = self.texts[token].replace(SPACE, " ").encode(), 0
        for token in ids_of(self.kinds, Kind.CONTROL, Kind.UNKNOWN):
            rows[token] = self.texts[token].encode(), SPECIAL
        for token in ids_of(self.kinds, Kind.BYTE):
            rows[token] = bytes.fromhex(self.texts[token][3:5]), 0
        return rows


def bpe(
    pieces: Pieces, merges: list[tuple[str, str]] | None = None, pattern: str | None = None
) -> Tokenizer:
    """Byte-pair encoding of characters; those without a token become bytes.

    merges: None for those that the scores imply: of all pairs that form a token, the one whose token
    has the highest score. pattern: what text is split into first."""
    if merges is None:
        normal, scores = pieces.of_kind(Kind.NORMAL), pieces.scores
        merges = merges_of(sorted(normal, key=lambda text: (-scores[normal[text]], normal[text])))
    model = models.BPE(
        vocab=pieces.of_kind(*USED),
        merges=merges,
        unk_token=None if pieces.unknown is None else pieces.texts[pieces.unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    if pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return _finished(tokenizer, pieces)


def unigram(pieces: Pieces) -> Tokenizer:
    """The most probable pieces of a text. Raises ModelError if there is no unknown token."""
    pieces.unknown_text()
    normal = pieces.scores[pieces.kinds == Kind.NORMAL]
    lowest = float(normal.min()) if normal.size else 0.0
    texts, scores = list(pieces.texts), pieces.scores.astype(float)
    scores[ids_of(pieces.kinds, *(kind for kind in Kind if kind != Kind.NORMAL))] = lowest
    for token in ids_of(pieces.kinds, Kind.UNUSED):
        texts[token] = f" {token}"  # no text has this space: it is replaced
    bytes_ = ids_of(pieces.kinds, Kind.BYTE)
    scores[bytes_] = 8 * lowest  # less than the characters of <0xNN>, typed by a user
    vocab = list(zip(texts, scores.tolist(), strict=True))
    tokenizer = Tokenizer(models.Unigram(vocab, pieces.unknown, bool(bytes_)))
    return _finished(tokenizer, pieces)


def _finished(tokenizer: Tokenizer, pieces: Pieces) -> Tokenizer:
    """Adds normalisation, the replacement of spaces, and the added tokens."""
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.tidy:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    undone = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if pieces.prefix == "each" else []
        steps += [normalizers.Replace(" ", SPACE)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if pieces.prefix else []
    tokenizer.decoder = decoders.Sequence(undone + strip)
    tokenizer.add_tokens(added_tokens(pieces.texts, pieces.kinds, pieces.eats_spaces))
    return tokenizer


def wordpiece(pieces: Pieces, *, lowercase: bool, strip_accents: bool) -> Tokenizer:
    """BERT's: the longest tokens of each word from its beginning. In `pieces` a word begins with
    U+2581, in the tokenizer all but its first token begin with ##."""
    normal = pieces.of_kind(Kind.NORMAL)
    others = pieces.of_kind(*(kind for kind in USED if kind != Kind.NORMAL))
    vocab = others | {_continued(text): token for text, token in normal.items()}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab,
            unk_token=pieces.unknown_text(),
            max_input_chars_per_word=WORD_CHARACTERS,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens(added_tokens(pieces.texts, pieces.kinds))
    return tokenizer


def _continued(text: str) -> str:
    return text[1:] if text.startswith(SPACE) else f"##{text}"


def check_charsmap(data: bytes, origin: str) -> None:
    """Raises ModelError if walking the rules could leave them: the library does not check.

    A double array: u32 size, units of u32, then the replacements, each with a NUL behind it. A unit
    has an offset to its children, a block of 256 units, or is the value at a leaf: where a
    replacement begins."""
    n_bytes = int.from_bytes(data[:4], "little")
    rest = data[4 + n_bytes :]
    units = np.frombuffer(data[4 : 4 + n_bytes], "<u4") if n_bytes % 4 == 0 else np.empty(0, "<u4")
    inner = units < 1 << 31
    offset = (units >> 10) << ((units & (1 << 9)) >> 6)
    last = (np.arange(units.size, dtype=np.uint32) ^ offset)[inner] | 0xFF
    begins = np.frombuffer(b"\0" + rest, np.uint8)[:-1] == 0
    values = units[~inner] & 0x7FFFFFFF
    try:
        rest.decode()
    except UnicodeDecodeError:
        begins = begins[:0]
    if (
        not 4 <= n_bytes <= len(data) - 4
        or units.size == 0
        or np.any(last >= units.size)
        or np.any(values >= begins.size)
        or not begins[values].all()
    ):
        raise ModelError(f"{origin}: precompiled_charsmap is damaged")
