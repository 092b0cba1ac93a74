"""Writing the choices of /v1/completions: echo, text, log-probabilities, token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cflow.engine.base.messages import Delta, Logprob
from cflow.engine.text.tokenizer import Tokenizer
from cflow.server.api.logprobs import (
    Legacy,
    LegacyLogprobs,
    cut_top,
    join,
    prompt_entries,
    prompt_texts,
)
from cflow.server.api.prompts import Prompt
from cflow.server.api.schemas import CompletionRequest


@dataclass(slots=True)
class Echo:
    """A prompt as its choices repeat it."""

    text: str
    arrays: Legacy | None
    n_left: int  # choices that have not started


class Choice:
    """One choice: its echo, then its text and log-probabilities, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, echo: Echo | None, *, with_logprobs: bool) -> None:
        offset = len(echo.text) if echo else 0
        self._logprobs = LegacyLogprobs(tokenizer, offset) if with_logprobs else None
        self._echo = echo
        self.has_told_prompt = False

    def add(self, delta: Delta) -> tuple[str, Legacy | None]:
        text, arrays = delta.text, None
        if self._logprobs is not None:
            is_last = delta.finish is not None
            arrays = self._logprobs.generated(delta.logprobs, is_last=is_last)
        if self._echo is not None:
            text = self._echo.text + text
            if arrays and self._echo.arrays:
                arrays = join([self._echo.arrays, arrays])
            self._echo = None
        return text, arrays


class Choices:
    """The choices of a request. Choice j of prompt i has the index i * n_choices + j."""

    def __init__(
        self, tokenizer: Tokenizer, ask: CompletionRequest, prompts: list[Prompt], n_choices: int
    ) -> None:
        self._tokenizer = tokenizer
        self._ask = ask
        self._prompts = prompts
        self._n = n_choices
        self._choices: dict[int, Choice] = {}  # that have started, by index
        self._echoes: dict[int, Echo] = {}  # of prompts with choices that have not started
        self._scores: dict[int, list[Any]] = {}  # prompt_logprobs by prompt

    def first_of(self, index: int) -> int:
        """The index of the first choice of prompt `index`."""
        return index * self._n

    def add(self, index: int, delta: Delta) -> tuple[int, str, Legacy | None]:
        """(choice index, text, arrays) for a delta of prompt `index`.

        The first delta of a choice starts with the echo, if there is one; the first delta of a
        prompt brings the prompt's log-probabilities."""
        at = self.first_of(index) + delta.choice
        n_top = self._ask.prompt_logprobs
        if n_top is not None and delta.prompt_logprobs is not None:
            self._scores[index] = prompt_entries(self._tokenizer, delta.prompt_logprobs, n_top)
        if at not in self._choices:
            echo = self._echo(index, delta.prompt_logprobs) if self._ask.echo else None
            self._choices[at] = Choice(
                self._tokenizer, echo, with_logprobs=self._ask.logprobs is not None
            )
        text, arrays = self._choices[at].add(delta)
        return at, text, arrays

    def ids(self, index: int, delta: Delta) -> dict[str, Any]:
        """Token ids of a delta of prompt `index`, with those of the prompt in the first delta of a
        choice. Call after add()."""
        choice = self._choices[self.first_of(index) + delta.choice]
        ids: dict[str, Any] = {"token_ids": delta.tokens}
        if not choice.has_told_prompt:
            choice.has_told_prompt = True
            ids["prompt_token_ids"] = self._prompts[index].ids
        return ids

    def details(self, index: int, tokens: list[int]) -> dict[str, Any]:
        """Optional fields of a whole choice of prompt `index`: token ids, prompt log-probabilities."""
        more: dict[str, Any] = {}
        if self._ask.return_token_ids:
            more |= {"prompt_token_ids": self._prompts[index].ids, "token_ids": tokens}
        if self._ask.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._scores.get(index)
        return more

    def _echo(self, index: int, logprobs: tuple[Logprob | None, ...] | None) -> Echo:
        """The echo of prompt `index`, made for its first choice and dropped after its last."""
        echo = self._echoes.get(index)
        if echo is None:
            prompt = self._prompts[index]
            texts = prompt_texts(self._tokenizer, prompt.ids, prompt.n_added)
            arrays = None
            if self._ask.logprobs is not None:
                scores = logprobs or [None] * len(texts)  # timed out before it was scored
                cut = [cut_top(entry, self._ask.logprobs) for entry in scores]
                arrays = LegacyLogprobs(self._tokenizer, 0).prompt(prompt.ids, texts, cut)
            echo = self._echoes[index] = Echo("".join(texts), arrays, self._n)
        echo.n_left -= 1
        if not echo.n_left:
            del self._echoes[index]
        return echo
