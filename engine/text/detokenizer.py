"""Token ids to text, one at a time, whole code points only."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from cflow.engine.base.native_types import TokenBytes

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Joined pieces equal the answer's bytes decoded at once with errors="replace": bytes of an
    unfinished code point wait for the next token, bytes that can never become one are U+FFFD."""

    def __init__(self, token_bytes: TokenBytes, shown: Collection[int] = ()) -> None:
        """shown: special tokens that are text all the same."""
        self._table = token_bytes
        self._shown = shown
        self._decoder = _new_decoder("replace")

    def push(self, token: int, *, show_special: bool = False) -> str:
        """The text that is complete now. Special tokens and ids without text give none."""
        table = self._table
        if token >= len(table):
            return ""
        if table.is_special(token) and not show_special and token not in self._shown:
            return ""
        return self._decoder.decode(table[token])

    def flush(self) -> str:
        """What is still held: U+FFFD for an unfinished code point."""
        return self._decoder.decode(b"", final=True)
