"""A tokenizer from a Hugging Face folder: tokenizer.json, else tokenizer.model."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cflow.engine.base.errors import ModelError
from cflow.engine.base.metadata import GENERATION_RANGES
from cflow.engine.files.formats.safetensors import SafetensorsFolder, parse_json
from cflow.engine.files.models import sentencepiece, sentencepiece_file
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.sentencepiece import BYTE, SPACE, Pieces
from cflow.engine.files.models.vocabulary import (
    SPECIAL,
    Kind,
    Vocabulary,
    byte_characters,
    byte_vocabulary,
    check_rows,
    token_text,
)

TOKEN_ID = re.compile("[0-9]{1,9}")
TOKENIZER_FILES = ("vocab.json", "vocab.txt", "tokenizer_config.json")


def vocabulary(folder: SafetensorsFolder, vocab_size: int) -> Vocabulary:
    """tokenizer.json, else one made of tokenizer.model, with the ids that the configs name. A folder
    without any tokenizer file (a test model) gets one token a byte."""
    origin = str(folder.path)
    configs = [_optional(folder, n) for n in ("generation_config.json", "tokenizer_config.json")]
    generation, settings = (Fields(config, origin) for config in configs)
    config = Fields(folder.config, origin)
    base, tokenizer = _base(folder, settings, vocab_size)
    bos = _token_id(tokenizer, settings, "bos_token")
    ends = [*config.ids("eos_token_id"), *generation.ids("eos_token_id")]
    if (named := _token_id(tokenizer, settings, "eos_token")) is not None:
        ends.insert(0, named)  # what templates know as eos_token
    first = [*generation.ids("bos_token_id"), *config.ids("bos_token_id"), None][0]
    bos_id = bos if bos is not None else first
    return Vocabulary(
        tokenizer_json=base.tokenizer_json,
        tokens=base.tokens,
        bos_id=bos_id,
        add_bos=_adds_bos(tokenizer, settings, bos_id, default=base.add_bos),
        end_id=_end_id(tokenizer),
        eos_ids=list(dict.fromkeys(ends)),
        pad_id=_token_id(tokenizer, settings, "pad_token"),
        chat_template=_chat_template(folder, settings, "default"),
        tool_template=_chat_template(folder, settings, "tool_use"),
        generation={key: generation.number(key) for key in GENERATION_RANGES if key in generation},
    )


def _base(
    folder: SafetensorsFolder, settings: Fields, vocab_size: int
) -> tuple[Vocabulary, Tokenizer | None]:
    """The tokens without their meanings, and the tokenizer if there is one."""
    origin, data = str(folder.path), folder.text("tokenizer.json")
    if data is not None:
        tokenizer = _tokenizer(data, f"{origin}/tokenizer.json")
        return Vocabulary(data, _tokens(tokenizer, vocab_size, origin)), tokenizer
    if (data := folder.text("tokenizer.model")) is not None:
        pieces, is_unigram = _pieces(folder, data, settings, vocab_size)
        try:
            tokenizer = sentencepiece.unigram(pieces) if is_unigram else sentencepiece.bpe(pieces)
        except ModelError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{pieces.origin}: {error}") from error
        made = tokenizer.to_str().encode()
        return Vocabulary(made, pieces.table(), add_bos=True), tokenizer
    return _without_tokenizer(folder, vocab_size), None


def _optional(folder: SafetensorsFolder, name: str) -> dict[str, Any]:
    data = folder.text(name)
    return {} if data is None else parse_json(data, str(folder.path / name))


def _without_tokenizer(folder: SafetensorsFolder, vocab_size: int) -> Vocabulary:
    found = [name for name in TOKENIZER_FILES if (folder.path / name).exists()]
    if found:
        raise ModelError(
            f"{folder.path} has {', '.join(found)} but neither tokenizer.json nor tokenizer.model"
        )
    return byte_vocabulary(vocab_size)


def _pieces(
    folder: SafetensorsFolder, data: bytes, settings: Fields, vocab_size: int
) -> tuple[Pieces, bool]:
    """The pieces of tokenizer.model and of the files that add to them; whether they are Unigram's."""
    origin = str(folder.path / "tokenizer.model")
    file = sentencepiece_file.read(data, origin)
    texts, kinds, scores = list(file.texts), list(file.kinds), list(file.scores)
    check_rows(len(texts), vocab_size, origin)
    eaters = set()
    for token, text, entry in _added(folder, settings):
        check_rows(token + 1, vocab_size, origin)
        n_new = token + 1 - len(texts)
        texts.extend([""] * n_new)
        scores.extend([0.0] * n_new)
        kinds.extend([int(Kind.UNUSED)] * n_new)
        is_byte = text == texts[token] and kinds[token] == Kind.BYTE
        if not is_byte and kinds[token] != Kind.UNKNOWN:
            kinds[token] = Kind.CONTROL if entry.get("special") else Kind.USER_DEFINED
        texts[token] = text
        eaters |= {text} if entry.get("rstrip") is True else set()
    kinds_by_id = np.where([not text for text in texts], Kind.UNUSED, kinds)
    unknown = [token for token, kind in enumerate(kinds) if kind == Kind.UNKNOWN]
    # Newer tokenizers of Hugging Face ("legacy" is false) put a space before the text only.
    prefix = "each" if settings.flag("legacy", True) else "first"
    pieces = Pieces(
        origin,
        texts,
        kinds_by_id,
        np.array(scores, np.float32),
        unknown[0] if unknown else None,
        prefix=prefix if file.has_prefix else "",
        eats_spaces=eaters.__contains__,
        charsmap=file.charsmap,
        tidy=file.is_tidy,
    )
    return pieces, file.is_unigram


def _added(
    folder: SafetensorsFolder, settings: Fields
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Id, text and entry of each token that the configs add or change."""
    for text, token in _optional(folder, "added_tokens.json").items():
        if type(token) is int and token >= 0:
            yield token, text, {}
    entries = settings.get("added_tokens_decoder")
    for token, entry in entries.items() if isinstance(entries, dict) else ():
        if (
            TOKEN_ID.fullmatch(token)
            and isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
        ):
            yield int(token), entry["content"], entry


def _tokenizer(data: bytes, origin: str) -> Tokenizer:
    """The parsed tokenizer. Raises ModelError unless the bytes of its tokens are known."""
    settings = parse_json(data, origin)
    for charsmap in _charsmaps(settings.get("normalizer")):
        sentencepiece.check_charsmap(charsmap, origin)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library has no narrower type
        raise ModelError(f"{origin}: {error}") from error
    kind = type(tokenizer.model).__name__
    if _style(tokenizer) is None:
        raise ModelError(
            f"{origin}: this is {kind}; BPE of bytes, SentencePiece and WordPiece are supported"
        )
    return tokenizer


def _charsmaps(normalizer: Any) -> Iterator[bytes]:
    """The rules of normalisation that the library does not check, at any depth."""
    waiting = [normalizer]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            if step.get("type") == "Precompiled":
                try:
                    yield base64.b64decode(step.get("precompiled_charsmap") or b"")
                except (ValueError, TypeError):
                    yield b""
            waiting += step.values()
        elif isinstance(step, list):
            waiting += step


def _style(tokenizer: Tokenizer) -> str | None:
    """How tokens spell bytes: in GPT-2's letters, with U+2581 for a space, or as parts of words."""
    kind, decoder = type(tokenizer.model).__name__, repr(tokenizer.decoder)
    if kind == "BPE" and "ByteLevel" in decoder:
        return "letters"
    if kind in ("BPE", "Unigram") and (SPACE in decoder or "Metaspace" in decoder):
        return "spaces"
    return "words" if kind == "WordPiece" else None


def _tokens(tokenizer: Tokenizer, vocab_size: int, origin: str) -> list[tuple[bytes, int]]:
    table, style = byte_characters(), _style(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocab = {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    n_tokens = max(vocab, default=-1) + 1
    check_rows(n_tokens, vocab_size, origin)  # before an absurd id makes the table huge
    rows = []
    for token in range(n_tokens):
        if token in added:
            entry = added[token]
            rows.append((entry.content.encode(), SPECIAL if entry.special else 0))
        elif token not in vocab:
            rows.append((b"", SPECIAL))
        elif style == "letters":
            rows.append((token_text(vocab[token], table), 0))
        elif style == "words":
            rows.append((_part(vocab[token]).encode(), 0))
        elif byte := BYTE.fullmatch(vocab[token]):
            rows.append((bytes.fromhex(byte[1]), 0))
        else:
            rows.append((vocab[token].replace(SPACE, " ").encode(), 0))
    return rows


def _part(text: str) -> str:
    return text.removeprefix("##") if text.startswith("##") else f" {text}"


def _token_id(tokenizer: Tokenizer | None, settings: Fields, key: str) -> int | None:
    """The id of a token that tokenizer_config.json names, as a string or as an added token."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if tokenizer is None or not isinstance(value, str):
        return None
    token: int | None = tokenizer.token_to_id(value)
    return token


def _adds_bos(
    tokenizer: Tokenizer | None, settings: Fields, bos_id: int | None, default: bool
) -> bool:
    """Whether BOS is added: by the tokenizer's post-processor, else by the config."""
    if tokenizer is None or bos_id is None:
        return False
    ids = tokenizer.encode("a").ids
    return ids[:1] == [bos_id] or settings.flag("add_bos_token", default)


def _end_id(tokenizer: Tokenizer | None) -> int | None:
    """The token that the tokenizer's post-processor puts behind a text."""
    if tokenizer is None:
        return None
    ids, plain = (tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
    return ids[-1] if len(ids) > len(plain) and ids[-1:] != plain[-1:] else None


# Where newer folders have their templates, by name: file and folder.
TEMPLATE_FILES = {
    "default": ("chat_template.jinja", ""),
    "tool_use": ("tool_use.jinja", "additional_chat_templates"),
}


def _chat_template(folder: SafetensorsFolder, settings: Fields, name: str) -> str | None:
    data = folder.text(*TEMPLATE_FILES[name])
    if data is not None:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{folder.path}: the template {name} is not UTF-8") from error
    value = settings.get("chat_template")
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    found = [v.get("template") for v in named if isinstance(v, dict) and v.get("name") == name]
    return found[-1] if found and isinstance(found[-1], str) else None
