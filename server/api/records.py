"""Times and counts of answers, for the histograms of /metrics and for `timings`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cflow.engine.base.messages import Delta, Progress
from cflow.server.metrics import Metrics

OnEnd = Callable[["AnswerRecord"], None]


class AnswerRecord:
    """Times and counts of the answer to one prompt.

    Times are of time.perf_counter(), 0 until they are known. on_end is called when the answer
    ends."""

    def __init__(
        self,
        metrics: Metrics,
        n_prompt: int,
        n_choices: int,
        max_tokens: int,
        on_end: OnEnd | None = None,
    ) -> None:
        self._metrics = metrics
        self._on_end = on_end
        self._last = [0.0] * n_choices
        self.arrived = time.perf_counter()
        self.reasons: list[str] = []  # of choices that ended
        self.n_prompt = n_prompt
        self.n_cached = 0
        self.n_done = 0  # prompt tokens computed or cached
        self.n_tokens = [0] * n_choices  # generated tokens, by choice
        self.started = 0.0  # prefill
        self.first = 0.0  # end of prefill, which is the first token
        self.last = 0.0  # the latest token
        self.ended = 0.0
        metrics.received.inc(n_choices)
        metrics.prompt_tokens.observe(n_prompt)
        metrics.n_choices.observe(n_choices)
        metrics.max_tokens.observe(max_tokens)

    def advance(self, progress: Progress) -> None:
        """Note progress with the prompt."""
        if not self.started:
            self.started = time.perf_counter()
            self.n_cached = progress.n_done
        self.n_done = progress.n_done

    def add(self, delta: Delta) -> None:
        now = time.perf_counter()
        if delta.n_cached is not None:
            self.n_cached = delta.n_cached
        if not self.first and (delta.tokens or delta.n_cached is not None):
            self.first = self.last = now
            self.started = self.started or self.arrived
            self.n_done = self.n_prompt
        if delta.tokens:
            if not any(self.n_tokens):
                self._metrics.first_token_s.observe(now - self.arrived)
            if self.n_tokens[delta.choice]:
                self._metrics.between_tokens_s.observe(now - self._last[delta.choice])
            self._last[delta.choice] = self.last = now
            self.n_tokens[delta.choice] += len(delta.tokens)
            self._metrics.tokens.add(len(delta.tokens))
        if delta.finish is not None:
            self.finish(delta.finish.reason)

    def end(self, reason: str) -> None:
        """Note the end. reason: of the choices that have not finished."""
        metrics, now = self._metrics, time.perf_counter()
        self.finish(reason, len(self.n_tokens) - len(self.reasons))
        metrics.whole_s.observe(now - self.arrived)
        for n_tokens in self.n_tokens:
            metrics.generation_tokens.observe(n_tokens)
        metrics.most_generation_tokens.observe(max(self.n_tokens))
        if self.first:
            self._observe_phases(now)
        self.ended = now
        if self._on_end is not None:
            self._on_end(self)

    def finish(self, reason: str, n: int = 1) -> None:
        """Note the end of n choices."""
        self.reasons += [reason] * n
        self._metrics.over[reason].inc(n)
        self._metrics.finished.add(n)

    def _observe_phases(self, now: float) -> None:
        metrics = self._metrics
        metrics.queue_s.observe(self.started - self.arrived)
        metrics.prefill_s.observe(self.first - self.started)
        metrics.decode_s.observe(now - self.first)
        metrics.inference_s.observe(now - self.started)
        n_after_first = max(self.n_tokens) - 1
        if n_after_first > 0:
            metrics.per_token_s.observe((self.last - self.first) / n_after_first)


def progress_of(record: AnswerRecord) -> dict[str, float]:
    """Progress with the prompt, under llama-server's names."""
    return {
        "total": record.n_prompt,
        "cache": record.n_cached,
        "processed": record.n_done,
        "time_ms": 1e3 * (time.perf_counter() - record.started),
    }


def timings_of(records: Sequence[AnswerRecord]) -> dict[str, float | None]:
    """Counts and times under llama-server's names, summed over the prompts.

    The first token comes with the prompt, so predicted_ms and the speeds count those after it."""
    begun = [record for record in records if record.first]
    n_cached = sum(record.n_cached for record in begun)
    n_prompt = sum(record.n_prompt for record in begun) - n_cached
    prompt_ms = 1e3 * sum(record.first - record.started for record in begun)
    predicted_ms = 1e3 * sum(record.last - record.first for record in begun)
    counts = [n for record in begun for n in record.n_tokens if n]
    n_later = sum(counts) - len(counts)
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, n_prompt),
        "prompt_per_second": _ratio(1e3 * n_prompt, prompt_ms),
        "predicted_n": sum(counts),
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, n_later),
        "predicted_per_second": _ratio(1e3 * n_later, predicted_ms),
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if a and b else None
