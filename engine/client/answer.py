"""One request as its caller sees it: an iterator that ends, or raises, exactly once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Progress


class Outbox:
    """What has come for a request and was not read yet; at most its max_tokens for each choice."""

    __slots__ = ("_events", "_waiter", "error", "key", "n_ahead", "n_open")

    def __init__(self, n_choices: int, key: str = "") -> None:
        self.key = key  # whose request
        self.n_open = n_choices  # choices without a Finish
        self.error: EngineError | None = None
        self.n_ahead: int | None = None  # in the queue
        self._events: deque[Delta | Progress] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return not self.n_open or self.error is not None

    def put(self, event: Delta | Progress) -> None:
        if isinstance(event, Delta) and event.finish is not None:
            self.n_open -= 1
        self._events.append(event)
        self._wake()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delta | Progress:
        """The next event; after the last EngineError if the request failed, StopAsyncIteration else."""
        while not self._events:
            if self.error is not None:
                raise self.error
            if not self.n_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()


class Answer:
    """Deltas of all choices as they come, with Progress while the prompt is computed. Ends when
    every choice has finished; EngineError if the request fails. For one reader.

    Call cancel() in a `finally`; an answer that nobody holds any more cancels itself.
    """

    def __init__(self, request_id: int, outbox: Outbox, cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._outbox = outbox
        self._cancel = cancel

    @property
    def n_ahead(self) -> int | None:
        """Requests that go first, while this one waits and as far as is known."""
        return self._outbox.n_ahead

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta | Progress:
        return await self._outbox.get()

    def cancel(self) -> None:
        """The engine stops working on it. No effect once it is over."""
        if not self._outbox.is_over:
            self._cancel(self.request_id)

    def __del__(self) -> None:
        self.cancel()
