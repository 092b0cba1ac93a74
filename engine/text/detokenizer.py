"""Token ids to text, one at a time, whole code points only."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from cflow.engine.base.native_types import TokenBytes

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decoder of one answer's tokens.

    The pieces, joined, equal the answer's bytes decoded at once with errors="replace": bytes of an
    incomplete code point are held until the next token, invalid bytes become U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes, shown: Collection[int] = ()) -> None:
        """shown: special tokens whose text is part of the answer."""
        self._table = token_bytes
        self._shown = shown
        self._decoder = _new_decoder("replace")

    def push(self, token: int, *, show_special: bool = False) -> str:
        """The text that this token completes; "" for other special tokens and ids without text."""
        table = self._table
        if token >= len(table):
            return ""
        if table.is_special(token) and not show_special and token not in self._shown:
            return ""
        return self._decoder.decode(table[token])

    def flush(self) -> str:
        """The end of the text: U+FFFD if a code point is incomplete, else ""."""
        return self._decoder.decode(b"", final=True)
