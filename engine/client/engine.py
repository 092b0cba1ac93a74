"""The front end's handle of a model that runs in a worker process."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import (
    PROTOCOL,
    Cancel,
    Delta,
    Drain,
    Failed,
    Heartbeat,
    Hello,
    Line,
    Loading,
    Progress,
    Ready,
    SamplingParams,
    Stats,
    Step,
    Submit,
    Up,
)
from cflow.engine.client.answer import Answer, Outbox
from cflow.engine.client.card import ModelCard, read_card
from cflow.engine.client.totals import Totals
from cflow.engine.client.watchdog import Watchdog
from cflow.engine.client.worker_process import COMMAND, WorkerProcess

__all__ = ["Answer", "Engine", "ModelCard"]

State = Literal["loading", "ready", "draining", "restarting", "stuck", "closed"]

TICK_S = 1.0
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 30.0
LONG_LIFE_S = 30.0  # a worker that was ready for so long starts the delays anew
GRACE_S = 2.0
FAULTS = 3  # requests in a row that the disk failed, before it counts as broken
FAULT_S = 30.0  # since the last one: then it may have healed

REFUSALS = {
    "loading": ("loading", "the model is still loading"),
    "restarting": ("worker_died", "the engine is being restarted"),
    "stuck": ("worker_stuck", "the engine hangs and is being restarted"),
    "draining": ("draining", "the engine is shutting down"),
    "closed": ("draining", "the engine is shut down"),
}

log = logging.getLogger("cflow.engine")


class Engine:
    """Use from one event loop: `engine = await Engine.start(config)`, submit, iterate the answers,
    close(). A worker that dies or hangs is replaced; what it was doing fails."""

    def __init__(
        self, config: EngineConfig, card: ModelCard, command: Sequence[str] = COMMAND
    ) -> None:
        self.config = config
        self.card = card
        self.state: State = "loading"
        self.ready: Ready | None = None  # of the running worker
        self.loading: Loading | None = None  # while it loads
        self.failure: EngineError | None = None  # why the last worker ended
        self.restarts = 0
        self._command = command
        self._totals = Totals()
        self._n_faults = 0  # in a row
        self._last_fault = 0.0
        self._outboxes: dict[int, Outbox] = {}
        self._n_requests = 0
        self._worker: WorkerProcess | None = None
        self._watchdog = Watchdog(tick_s=TICK_S, stuck_s=config.stuck_s)
        self._fatal: EngineError | None = None  # the last word of this worker
        self._was_ready = False
        self._changed = asyncio.Event()  # state or failure
        self._supervisor: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Reads the model's header (ModelError if that is not possible) and lets a worker load it in
        the background."""
        card = await asyncio.to_thread(read_card, config)
        engine = cls(config, card)
        engine.launch()
        return engine

    def launch(self) -> None:
        """Starts the worker. start() does it."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> Ready:
        """EngineError if the model cannot be loaded at the first attempt, or the engine is closed."""
        while self.ready is None:
            if self.failure is not None and not self._was_ready:
                raise self.failure
            if self.state in ("draining", "closed"):
                raise EngineError(*REFUSALS[self.state])
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    @property
    def stats(self) -> Stats:
        """Totals of all workers so far, gauges of this one."""
        return self._totals.stats

    @property
    def queue_depth(self) -> int:
        """Answers (choices of requests) beyond those that can run at once."""
        return max(0, self._n_answers - self.config.max_sequences)

    @property
    def _n_answers(self) -> int:
        return sum(outbox.n_open for outbox in self._outboxes.values())

    @property
    def capacity(self) -> int:
        """Answers that can run or wait."""
        return self.config.max_sequences + self.config.max_queue

    @property
    def is_failing(self) -> bool:
        """One request after the other finds weights that cannot be read."""
        age_s = time.monotonic() - self._last_fault
        return self._n_faults >= FAULTS and age_s < FAULT_S

    # ---- requests ----

    def submit(
        self,
        prompt: Sequence[int],
        *,
        n_choices: int = 1,
        sampling: SamplingParams,
        key: str = "",
        priority: int = 0,
        place: int = 0,
        timeout_s: float | None = None,
    ) -> Answer:
        """key: whose request, for fairness; priority: smaller goes first; place: how many answers of
        the same request were submitted before, each lets others by; timeout_s: after so long what is
        not finished ends with TIMED_OUT. EngineError: "loading", "worker_died", "worker_stuck",
        "draining", "queue_full" or "invalid_request"."""
        if self.state != "ready" or self._worker is None:
            raise EngineError(*REFUSALS[self.state])
        self.check_room(n_choices)
        self._check(prompt, n_choices, sampling)
        request_id = self._n_requests
        self._n_requests += 1
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._worker.send(
            Submit(request_id, tuple(prompt), n_choices, sampling, key, priority, place, deadline)
        )
        outbox = self._outboxes[request_id] = Outbox(n_choices, key)
        return Answer(request_id, outbox, self._cancel)

    def check_room(self, n_answers: int, key: str | None = None) -> None:
        """EngineError "queue_full" if so many more may not wait. key: one of several, which share the
        room: "key_queue_full" if it would hold more answers than it leaves free."""
        n_free = self.capacity - self._n_answers - n_answers
        if n_free < 0:
            raise EngineError(
                "queue_full",
                f"{self.queue_depth} answers are waiting, and {n_answers} more are asked for; at most "
                f"{self.config.max_queue} may wait",
            )
        if key is not None:
            self._check_share(key, n_answers, n_free)

    def _check_share(self, key: str, n_answers: int, n_free: int) -> None:
        """So one key alone gets half of the room, two a third each, and what is left is for those that
        come. The last answer does not count, or the last free place would be nobody's."""
        n_held = sum(outbox.n_open for outbox in self._outboxes.values() if outbox.key == key)
        if n_held + n_answers - 1 > n_free:
            raise EngineError(
                "key_queue_full",
                f"this API key has {n_held} answers running or waiting, and {n_answers} more are asked "
                f"for: that would leave {n_free} places to all other keys",
            )

    def _check(self, prompt: Sequence[int], n_choices: int, sampling: SamplingParams) -> None:
        """One bad id would fail the step of everybody."""
        n_tokens = self.card.tokenizer.n_tokens
        ids = (*sampling.logit_bias, *sampling.stop_token_ids)
        context = self.ready.max_context if self.ready else self.card.context
        room = context - len(prompt)
        if not prompt or min(prompt) < 0 or max(prompt) >= n_tokens:
            text = f"the prompt must be token ids in 0..{n_tokens - 1}, at least one"
        elif ids and (min(ids) < 0 or max(ids) >= n_tokens):
            text = f"logit_bias and stop_token_ids must name token ids in 0..{n_tokens - 1}"
        elif room < min(sampling.max_tokens, 1):
            text = f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}"
        elif n_choices < 1:
            text = f"n_choices is {n_choices}; it must be at least 1"
        else:
            return
        raise EngineError("invalid_request", text)

    def _cancel(self, request_id: int) -> None:
        """From any thread: the garbage collector's may be any."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_cancel, request_id)

    def _send_cancel(self, request_id: int) -> None:
        if request_id in self._outboxes and self._worker is not None:
            self._worker.send(Cancel(request_id))

    # ---- messages from the worker ----

    def _receive(self, message: Up) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Heartbeat):
            self._watchdog.beat(message)
        elif isinstance(message, Line):
            self._place(message)
        elif isinstance(message, Stats):
            self._totals.update(message)
        elif isinstance(message, Failed):
            self._count_fault(message.code)
            if outbox := self._outboxes.pop(message.request_id, None):
                outbox.fail(EngineError(message.code, message.message))
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Ready):
            self._become_ready(message)
        else:
            self._fatal = EngineError(message.code, message.message)

    def _count_fault(self, code: str) -> None:
        if code == "io_error":
            self._n_faults += 1
            self._last_fault = time.monotonic()

    def _deliver(self, step: Step) -> None:
        outboxes = self._outboxes
        events: tuple[Delta | Progress, ...] = (*step.progress, *step.deltas)
        for event in events:
            outbox = outboxes.get(event.request_id)
            if outbox is None:
                continue
            outbox.put(event)
            if outbox.is_over:
                self._n_faults = 0
                del outboxes[event.request_id]

    def _place(self, line: Line) -> None:
        for n_ahead, request_id in enumerate(line.request_ids):
            if outbox := self._outboxes.get(request_id):
                outbox.n_ahead = n_ahead

    def _become_ready(self, ready: Ready) -> None:
        self.ready, self.loading, self.failure = ready, None, None
        if self._was_ready:
            log.info("the worker answers again, loaded in %.1f s", ready.load_s)
        self._was_ready = True
        if self.state not in ("draining", "closed"):
            self._set_state("ready")
        for note in ready.notes:
            log.warning("%s", note)

    # ---- the worker's lives ----

    def _set_state(self, state: State) -> None:
        self.state = state
        self._changed.set()

    async def _supervise(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            started = time.monotonic()
            self.failure = await self._live_once()
            if self.state in ("draining", "closed"):
                return
            self._set_state("restarting")
            self.restarts += 1
            if time.monotonic() - started > LONG_LIFE_S:
                delay_s = FIRST_DELAY_S
            if self._was_ready:  # else wait_ready tells it, and its caller decides
                log.error("%s; starting again in %g s", self.failure, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _live_once(self) -> EngineError:
        """One worker from its start to its end: why it ended."""
        self._fatal = None
        self._watchdog = Watchdog(tick_s=TICK_S, stuck_s=self.config.stuck_s)
        try:
            worker = self._worker = await WorkerProcess.spawn(self._command, self._receive)
        except OSError as error:
            return EngineError("worker_died", f"the worker cannot be started: {error}")
        worker.send(Hello(PROTOCOL, asdict(self.config), self.card.digest))
        trouble = await self._watch(worker)
        if trouble is not None:
            self._lose_worker("stuck", "worker_stuck", f"the engine hung: {trouble}")
            worker.kill()
        else:
            self._lose_worker("restarting", "worker_died", "the engine died while answering")
        status = await worker.reap(GRACE_S)
        if trouble is not None:
            return EngineError("worker_stuck", f"the worker hung: {trouble}")
        return self._fatal or EngineError("worker_died", f"the worker ended {_describe(status)}")

    async def _watch(self, worker: WorkerProcess) -> str | None:
        """Until the worker is gone (None) or in trouble (what)."""
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await worker.ended.wait()
                return None
            except TimeoutError:
                if trouble := self._watchdog.tick():
                    return trouble

    def _lose_worker(self, state: State, code: str, text: str) -> None:
        """At once, before the process is reaped: nobody waits for what will not come."""
        self._worker = self.ready = self.loading = None
        self._totals.end_worker()
        self._n_faults = 0
        outboxes, self._outboxes = self._outboxes, {}
        if self.state in ("draining", "closed"):
            code, text = REFUSALS[self.state]
        else:
            self._set_state(state)
        for outbox in outboxes.values():
            outbox.fail(EngineError(code, text))

    # ---- the end ----

    async def drain(self, timeout_s: float) -> None:
        """Takes no more, lets what runs finish for timeout_s, and closes."""
        if self._worker is not None and self.state == "ready":
            self._set_state("draining")
            self._worker.send(Drain(timeout_s))
            assert self._supervisor is not None
            await asyncio.wait([self._supervisor], timeout=timeout_s + GRACE_S)
        await self.close()

    async def close(self) -> None:
        """What runs fails; no worker is left. May be called again."""
        self._set_state("closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        worker = self._worker
        if worker is not None:
            self._lose_worker("closed", *REFUSALS["closed"])
            await worker.reap(GRACE_S)
        if self.card.template is not None:
            self.card.template.close()
        self.card.grammars.close()


def _describe(status: int) -> str:
    """An exit status as a person says it."""
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
