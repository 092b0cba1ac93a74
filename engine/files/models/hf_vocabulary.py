"""A byte-level BPE tokenizer from a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from cflow.engine.base.errors import ModelError
from cflow.engine.base.metadata import GENERATION_RANGES
from cflow.engine.files.formats.safetensors import SafetensorsFolder, parse_json
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.vocabulary import (
    SPECIAL,
    Vocabulary,
    byte_characters,
    byte_vocabulary,
    check_rows,
    token_text,
)

TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "tokenizer_config.json")


def vocabulary(folder: SafetensorsFolder, vocab_size: int) -> Vocabulary:
    """tokenizer.json, with the ids that the configs name. A folder without any tokenizer file (a test
    model) gets one token a byte."""
    origin = str(folder.path)
    data = folder.text("tokenizer.json")
    configs = [_optional(folder, n) for n in ("generation_config.json", "tokenizer_config.json")]
    generation, settings = (Fields(config, origin) for config in configs)
    config = Fields(folder.config, origin)
    if data is None:
        base = _without_tokenizer(folder, vocab_size)
        tokenizer = None
    else:
        tokenizer = _tokenizer(data, f"{origin}/tokenizer.json")
        base = Vocabulary(data, _tokens(tokenizer, vocab_size, origin))
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
        add_bos=_adds_bos(tokenizer, settings, bos_id),
        end_id=_end_id(tokenizer),
        eos_ids=list(dict.fromkeys(ends)),
        pad_id=_token_id(tokenizer, settings, "pad_token"),
        chat_template=_chat_template(folder, settings, "default"),
        tool_template=_chat_template(folder, settings, "tool_use"),
        generation={key: generation.number(key) for key in GENERATION_RANGES if key in generation},
    )


def _optional(folder: SafetensorsFolder, name: str) -> dict[str, Any]:
    data = folder.text(name)
    return {} if data is None else parse_json(data, str(folder.path / name))


def _without_tokenizer(folder: SafetensorsFolder, vocab_size: int) -> Vocabulary:
    found = [name for name in TOKENIZER_FILES if (folder.path / name).exists()]
    if found:
        raise ModelError(
            f"{folder.path} has {', '.join(found)} but no tokenizer.json; only byte-level BPE in "
            "a tokenizer.json is supported"
        )
    return byte_vocabulary(vocab_size)


def _tokenizer(data: bytes, origin: str) -> Tokenizer:
    """The parsed tokenizer. Raises ModelError unless it is byte-level BPE."""
    settings = parse_json(data, origin)
    model = settings.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    decoder = settings.get("decoder")
    byte_level = isinstance(decoder, dict) and "ByteLevel" in str(decoder)
    if kind != "BPE" or not byte_level or (isinstance(model, dict) and model.get("byte_fallback")):
        raise ModelError(f"{origin}: only byte-level BPE is supported, this is {kind}")
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library has no narrower type
        raise ModelError(f"{origin}: {error}") from error


def _tokens(tokenizer: Tokenizer, vocab_size: int, origin: str) -> list[tuple[bytes, int]]:
    table = byte_characters()
    added = tokenizer.get_added_tokens_decoder()
    vocab = {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    n_tokens = max(vocab, default=-1) + 1
    check_rows(n_tokens, vocab_size, origin)  # before an absurd id makes the table huge
    rows = []
    for token in range(n_tokens):
        if token in added:
            entry = added[token]
            rows.append((entry.content.encode(), SPECIAL if entry.special else 0))
        elif token in vocab:
            rows.append((token_text(vocab[token], table), 0))
        else:
            rows.append((b"", SPECIAL))
    return rows


def _token_id(tokenizer: Tokenizer | None, settings: Fields, key: str) -> int | None:
    """The id of a token that tokenizer_config.json names, as a string or as an added token."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if tokenizer is None or not isinstance(value, str):
        return None
    token: int | None = tokenizer.token_to_id(value)
    return token


def _adds_bos(tokenizer: Tokenizer | None, settings: Fields, bos_id: int | None) -> bool:
    """Whether BOS is added: by the tokenizer's post-processor, else by the config."""
    if tokenizer is None or bos_id is None:
        return False
    ids = tokenizer.encode("a").ids
    return ids[:1] == [bos_id] or settings.flag("add_bos_token", False)


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
