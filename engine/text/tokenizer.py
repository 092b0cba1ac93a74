"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.metadata import parse_metadata
from cflow.engine.base.model_header import ModelHeader
from cflow.engine.base.native_types import TokenBytes


class Tokenizer:
    """The tokenizer of a model file.

    Encoding takes about linear time, for long runs of one character too, and releases the GIL: call
    it in a thread for long texts. Text that spells a special token becomes that token, as in Hugging
    Face's tokenizers: chat templates depend on it, and raw prompts may use it.
    """

    def __init__(
        self, tokenizer_json: bytes, token_bytes: TokenBytes, metadata: Mapping[str, Any]
    ) -> None:
        self._token_bytes = token_bytes
        self._encoder = _read(tokenizer_json) if tokenizer_json else None
        known = parse_metadata(metadata, len(token_bytes))
        self.n_tokens = len(token_bytes)
        self.bos_id = known.bos_id
        self.eos_ids = known.eos_ids
        self.adds_bos = known.add_bos

    @classmethod
    def of(cls, header: ModelHeader) -> Tokenizer:
        return cls(header.tokenizer_json, header.token_bytes, header.metadata)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """add_bos: put the BOS token first, if the model wants one and the text does not spell it."""
        if self._encoder is None:
            raise ModelError("the model file has no tokenizer; send token ids")
        try:
            # Only the batch methods release the GIL.
            (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # the only one possible for a str
            message = "the text is not Unicode: it holds half of a surrogate pair"
            raise EngineError("invalid_request", message) from error
        ids: list[int] = encoding.ids
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


def _read(tokenizer_json: bytes) -> Any:
    try:
        encoder = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the model file's tokenizer cannot be read: {error}") from error
    # The file may carry these settings from training.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
