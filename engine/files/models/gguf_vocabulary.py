"""A tokenizer from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.models import sentencepiece
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.pretokenizers import PreTokenizer, guess, pre_tokenizer
from cflow.engine.files.models.sentencepiece import Pieces
from cflow.engine.files.models.vocabulary import (
    SPECIAL,
    USED,
    Kind,
    Vocabulary,
    added_tokens,
    byte_characters,
    byte_level_bpe,
    byte_vocabulary,
    ids_of,
    merges_of,
    token_text,
)

# Added tokens that always end an answer: GGUF has room for one end token only, and the list in
# generation_config.json is lost.
END_TEXTS = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<EOT>", "[EOT]", "<end_of_utterance>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|END_OF_TURN_TOKEN|>", "[e~["),
}
# Where a model has these, <|end|> ends a part of an answer only.
CALL_TEXTS = {"<|call|>", "<|calls|>"}
KEEPS_SPACES = (
    "<unk>",
    "<s>",
    "<|endoftext|>",
)  # Phi-3: the other tokens remove spaces behind them
SHOWN = 5  # token texts in a note
GENERATION_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class _Built:
    """A tokenizer, its table, and what holds if the file does not say otherwise."""

    tokenizer: Tokenizer
    table: list[tuple[bytes, int]]
    bos: int | None = None
    eos: int | None = None
    end: int | None = None  # behind a text to embed
    add_bos: bool = False
    needs_bos: bool = False  # whatever the file says
    notes: tuple[str, ...] = ()


class _Tokens:
    """The lists of the file, checked. keys are for errors."""

    def __init__(self, keys: Fields, metadata: Mapping[str, Any]) -> None:
        self.keys = keys
        texts = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list) or not texts:
            raise keys.error("tokenizer.ggml.tokens", "is not a list of strings")
        kinds = self._numbers(metadata, "tokenizer.ggml.token_type", len(texts), Kind.NORMAL)
        if not np.isin(kinds, list(Kind)).all():
            raise keys.error("tokenizer.ggml.token_type", "holds an unknown type")
        empty = [not text for text in texts]
        self.texts: list[str] = texts
        self.kinds = np.where(empty, Kind.UNUSED, kinds)
        self.merge_lines = metadata.get("tokenizer.ggml.merges")
        self._metadata = metadata

    def _numbers(self, metadata: Mapping[str, Any], key: str, n: int, default: int) -> Any:
        values = metadata.get(key, np.full(n, default))
        if not isinstance(values, np.ndarray) or values.shape != (n,):
            raise self.keys.error(key, f"does not hold {n} numbers")
        return values

    def pieces(self, unknown: int | None, prefix: bool = False, **options: Any) -> Pieces:
        """unknown: its id if the file does not say. prefix: whether text gets a space in front if the
        file does not say."""
        keys, n_tokens = self.keys, len(self.texts)
        scores = self._numbers(self._metadata, "tokenizer.ggml.scores", n_tokens, 0)
        if not np.isfinite(scores).all():
            raise keys.error("tokenizer.ggml.scores", "holds a number that is not finite")
        has_prefix = keys.flag("tokenizer.ggml.add_space_prefix", prefix)
        is_phi3 = keys.text("general.architecture", "") == "phi3"
        found = _token(keys, "tokenizer.ggml.unknown_token_id", n_tokens)
        if found is None and unknown is not None and unknown < n_tokens:
            found = unknown
        return Pieces(
            str(keys.origin),
            self.texts,
            self.kinds,
            scores,
            found,
            prefix="each" if has_prefix else "",
            eats_spaces=lambda text: is_phi3 and text not in KEEPS_SPACES,
            **options,
        )

    def merges(self) -> list[tuple[str, str]]:
        if not isinstance(self.merge_lines, list):
            raise self.keys.error("tokenizer.ggml.merges", "is not a list of strings")
        pairs = []
        for line in self.merge_lines:
            left, space, right = line.partition(" ")
            if not left or not space or not right:
                message = f"holds {line!r}, which is not two tokens"
                raise self.keys.error("tokenizer.ggml.merges", message)
            pairs.append((left, right))
        return pairs


def vocabulary(file: GgufFile, vocab_size: int, pre: str | None = None) -> Vocabulary:
    """The vocabulary of the file, or one token a byte if it declares none. pre: the pre-tokenizer
    instead of the file's."""
    keys = Fields(file.metadata, str(file.path))
    model = keys.text("tokenizer.ggml.model")
    if model in ("no_vocab", "none"):
        return byte_vocabulary(vocab_size)
    if model not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise keys.error(
            "tokenizer.ggml.model", f"is {model!r}, which is not supported; {known} are"
        )
    tokens = _Tokens(keys, file.metadata)
    try:
        built = _BUILDERS[model](tokens, pre)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise keys.error("tokenizer.ggml.merges", f"do not fit the tokens: {error}") from error
    n_tokens = len(tokens.texts)
    bos, eos, pad = (
        _token(keys, f"tokenizer.ggml.{name}_token_id", n_tokens)
        for name in ("bos", "eos", "padding")
    )
    eos = built.eos if eos is None else eos
    end = built.end if built.end is not None else eos
    adds_end = keys.flag("tokenizer.ggml.add_eos_token", built.end is not None)
    n_used = max(ids_of(tokens.kinds, *USED), default=-1) + 1
    return Vocabulary(
        tokenizer_json=built.tokenizer.to_str().encode(),
        tokens=built.table[:n_used],  # unused tokens at the end pad the embedding
        bos_id=built.bos if bos is None else bos,
        add_bos=built.needs_bos or keys.flag("tokenizer.ggml.add_bos_token", built.add_bos),
        end_id=end if adds_end else None,
        eos_ids=_ends(keys, tokens, eos),
        pad_id=pad,
        chat_template=keys.text("tokenizer.chat_template", "") or None,
        tool_template=keys.text("tokenizer.chat_template.tool_use", "") or None,
        generation={name: keys.number(key) for key, name in GENERATION_KEYS.items() if key in keys},
        notes=(*built.notes, *_twice(tokens)),
    )


def _gpt2(tokens: _Tokens, named: str | None) -> _Built:
    """Byte-level BPE, or BPE of characters where the pre-tokenizer says so."""
    keys = tokens.keys
    notes: tuple[str, ...] = ()
    name = named or keys.text("tokenizer.ggml.pre", "")
    if not name:
        name = guess(keys.text("general.architecture", ""), set(tokens.texts), str(keys.origin))
        notes = (
            f"the file lacks tokenizer.ggml.pre; its architecture and vocabulary suggest {name!r}. "
            "If text is split wrongly, name another: cflow convert --pre NAME",
        )
    pre = pre_tokenizer(name, str(keys.origin))
    if pre.raw:
        return _characters(tokens, pre)
    if tokens.merge_lines is None and name == "kimi-k2":
        merges = merges_of(
            tokens.texts[token] for token in ids_of(tokens.kinds, Kind.NORMAL)
        )  # a lower id is merged first
    else:
        merges = tokens.merges()
    tokenizer = byte_level_bpe(
        {tokens.texts[token]: token for token in ids_of(tokens.kinds, *USED)},
        merges,
        list(pre.patterns),
        added_tokens(tokens.texts, tokens.kinds),
        ignore_merges=pre.whole,
        normalizer=normalizers.NFC() if pre.nfc else None,
    )
    return _Built(tokenizer, _byte_level_table(tokens), add_bos=pre.add_bos, notes=notes)


def _characters(tokens: _Tokens, pre: PreTokenizer) -> _Built:
    pieces = tokens.pieces(None)
    tokenizer = sentencepiece.bpe(pieces, tokens.merges(), pre.patterns[0])
    # Files of Gemma 4 say that it takes no BOS, but it was trained with one.
    return _Built(tokenizer, pieces.table(), needs_bos=pre.add_bos)


def _gemma4(tokens: _Tokens, _: str | None) -> _Built:
    return _characters(tokens, pre_tokenizer("gemma4", str(tokens.keys.origin)))


def _llama(tokens: _Tokens, _: str | None) -> _Built:
    """SentencePiece's BPE."""
    pieces = tokens.pieces(0, prefix=True)
    return _Built(sentencepiece.bpe(pieces), pieces.table(), bos=1, eos=2, add_bos=True)


def _t5(tokens: _Tokens, _: str | None) -> _Built:
    """SentencePiece's Unigram."""
    keys, key = tokens.keys, "tokenizer.ggml.precompiled_charsmap"
    charsmap = np.empty(0, np.uint8) if keys.get(key) is None else keys.get(key)
    if not isinstance(charsmap, np.ndarray) or charsmap.itemsize != 1:
        raise keys.error(key, "is not a list of bytes")
    tidy = keys.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    pieces = tokens.pieces(2, prefix=True, charsmap=charsmap.tobytes(), tidy=tidy)
    end = _token(keys, "tokenizer.ggml.eos_token_id", len(tokens.texts))
    tokenizer = sentencepiece.unigram(pieces)
    return _Built(tokenizer, pieces.table(), eos=1, end=1 if end is None else end)


def _bert(tokens: _Tokens, _: str | None) -> _Built:
    keys, pieces, n_tokens = tokens.keys, tokens.pieces(100), len(tokens.texts)
    lowercase = keys.flag("tokenizer.ggml.normalizer.lowercase", True)
    strip = keys.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
    first = _token(keys, "tokenizer.ggml.cls_token_id", n_tokens)
    end = _token(
        keys, "tokenizer.ggml.seperator_token_id", n_tokens
    )  # the specification's spelling
    return _Built(
        sentencepiece.wordpiece(pieces, lowercase=lowercase, strip_accents=strip),
        pieces.table(),
        bos=101 if first is None else first,
        end=102 if end is None else end,
        add_bos=True,
    )


_BUILDERS = {"gpt2": _gpt2, "llama": _llama, "gemma4": _gemma4, "t5": _t5, "bert": _bert}


def _twice(tokens: _Tokens) -> list[str]:
    """A note if ids share a text. The last id encodes it, as in llama.cpp and in the BPE vocabulary
    of Hugging Face, which are maps that later entries overwrite; every id decodes."""
    texts, used = tokens.texts, ids_of(tokens.kinds, *USED)
    last = {texts[token]: token for token in used}
    lost = [token for token in used if last[texts[token]] != token]
    shown = ", ".join(f"{texts[i]!r} ({i} and {last[texts[i]]})" for i in lost[:SHOWN])
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return [f"token texts with two ids, of which the last encodes: {shown}{more}"] if lost else []


def _byte_level_table(tokens: _Tokens) -> list[tuple[bytes, int]]:
    texts, kinds, letters = tokens.texts, tokens.kinds, byte_characters()
    rows = [(b"", SPECIAL)] * len(texts)
    for token in ids_of(kinds, Kind.NORMAL):
        rows[token] = token_text(texts[token], letters), 0
    for token in ids_of(kinds, Kind.USER_DEFINED):
        rows[token] = texts[token].encode(), 0
    for token in ids_of(kinds, Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE):
        rows[token] = texts[token].encode(), SPECIAL
    return rows


def _token(keys: Fields, key: str, n_tokens: int) -> int | None:
    return keys.count(key, high=n_tokens - 1) if key in keys else None


def _ends(keys: Fields, tokens: _Tokens, eos: int | None) -> list[int]:
    """The ids that end an answer, the one that the file names as such first."""
    texts = tokens.texts
    named = [_token(keys, f"tokenizer.ggml.{name}_token_id", len(texts)) for name in ("eot", "eom")]
    added = ids_of(tokens.kinds, Kind.CONTROL, Kind.USER_DEFINED)
    found = {texts[token]: token for token in added if texts[token] in END_TEXTS}
    if not CALL_TEXTS.isdisjoint(found):
        found.pop("<|end|>", None)
    ids = [eos, *named, *found.values()]
    return list(dict.fromkeys(token for token in ids if token is not None and token < len(texts)))
