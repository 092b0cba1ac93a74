"""The text of one choice: turns its tokens into text and decides where it ends."""

from __future__ import annotations

from collections.abc import Collection

from cflow.engine.base.messages import Finish, SamplingParams
from cflow.engine.base.native_types import TokenBytes
from cflow.engine.text.detokenizer import Detokenizer
from cflow.engine.worker.stops import StopStrings

_LENGTH = Finish("length")
_END_OF_TEXT = Finish("stop")


class Transcript:
    """limit: most tokens of this choice. eos_ids: ids that end an answer of this model."""

    def __init__(
        self,
        params: SamplingParams,
        token_bytes: TokenBytes,
        eos_ids: Collection[int],
        limit: int,
    ) -> None:
        self._params = params
        self._detokenizer = Detokenizer(token_bytes, frozenset(params.shown_ids))
        self._stops = StopStrings(params.stop, include_stop=params.include_stop)
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = limit
        self.n_tokens = 0

    def push(self, token: int, *, is_last: bool = False) -> tuple[str, Finish | None]:
        """Text to show now, and how the choice ends. Before min_tokens, stop tokens are not sampled
        (sequence.py) and stop strings are ignored. is_last: the grammar is complete."""
        self.n_tokens += 1
        if token in self._stop_ids:
            return self._end_at(token), Finish("stop", token)
        if token in self._eos_ids:
            return self._end_at(token), _END_OF_TEXT
        text = self._detokenizer.push(token)
        if self.n_tokens > self._params.min_tokens:
            text = self._stops.push(text)
        if self._stops.matched is not None:
            return text, Finish("stop", self._stops.matched)
        if is_last:
            return text + self.rest(), _END_OF_TEXT
        if self.n_tokens >= self._limit:
            return text + self.rest(), _LENGTH
        return text, None

    def _end_at(self, token: int) -> str:
        if not self._params.include_stop:
            return self.rest()
        shown = self._detokenizer.push(token, show_special=True)
        return self._stops.flush() + shown + self._detokenizer.flush()

    def rest(self) -> str:
        """The text held back when the answer ends. A stop string that only this flush completes (it
        ends in U+FFFD) is still removed."""
        shown = self._stops.push(self._detokenizer.flush())
        return shown if self._stops.matched is not None else shown + self._stops.flush()
