"""The `Engine` interface: what the server asks of an engine, wherever it runs.

`LocalEngine` (local.py) runs a model in a worker process of this machine; the tests' fake needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Loading, Progress, Ready, SamplingParams, Stats
from cflow.engine.client.card import ModelCard

State = Literal["loading", "ready", "draining", "restarting", "stuck", "closed"]

# Code and text of the error that refuses a request in each state but "ready".
REFUSALS: dict[State, tuple[str, str]] = {
    "loading": ("loading", "the model is still loading"),
    "restarting": ("worker_died", "the engine is being restarted"),
    "stuck": ("worker_stuck", "the engine does not answer and is being restarted"),
    "draining": ("draining", "the server is shutting down"),
    "closed": ("draining", "the server is shutting down"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """All prompts and choices of one request.

    prompts: token ids. sampling: parameters of each prompt. key: name of the API key that asks;
    shares_queue: whether other keys share the queue with it. priority: smaller numbers go first.
    timeout_s: seconds after which unfinished choices end with the finish TIMED_OUT.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    n_choices: int = 1
    key: str = ""
    shares_queue: bool = False
    priority: int = 0
    timeout_s: float | None = None

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n_choices


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of an engine.

    ready: facts of the running worker, None until it is loaded. loading: its progress until then.
    queue_depth: choices beyond those that can run at once. is_failing: requests fail one after
    the other because weights cannot be read.
    """

    state: State
    ready: Ready | None
    loading: Loading | None
    restarts: int
    queue_depth: int
    is_failing: bool


class Answer(Protocol):
    """The choices of one prompt: an iterator of their deltas, with Progress during the prompt.

    It ends when every choice has had its Finish, or raises EngineError once. For one reader, who
    calls cancel() when it stops reading.
    """

    @property
    def n_ahead(self) -> int | None:
        """Requests that run before this one; None if it runs already or this is not known."""

    def __aiter__(self) -> Answer: ...

    async def __anext__(self) -> Delta | Progress: ...

    def cancel(self) -> None:
        """Stop working on this answer. No effect once it has ended."""


class Engine(Protocol):
    """A model that generates or embeds. Use from one event loop."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def status(self) -> Status: ...

    @property
    def stats(self) -> Stats:
        """Totals since the start, which never fall, and gauges of the running worker."""

    async def submit(self, request: GenerateRequest) -> Sequence[Answer]:
        """Accept all prompts of a request and return an answer for each, or accept none.

        Raises EngineError "loading", "worker_died", "worker_stuck", "draining", "queue_full",
        "key_queue_full", "too_many_answers" (more than can ever run and wait together) or
        "invalid_request".
        """

    async def embed(self, request: GenerateRequest) -> Sequence[Answer]:
        """As submit(), for a model for embeddings: the only Delta of each answer has the pooled state
        of its prompt, not normalised. Of the sampling parameters only n_experts counts."""

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded. Raises EngineError if the first attempt fails or the
        engine is closed."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish for timeout_s seconds, and close."""

    async def close(self) -> None:
        """Fail what runs and free everything. May be called again."""


def refusal(state: State) -> EngineError:
    """The error that refuses a request in this state."""
    return EngineError(*REFUSALS[state])
