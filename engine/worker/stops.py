"""Stop strings in streamed text, found even when they span several pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until the first stop string is complete; of several that end at one character,
    the longest counts. Holds back only a suffix that can still become a stop string, so the result
    does not depend on how the text is split."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        by_length = sorted((stop for stop in stops if stop), key=len, reverse=True)
        self._patterns = [_Pattern(stop) for stop in by_length]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text to show now. Call no more after a match (see .matched)."""
        if not self._patterns:
            return text
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            char = text[end - 1]
            # A list, not any(): every pattern must see every character.
            complete = [pattern for pattern in self._patterns if pattern.advance(char)]
            if complete:
                self.matched = complete[0].text
                self._held = ""
                return text[: end if self._include_stop else end - len(self.matched)]
        n_held = max(pattern.n_matched for pattern in self._patterns)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth-Morris-Pratt. n_matched: length of the longest prefix of `text` that ends the input."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.n_matched = 0
        # (len(text),) longest proper prefix of text that is also a suffix of text[: i + 1]
        self._borders = [0] * len(text)
        for i in range(1, len(text)):
            self._borders[i] = self._extend(self._borders[i - 1], text[i])

    def advance(self, char: str) -> bool:
        self.n_matched = self._extend(self.n_matched, char)
        return self.n_matched == len(self.text)

    def _extend(self, n: int, char: str) -> int:
        while n and self.text[n] != char:
            n = self._borders[n - 1]
        return n + 1 if self.text[n] == char else 0
