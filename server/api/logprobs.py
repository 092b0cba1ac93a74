"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypedDict

from msgspec.structs import replace

from cflow.engine.base.messages import Logprob
from cflow.engine.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no -Infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


def cut_top(entry: Logprob | None, n_top: int) -> Logprob | None:
    """The entry with its n_top best alternatives only."""
    return None if entry is None else replace(entry, top=entry.top[:n_top])


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a single token; `bytes:\\xNN...` if its bytes are not whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Legacy(TypedDict):
    """The arrays of /v1/completions, with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenTexts:
    """The characters that each token adds to a text; joined, they are the text.

    A token that ends inside a character adds nothing; the token that completes the character adds
    it. A hidden special token adds nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, *, is_last: bool, show_special: bool) -> str:
        hidden = self._tokenizer.is_special(token) and not show_special
        raw = b"" if hidden else self._tokenizer.token_bytes(token)
        return self._decoder.decode(raw, final=is_last)


def prompt_texts(tokenizer: Tokenizer, ids: Sequence[int], n_added: int) -> list[str]:
    """Texts of a prompt's tokens. Special tokens are shown, except the first n_added."""
    texts = TokenTexts(tokenizer)
    return [
        texts.add(token, is_last=i == len(ids) - 1, show_special=i >= n_added)
        for i, token in enumerate(ids)
    ]


class LegacyLogprobs:
    """Builds the arrays of one choice piece by piece. text_offset counts characters of the returned
    text."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        """offset: characters of the echo in front."""
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._offset = offset

    def _add(self, out: Legacy, token: int, text: str, logprob: Logprob | None) -> None:
        """Append one token. text: what it adds; a special token that adds nothing is listed by name."""
        name = text
        if not text and self._tokenizer.is_special(token):
            name = token_name(self._tokenizer, token)
        out["tokens"].append(name)
        out["text_offset"].append(self._offset)
        self._offset += len(text)
        if logprob is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            return
        out["token_logprobs"].append(_finite(logprob.logprob))
        out["top_logprobs"].append(self._top(name, logprob))

    def _top(self, name: str, logprob: Logprob) -> dict[str, float]:
        """The best tokens by text, and the token itself, which wins if another is spelled like it."""
        top: dict[str, float] = {}
        for token, value in logprob.top:
            spelled = name if token == logprob.token else token_name(self._tokenizer, token)
            top.setdefault(spelled, _finite(value))
        top[name] = _finite(logprob.logprob)
        return top

    def prompt(
        self, ids: Iterable[int], texts: Iterable[str], logprobs: Iterable[Logprob | None]
    ) -> Legacy:
        out = Legacy(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, text, logprob in zip(ids, texts, logprobs, strict=True):
            self._add(out, token, text, logprob)
        return out

    def generated(self, logprobs: Sequence[Logprob], *, is_last: bool) -> Legacy:
        out = Legacy(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for i, logprob in enumerate(logprobs):
            is_end = is_last and i == len(logprobs) - 1
            text = self._texts.add(logprob.token, is_last=is_end, show_special=False)
            self._add(out, logprob.token, text, logprob)
        return out


def join(parts: Iterable[Legacy]) -> Legacy:
    out = Legacy(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for part in parts:
        out["tokens"] += part["tokens"]
        out["token_logprobs"] += part["token_logprobs"]
        out["top_logprobs"] += part["top_logprobs"]
        out["text_offset"] += part["text_offset"]
    return out


def prompt_entries(
    tokenizer: Tokenizer, logprobs: Iterable[Logprob | None], n_top: int
) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's prompt_logprobs: for each token but the first, its own entry and the n_top best."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank + 1, "decoded_token": text}

    def entries(own: Logprob) -> dict[int, dict[str, Any]]:
        top = {token: entry(token, p, rank) for rank, (token, p) in enumerate(own.top[:n_top])}
        return {own.token: entry(own.token, own.logprob, own.rank)} | top

    return [None if own is None else entries(own) for own in logprobs]


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """The `content` list of logprobs in /v1/chat/completions."""
    return [
        _chat_token(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.top]}
        for entry in logprobs
    ]


def split_at_text(
    entries: list[dict[str, Any]], text: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Entries of chat_logprobs as those whose bytes are in this text, and those behind it.

    The text is the last piece of theirs that was given out: what stands before it belongs to marks,
    reasoning or calls. If their bytes do not have it, as a hidden token stands within it, all of
    them are its own."""
    ends = list(accumulate(len(entry["bytes"]) for entry in entries))
    start = b"".join(bytes(entry["bytes"]) for entry in entries).rfind(text.encode())
    if start < 0:
        return entries, []
    first = bisect_right(ends, start)
    last = bisect_left(ends, start + len(text.encode())) + 1
    return entries[first:last], entries[last:]
