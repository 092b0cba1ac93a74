"""The answers to one HTTP request, merged into one stream, counted, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import TIMED_OUT, Delta, DiskUsage, Progress
from cflow.engine.client.engine import Answer
from cflow.server.api.records import AnswerRecord, progress_of, timings_of

Events = AsyncGenerator[tuple[int, Delta | Progress], None]  # prompt index, event
Deltas = AsyncGenerator[tuple[int, Delta], None]


class Generation:
    """answers, records: one a prompt. n_experts: that a token uses, 0 if the model has none;
    n_deferred: of these, how many land a layer late."""

    def __init__(
        self,
        answers: Sequence[Answer],
        records: Sequence[AnswerRecord],
        *,
        n_experts: int,
        n_deferred: int,
    ) -> None:
        self._answers = answers
        self._records = records
        self._open = {
            (i, j) for i, record in enumerate(records) for j in range(len(record.n_tokens))
        }
        self._n_choices = len(self._open)
        self.n_prompt = sum(record.n_prompt for record in records)
        self.n_experts = n_experts
        self.n_deferred = n_deferred
        self.n_completion = 0
        self.n_cached = 0
        self.n_reasoning = 0  # tokens; the route counts them
        self.disk: DiskUsage | None = None  # of finished choices
        self.is_cancelled = False
        self._is_ended = False  # finish() ended a choice

    def cancel(self) -> None:
        """Cancel all answers. May be called at any time."""
        self.is_cancelled = True
        for answer in self._answers:
            answer.cancel()

    def finish(self, choice: int) -> None:
        """End a choice of the only prompt here: what would follow of it is dropped, and if it is the
        last one that runs, the engine stops. No effect if it has ended."""
        if (0, choice) in self._open:
            self._open.remove((0, choice))
            self._records[0].finish("stop")
            self._is_ended = True

    @property
    def is_over(self) -> bool:
        """Whether every choice has finished."""
        return not self._open

    def timings(self) -> dict[str, float | None]:
        return timings_of(self._records)

    def progress(self, index: int) -> dict[str, float]:
        """Progress with prompt `index`."""
        return progress_of(self._records[index])

    def state(self) -> str:
        """What the client waits for: the queue or the prompts; "" during the answer."""
        if not any(record.started for record in self._records):
            ahead = [n for answer in self._answers if (n := answer.n_ahead) is not None]
            return f"in the queue, {min(ahead)} ahead" if ahead else "in the queue"
        n_done = sum(record.n_done for record in self._records)
        return f"{n_done} of {self.n_prompt} prompt tokens" if n_done < self.n_prompt else ""

    async def deltas(self) -> Deltas:
        """events() without Progress."""
        async with aclosing(self.events()) as events:
            async for index, event in events:
                if not isinstance(event, Progress):
                    yield index, event

    async def events(self) -> Events:
        """(prompt index, Progress or Delta), until all choices have finished or are cancelled.

        If an answer fails, cancels the others and raises EngineError."""
        try:
            source = self._read(0) if len(self._answers) == 1 else self._merge()
            async with aclosing(source):
                async for index, event in source:
                    if not isinstance(event, Progress):
                        self._count(index, event)
                    yield index, event
                    if self._is_ended and self.is_over:
                        return
        finally:
            for answer in self._answers:
                answer.cancel()

    def _count(self, index: int, delta: Delta) -> None:
        is_empty = not self.n_completion and len(self._open) == self._n_choices
        if delta.finish == TIMED_OUT and is_empty and not delta.tokens:
            raise EngineError("timeout", "timeout_s ended before the first token")
        self.n_completion += len(delta.tokens)
        self.n_cached += delta.n_cached or 0
        if delta.disk is not None:
            self.disk = delta.disk + self.disk
        if delta.finish is not None:
            self._open.discard((index, delta.choice))

    async def _read(self, index: int) -> Events:
        record = self._records[index]
        otherwise = "abort"
        try:
            async for event in self._answers[index]:
                if isinstance(event, Progress):
                    record.advance(event)
                elif (index, event.choice) not in self._open:
                    continue
                else:
                    record.add(event)
                yield index, event
        except EngineError:
            if self.is_cancelled:
                return
            otherwise = "error"
            raise
        finally:
            record.end(otherwise)

    async def _merge(self) -> Events:
        queue: asyncio.Queue[tuple[int, Delta | Progress] | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._read(index)) as source:
                    async for item in source:
                        queue.put_nowait(item)
                queue.put_nowait(None)
            except Exception as error:  # bugs too, otherwise the reader would wait forever
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._answers))]
        try:
            n_open = len(tasks)
            while n_open:
                item = await queue.get()
                if item is None:
                    n_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
