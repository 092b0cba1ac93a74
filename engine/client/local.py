"""An engine on this machine: a model in a worker process, restarted when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

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
from cflow.engine.client.answer import LocalAnswer, Outbox
from cflow.engine.client.card import ModelCard, read_card
from cflow.engine.client.engine import REFUSALS, GenerateRequest, State, Status, refusal
from cflow.engine.client.totals import Totals
from cflow.engine.client.watchdog import Watchdog
from cflow.engine.client.worker_process import COMMAND, WorkerProcess, describe_exit

TICK_S = 1.0  # between ticks of the watchdog
FIRST_DELAY_S = 0.5  # before a restart; it doubles each time
LAST_DELAY_S = 30.0
LONG_LIFE_S = 30.0  # a worker that lived this long resets the delay
GRACE_S = 2.0  # for a worker to exit by itself
FAULTS = 3  # consecutive requests that failed to read weights before the engine is failing
FAULT_S = 30.0  # after the last such request until the engine is no longer failing

log = logging.getLogger("cflow.engine")


class LocalEngine:
    """The `Engine` in a worker process.

    Use: `engine = await LocalEngine.start(config)`, submit(), iterate over the answers, close().

    If the worker dies or hangs, its requests fail and a new one is started.
    """

    def __init__(
        self, config: EngineConfig, card: ModelCard, command: Sequence[str] = COMMAND
    ) -> None:
        self.config = config
        self.card = card
        self.state: State = "loading"
        self.ready: Ready | None = None  # from the current worker, once it is ready
        self.loading: Loading | None = None  # its progress until then
        self.failure: EngineError | None = None  # why the last worker ended
        self.restarts = 0
        self._command = command
        self._totals = Totals()
        self._n_faults = 0  # consecutive
        self._last_fault = 0.0
        self._outboxes: dict[int, Outbox] = {}
        self._n_requests = 0
        self._worker: WorkerProcess | None = None
        self._watchdog = Watchdog(tick_s=TICK_S, stuck_s=config.stuck_s)
        self._fatal: EngineError | None = None  # the error with which the current worker ended
        self._was_ready = False
        self._changed = asyncio.Event()  # set when state or failure changes
        self._supervisor: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> LocalEngine:
        """Read the model's header (raises ModelError) and start a worker that loads it."""
        card = await asyncio.to_thread(read_card, config)
        engine = cls(config, card)
        engine.launch()
        return engine

    def launch(self) -> None:
        """Start the worker; start() calls it."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> Ready:
        """Wait for the worker; return its facts. Raises EngineError if it cannot start."""
        while self.ready is None:
            if self.failure is not None and not self._was_ready:
                raise self.failure
            if self.state in ("draining", "closed"):
                raise refusal(self.state)
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    @property
    def status(self) -> Status:
        return Status(
            state=self.state,
            ready=self.ready,
            loading=self.loading,
            restarts=self.restarts,
            queue_depth=self.queue_depth,
            is_failing=self.is_failing,
        )

    @property
    def stats(self) -> Stats:
        """Counters over all workers so far, gauges of the current one."""
        return self._totals.stats

    @property
    def queue_depth(self) -> int:
        """Open choices beyond those that can run at once."""
        return max(0, self._n_answers - self.config.max_sequences)

    @property
    def _n_answers(self) -> int:
        return sum(outbox.n_open for outbox in self._outboxes.values())

    @property
    def capacity(self) -> int:
        """Choices that can run and wait together."""
        return self.config.max_sequences + self.config.max_queue

    @property
    def is_failing(self) -> bool:
        """Whether consecutive requests have failed because weights cannot be read."""
        age_s = time.monotonic() - self._last_fault
        return self._n_faults >= FAULTS and age_s < FAULT_S

    # ---- requests ----

    async def submit(self, request: GenerateRequest) -> list[LocalAnswer]:
        if self.card.pooling is not None:
            message = f"{self.card.name} is a model for embeddings; it does not generate text"
            raise EngineError("invalid_request", message)
        return self._submit(request)

    async def embed(self, request: GenerateRequest) -> list[LocalAnswer]:
        if self.card.pooling is None:
            message = f"{self.card.name} is not a model for embeddings"
            raise EngineError("invalid_request", message)
        sampling = [
            SamplingParams(max_tokens=0, pooling=self.card.pooling, n_experts=params.n_experts)
            for params in request.sampling
        ]
        return self._submit(replace(request, sampling=sampling))

    def _submit(self, request: GenerateRequest) -> list[LocalAnswer]:
        self._check_room(request)
        worker = self._worker
        if self.state != "ready" or worker is None:
            raise refusal(self.state)
        if request.n_choices < 1:
            message = f"n_choices is {request.n_choices}; it must be at least 1"
            raise EngineError("invalid_request", message)
        for prompt, sampling in zip(request.prompts, request.sampling, strict=True):
            self._check_prompt(prompt, sampling)
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        return [
            self._send_prompt(worker, request, index, deadline)
            for index in range(len(request.prompts))
        ]

    def _send_prompt(
        self, worker: WorkerProcess, request: GenerateRequest, index: int, deadline: float | None
    ) -> LocalAnswer:
        n_choices = request.n_choices
        request_id = self._n_requests
        self._n_requests += 1
        worker.send(
            Submit(
                request_id,
                tuple(request.prompts[index]),
                n_choices,
                request.sampling[index],
                request.key,
                request.priority,
                index * n_choices,
                deadline,
            )
        )
        outbox = self._outboxes[request_id] = Outbox(n_choices, request.key)
        return LocalAnswer(request_id, outbox, self._cancel)

    def _check_room(self, request: GenerateRequest) -> None:
        """Raise EngineError if the queue has no room for all choices of the request."""
        n_answers = request.n_answers
        most = (self.capacity + 1) // 2 if request.shares_queue else self.capacity
        if n_answers > most:
            room = f"{most} for one of several API keys" if request.shares_queue else f"{most}"
            message = f"{n_answers} answers in one request; this server has room for {room}"
            raise EngineError("too_many_answers", message)
        n_free = self.capacity - self._n_answers - n_answers
        if n_free < 0:
            raise EngineError(
                "queue_full",
                f"{self.queue_depth} answers are waiting and {n_answers} more are requested; at most "
                f"{self.config.max_queue} may wait",
            )
        if request.shares_queue:
            self._check_share(request.key, n_answers, n_free)

    def _check_share(self, key: str, n_answers: int, n_free: int) -> None:
        """Raise EngineError if a key would hold more places than it leaves to others.

        So one key gets at most half of the queue, two a third each, and the rest is free for
        others. The last answer does not count: otherwise the last free place could never be used.
        """
        n_held = sum(outbox.n_open for outbox in self._outboxes.values() if outbox.key == key)
        if n_held + n_answers - 1 > n_free:
            raise EngineError(
                "key_queue_full",
                f"this API key has {n_held} answers running or waiting and requests {n_answers} more, "
                f"which would leave {n_free} places for all other keys",
            )

    def _check_prompt(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raise EngineError for a prompt that would make the step fail for all requests."""
        n_tokens = self.card.tokenizer.n_tokens
        named = (*sampling.logit_bias, *sampling.stop_token_ids)
        context = self.ready.max_context if self.ready else self.card.context
        if not prompt or min(prompt) < 0 or max(prompt) >= n_tokens:
            text = f"the prompt must be token ids in 0..{n_tokens - 1}, at least one"
        elif named and (min(named) < 0 or max(named) >= n_tokens):
            text = f"logit_bias and stop_token_ids must name token ids in 0..{n_tokens - 1}"
        elif context - len(prompt) < min(sampling.max_tokens, 1):
            text = f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}"
        else:
            return
        raise EngineError("invalid_request", text)

    def _cancel(self, request_id: int) -> None:
        """Cancel a request. Callable from any thread, since the garbage collector may call it."""
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
            log.info("the worker is ready again, loaded in %.1f s", ready.load_s)
        self._was_ready = True
        if self.state not in ("draining", "closed"):
            self._set_state("ready")
        for note in ready.notes:
            log.warning("%s", note)

    # ---- starting and watching the worker ----

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
            if self._was_ready:  # otherwise wait_ready raises it and its caller decides
                log.error("%s; starting again in %g s", self.failure, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _live_once(self) -> EngineError:
        """Start a worker and watch it until it ends; return why it ended."""
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
        how = describe_exit(status)
        return self._fatal or EngineError("worker_died", f"the worker ended ({how})")

    async def _watch(self, worker: WorkerProcess) -> str | None:
        """Wait until the worker ends (returns None) or hangs (returns a description)."""
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await worker.ended.wait()
                return None
            except TimeoutError:
                if trouble := self._watchdog.tick():
                    return trouble

    def _lose_worker(self, state: State, code: str, text: str) -> None:
        """Fail the requests of a lost worker at once, before its process is reaped."""
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
        """Let running requests finish for timeout_s seconds, and close."""
        if self._worker is not None and self.state == "ready":
            self._set_state("draining")
            self._worker.send(Drain(timeout_s))
            assert self._supervisor is not None
            await asyncio.wait([self._supervisor], timeout=timeout_s + GRACE_S)
        await self.close()

    async def close(self) -> None:
        """Fail running requests and end the worker. May be called again."""
        self._set_state("closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        worker = self._worker
        if worker is not None:
            self._lose_worker("closed", *REFUSALS["closed"])
            await worker.reap(GRACE_S)
        self.card.close()
