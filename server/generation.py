"""The answers to one HTTP request, one per prompt, read as one stream, cancelled and counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cflow.engine.engine import Answer
from cflow.engine.errors import EngineError
from cflow.engine.messages import Delta, ExpertUsage, Progress
from cflow.server.metrics import Metrics


class AnswerRecord:
    """Times and counts of one answer, for the histograms."""

    def __init__(self, metrics: Metrics, n_prompt: int, n_choices: int, max_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        self._last = [0.0] * n_choices
        self._n_tokens = [0] * n_choices
        self._n_open = n_choices
        metrics.received.inc(n_choices)
        metrics.prompt_tokens.observe(n_prompt)
        metrics.n_choices.observe(n_choices)
        metrics.max_tokens.observe(max_tokens)

    def start(self) -> None:
        """The engine has begun with the prompt."""
        if self._started is None:
            self._started = time.perf_counter()

    def add(self, delta: Delta) -> None:
        now = time.perf_counter()
        if delta.tokens:
            if self._first is None:
                self._first = now
                self._metrics.first_token_s.observe(now - self._arrived)
            if self._n_tokens[delta.choice]:
                self._metrics.between_tokens_s.observe(now - self._last[delta.choice])
            self._last[delta.choice] = now
            self._n_tokens[delta.choice] += len(delta.tokens)
            self._metrics.tokens.add(len(delta.tokens))
        if delta.finish is not None:
            self._n_open -= 1
            self._metrics.over[delta.finish.reason].inc()

    def end(self, reason: str) -> None:
        """reason: what became of the choices that have not finished."""
        metrics, now = self._metrics, time.perf_counter()
        metrics.over[reason].inc(self._n_open)
        metrics.finished.add(1)
        metrics.whole_s.observe(now - self._arrived)
        for n_tokens in self._n_tokens:
            metrics.generation_tokens.observe(n_tokens)
        metrics.most_generation_tokens.observe(max(self._n_tokens))
        if self._first is None:
            return
        started = self._arrived if self._started is None else self._started
        metrics.queue_s.observe(started - self._arrived)
        metrics.prefill_s.observe(self._first - started)
        metrics.decode_s.observe(now - self._first)
        metrics.inference_s.observe(now - started)
        n_after_first = max(self._n_tokens) - 1
        if n_after_first > 0:
            metrics.per_token_s.observe((max(self._last) - self._first) / n_after_first)


Deltas = AsyncGenerator[tuple[int, Delta], None]  # prompt index, what one of its choices gained


class Generation:
    """answers: one per prompt. records: one per answer. n_deferred: experts of each token that the
    engine has join late."""

    def __init__(
        self, answers: Sequence[Answer], records: Sequence[AnswerRecord], n_deferred: int = 0
    ) -> None:
        self._answers = answers
        self._records = records
        self.n_deferred = n_deferred
        self.n_completion = 0
        self.n_cached = 0
        self.experts: ExpertUsage | None = None  # of the choices that have finished
        self.is_cancelled = False

    def cancel(self) -> None:
        """Nobody wants the answers any more. Harmless at any time."""
        self.is_cancelled = True
        for answer in self._answers:
            answer.cancel()

    async def deltas(self) -> Deltas:
        """(prompt index, what one of its choices gained), until all are finished or cancelled.

        Raises EngineError when one fails; the others are cancelled then."""
        try:
            source = self._read(0) if len(self._answers) == 1 else self._merge()
            async with aclosing(source):
                async for index, delta in source:
                    self.n_completion += len(delta.tokens)
                    self.n_cached += delta.n_cached or 0
                    if delta.experts is not None:
                        self.experts = delta.experts + self.experts
                    yield index, delta
        finally:
            for answer in self._answers:
                answer.cancel()

    async def _read(self, index: int) -> Deltas:
        record = self._records[index]
        otherwise = "abort"
        try:
            async for event in self._answers[index]:
                record.start()
                if not isinstance(event, Progress):
                    record.add(event)
                    yield index, event
        except EngineError:
            if self.is_cancelled:
                return
            otherwise = "error"
            raise
        finally:
            record.end(otherwise)

    async def _merge(self) -> Deltas:
        queue: asyncio.Queue[tuple[int, Delta] | EngineError | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._read(index)) as source:
                    async for item in source:
                        queue.put_nowait(item)
                queue.put_nowait(None)
            except EngineError as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._answers))]
        try:
            n_open = len(tasks)
            while n_open:
                item = await queue.get()
                if item is None:
                    n_open -= 1
                elif isinstance(item, EngineError):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
