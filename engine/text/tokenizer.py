"""Text to token ids and back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.metadata import parse_metadata
from cflow.engine.base.model_header import ModelHeader
from cflow.engine.base.native_types import TokenBytes

Span = tuple[int, int]  # characters of a text, from the first to before the second


class Tokenizer:
    """The tokenizer of a model file.

    Encoding takes about linear time, for long runs of one character too, and releases the GIL: call
    it in a thread for long texts.
    """

    def __init__(
        self, tokenizer_json: bytes, token_bytes: TokenBytes, metadata: Mapping[str, Any]
    ) -> None:
        self._token_bytes = token_bytes
        known = parse_metadata(metadata, len(token_bytes))
        self._encoder = (
            _Encoder(tokenizer_json, token_bytes, f"{known.chat_template}{known.tool_template}")
            if tokenizer_json
            else None
        )
        self.n_tokens = len(token_bytes)
        self.bos_id = known.bos_id
        self.eos_ids = known.eos_ids
        self.adds_bos = known.add_bos

    @classmethod
    def of(cls, header: ModelHeader) -> Tokenizer:
        return cls(header.tokenizer_json, header.token_bytes, header.metadata)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        trusted: Sequence[Span] | None = None,
        begins: bool = True,
    ) -> list[int]:
        """add_bos: put the BOS token first, if the model wants one and the text does not spell it.
        begins: False for text that continues another, which gets no space in front (SentencePiece).

        trusted: the spans, in order, in which text that spells a control token becomes that token;
        None means all of the text. Elsewhere such text is encoded like any other."""
        if self._encoder is None:
            raise ModelError("the model file has no tokenizer; send token ids")
        trusted = [(0, len(text))] if trusted is None else trusted
        ids = self._encoder.encode(text, trusted, begins)
        bos = self.bos_id
        if add_bos and self.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; b"" for an unknown id."""
        return self._token_bytes[token] if 0 <= token < self.n_tokens else b""

    def is_special(self, token: int) -> bool:
        return 0 <= token < self.n_tokens and self._token_bytes.is_special(token)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        shown = (id for id in ids if not (skip_special and self.is_special(id)))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


class _Encoder:
    """Encodes text, with control tokens only in trusted spans of it.

    Control tokens are the special tokens, and those others that the chat template writes, such as
    Qwen's <tool_call>. Here each has a secret spelling, which no text contains. A copy of the
    tokenizer with the real spellings finds control tokens in the trusted spans; their spellings are
    replaced by the secret ones, and then the whole text is encoded at once. So the text between two
    control tokens is encoded as it would be without this border.
    """

    def __init__(self, tokenizer_json: bytes, token_bytes: TokenBytes, template: str) -> None:
        try:
            source = msgspec.json.decode(tokenizer_json)
            # The file may carry settings from training.
            source |= {"truncation": None, "padding": None, "post_processor": None}
            control = {
                token["content"]
                for token in source["added_tokens"]
                if _is_control(token, token_bytes, template)
            }
            key = secrets.token_hex(16)
            self._secret = {spelling: f"<{key}:{i}>" for i, spelling in enumerate(sorted(control))}
            self._finder = _load(_without_model(source, f"<{key}>"))
            found = self._finder.get_added_tokens_decoder()
            self._control = {
                id: token.content for id, token in found.items() if token.content in control
            }
            source = _renamed(source, self._secret)
            self._tokenizer = self._continuing = _load(source)
            steps = {key: source.get(key) for key in ("normalizer", "pre_tokenizer")}
            bare = {key: _without_prefix(step) for key, step in steps.items()}
            if bare != steps:
                self._continuing = _load(source | bare)
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"the model file's tokenizer cannot be read: {error}") from error

    def encode(self, text: str, trusted: Sequence[Span], begins: bool) -> list[int]:
        tokenizer = self._tokenizer if begins else self._continuing
        try:
            hidden = self._hide(text, trusted)
            # Only the batch methods release the GIL.
            (encoding,) = tokenizer.encode_batch_fast([hidden], add_special_tokens=False)
        except TypeError as error:  # the only one possible for a str
            message = "the text is not Unicode: it holds half of a surrogate pair"
            raise EngineError("invalid_request", message) from error
        ids: list[int] = encoding.ids
        return ids

    def _hide(self, text: str, trusted: Sequence[Span]) -> str:
        """The text with the secret spellings of the control tokens in its trusted spans."""
        parts, done = [], 0
        for spelling, start, end in self._find(text, trusted):
            parts += [text[done:start], self._secret[spelling]]
            done = end
        return "".join([*parts, text[done:]])

    def _find(self, text: str, trusted: Sequence[Span]) -> Iterator[tuple[str, int, int]]:
        """The control tokens in the trusted spans: spelling, start, end."""
        spans = [text[start:end] for start, end in trusted]
        for (first, _), found in zip(
            trusted, self._finder.encode_batch(spans, add_special_tokens=False), strict=True
        ):
            # The offsets of a token that removes white space beside it include that space.
            for id, (start, end) in zip(found.ids, found.offsets, strict=True):
                if id in self._control:
                    yield self._control[id], first + start, first + end


def _is_control(token: Mapping[str, Any], token_bytes: TokenBytes, template: str) -> bool:
    spelling, id = token["content"], token["id"]
    if token["special"] or (id < len(token_bytes) and token_bytes.is_special(id)):
        return True
    return bool(spelling.strip()) and spelling in template


def _without_model(source: Mapping[str, Any], unknown: str) -> dict[str, Any]:
    """A tokenizer that finds the added tokens of `source`; all other text is `unknown`."""
    model = {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown}
    return {**source, "model": model, "pre_tokenizer": None, "decoder": None}


def _without_prefix(step: Any) -> Any:
    """A step of normalising or cutting text, without the space in front of text; None for no step."""
    if not isinstance(step, Mapping):
        return step
    if step.get("type") == "Prepend":
        return None
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    changed = {key: off.get(key, value) for key, value in step.items()}
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            changed[key] = [part for part in map(_without_prefix, step[key]) if part is not None]
    return changed


def _renamed(source: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer with the tokens in `names` spelt otherwise. A secret spelling is matched before
    the text is normalised."""
    added = [_renamed_token(token, names) for token in source["added_tokens"]]
    return {**source, "added_tokens": added, "model": _renamed_model(source["model"], names)}


def _renamed_token(token: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    if token["content"] not in names:
        return token
    return {**token, "content": names[token["content"]], "normalized": False}


def _renamed_model(model: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    vocab = model["vocab"]  # ids by piece; in Unigram, pieces with scores in the order of ids
    is_unigram = isinstance(vocab, list)
    if names.keys().isdisjoint((piece for piece, _ in vocab) if is_unigram else vocab):
        return model
    changed = dict(model)
    if is_unigram:
        changed["vocab"] = [(names.get(piece, piece), score) for piece, score in vocab]
    else:
        changed["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    if (unknown := model.get("unk_token")) is not None:
        changed["unk_token"] = names.get(unknown, unknown)
    if "merges" in model:  # those of a control token would make it of its parts
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        changed["merges"] = [p for p in pairs if names.keys().isdisjoint((*p, "".join(p)))]
    return changed


def _load(source: Mapping[str, Any]) -> Any:
    return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(source))
