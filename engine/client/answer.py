"""The answer to one prompt, from messages of the worker to an iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Progress


class Outbox:
    """Events of an answer that have arrived and are not read yet: at most max_tokens a choice."""

    __slots__ = ("_events", "_waiter", "error", "key", "n_ahead", "n_open")

    def __init__(self, n_choices: int, key: str = "") -> None:
        self.key = key  # whose request it is, for fair sharing
        self.n_open = n_choices  # choices that are not finished
        self.error: EngineError | None = None
        self.n_ahead: int | None = None  # requests that run before this one, None if not known
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
        """Wait for the next event.

        After the last one, raises EngineError if the request failed, else StopAsyncIteration.
        """
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


class LocalAnswer:
    """An `Answer` from a worker process. Cancels itself when it is garbage-collected."""

    def __init__(self, request_id: int, outbox: Outbox, cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._outbox = outbox
        self._cancel = cancel

    @property
    def n_ahead(self) -> int | None:
        return self._outbox.n_ahead

    def __aiter__(self) -> LocalAnswer:
        return self

    async def __anext__(self) -> Delta | Progress:
        return await self._outbox.get()

    def cancel(self) -> None:
        if not self._outbox.is_over:
            self._cancel(self.request_id)

    def __del__(self) -> None:
        self.cancel()
