"""The worker's loop: take messages, choose rows, run the step, sample, make text, send one Step.

Before it, the worker receives Hello and sends Loading until the model is Ready. It sleeps while
there is nothing to do.
"""

from __future__ import annotations

import faulthandler
import logging
import socket
import sys
import time
from heapq import heappop, heappush

import msgspec
import numpy as np

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import (
    PROTOCOL,
    TIMED_OUT,
    Cancel,
    Delta,
    Down,
    Drain,
    Failed,
    Fatal,
    Finish,
    Heartbeat,
    Hello,
    Loading,
    Logprob,
    Progress,
    Step,
    Submit,
)
from cflow.engine.base.native_types import Choice
from cflow.engine.native import const
from cflow.engine.text.jail import ignore_signals
from cflow.engine.worker.batch import Advance, Batch, Draw
from cflow.engine.worker.constraint import Compiled, Constraint, Grammars
from cflow.engine.worker.link import Link
from cflow.engine.worker.loading import Load, Loaded, load
from cflow.engine.worker.pace import Pace
from cflow.engine.worker.runner import Runner
from cflow.engine.worker.scheduler import Scheduler
from cflow.engine.worker.sequence import Request, Sequence
from cflow.engine.worker.stats import StatsKeeper
from cflow.engine.worker.transcript import Transcript

CANCELLED = ("cancelled", "the request was cancelled")
DRAINING = ("draining", "the server is shutting down")
NO_TOKEN = "logit_bias, min_tokens, stop tokens and grammar together allow no token"
STATUS_TEXT = {
    const.Status.EINVAL: ("invalid_request", NO_TOKEN),
    const.Status.EIO: ("io_error", "weights could not be read from disk"),
    const.Status.EFORMAT: ("io_error", "weights could not be read from disk"),
    const.Status.ENUMERIC: ("numeric", "the model's output is not finite for this request"),
}
READING_S = 0.5  # interval of Stats from an idle worker with reads in flight

log = logging.getLogger("cflow.worker")


class Worker:
    """The loop and the state of all requests. Only the main thread uses it, except for the two
    methods that the link calls."""

    def __init__(self, link: Link, config: EngineConfig, loaded: Loaded) -> None:
        self._link = link
        self._loaded = loaded
        ready = loaded.ready
        self._pace = Pace(
            config.max_step_ms / 1000,
            config.max_step_tokens,
            reads_disk=bool(ready.n_experts or ready.n_layers),
        )
        self._scheduler = Scheduler(
            n_blocks=ready.n_kv_blocks,
            max_sequences=config.max_sequences,
            max_context=ready.max_context,
            pace=self._pace,
            max_logits=config.max_logits if config.speculation != "off" else 0,
        )
        self._runner = Runner(loaded.context)
        self._stats = StatsKeeper(self._scheduler, loaded.context, loaded.disk_stats)
        self._grammars = Grammars(loaded.vocabulary) if loaded.vocabulary else None
        self._compiling: dict[int, Submit] = {}  # requests whose grammars are not ready
        self._n_requests = 0
        self._drain_deadline: float | None = None
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, request id)
        self._in_step: dict[int, Request] = {}  # of the running step; replaced, never modified
        self._cancelled: set[int] = set()  # requests cancelled during that step
        link.heartbeat = self._heartbeat
        link.on_cancel = self._cancel_step

    def run(self) -> None:
        """Run until drained. The link ends the process if the front end is gone."""
        self._tell()
        while not self._is_drained():
            for message in self._link.receive(self._patience()):
                self._take(message)
            self._expire()
            self._step()
            self._tell()
            if self._loaded.experts:
                self._loaded.experts.save()
        if self._loaded.experts:
            self._loaded.experts.save(at_once=True)

    def _patience(self) -> float | None:
        """Seconds to wait for messages; None: without limit."""
        if self._scheduler.n_running or self._scheduler.n_waiting or self._drain_deadline:
            return 0
        return READING_S if self._stats.is_reading else None

    def _tell(self) -> None:
        if stats := self._stats.due(self._scheduler.n_running):
            self._link.send(stats)
        if line := self._stats.line_due():
            self._link.send(line)

    # ---- called by the link's thread ----

    def _heartbeat(self) -> Heartbeat:
        self._cancel_unwanted()
        return Heartbeat(self._loaded.context.stage_count, bool(self._in_step))

    def _cancel_step(self, request_id: int) -> None:
        self._cancelled.add(request_id)
        self._cancel_unwanted()

    def _cancel_unwanted(self) -> None:
        """Cancel the running step if each of its requests is cancelled or out of time.

        A cancel that comes while the step begins may miss it; the next heartbeat repeats it. If it
        hits a later step instead, that step is scheduled again.
        """
        requests, now = self._in_step.values(), time.monotonic()
        if requests and all(
            request.id in self._cancelled or _is_late(request, now) for request in requests
        ):
            self._loaded.context.cancel()

    # ---- messages ----

    def _take(self, message: Down | Compiled) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Compiled):
            self._begin_compiled(message)
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, Drain):
            self._drain_deadline = time.monotonic() + message.timeout_s

    def _submit(self, submit: Submit) -> None:
        if submit.sampling.grammar is None:
            self._begin(submit, [None] * submit.n_choices)
        elif self._grammars is None:
            self._refuse(submit.request_id, "this model has no tokenizer with an end token")
        else:
            self._compiling[submit.request_id] = submit
            self._grammars.compile(submit, self._link.post)

    def _begin_compiled(self, compiled: Compiled) -> None:
        submit = self._compiling.pop(compiled.request_id, None)
        if submit is None:  # cancelled while compiling
            return
        if compiled.fault:
            self._refuse(submit.request_id, compiled.fault)
        else:
            self._begin(submit, compiled.constraints)

    def _refuse(self, request_id: int, fault: str) -> None:
        text = f"the grammar cannot be used: {fault}"
        self._link.send(Failed(request_id, "invalid_request", text))

    def _begin(self, submit: Submit, grammars: list[Constraint] | list[None]) -> None:
        request = Request(submit, self._n_requests)
        self._n_requests += 1
        sampling = submit.sampling
        limit = min(sampling.max_tokens, self._loaded.ready.max_context - len(submit.prompt))
        eos_ids = self._loaded.eos_ids
        for choice, grammar in enumerate(grammars):
            transcript = Transcript(sampling, self._loaded.token_bytes, eos_ids, limit)
            request.sequences.append(Sequence(request, choice, eos_ids, transcript, grammar))
        self._scheduler.add(request)
        if submit.deadline is not None:
            heappush(self._deadlines, (submit.deadline, request.id))

    def _cancel(self, request_id: int) -> None:
        if self._compiling.pop(request_id, None):
            self._link.send(Failed(request_id, *CANCELLED))
            self._stats.cancelled["queue"] += 1
            return
        request = self._scheduler.find(request_id)
        if request is not None:  # else it has just ended
            phase = self._fail(request, *CANCELLED)
            self._stats.cancelled[phase] += 1

    def _fail(self, request: Request, code: str, text: str) -> str:
        self._link.send(Failed(request.id, code, text))
        return self._scheduler.remove(request)

    def _expire(self) -> None:
        """End the requests that have passed their deadlines; they keep their text."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, request_id = heappop(self._deadlines)
            request = self._scheduler.find(request_id)
            if request is not None:
                deltas = tuple(_time_out(sequence) for sequence in request.sequences)
                self._scheduler.remove(request)
                self._link.send(Step(deltas))

    def _is_drained(self) -> bool:
        if self._drain_deadline is None:
            return False
        if time.monotonic() >= self._drain_deadline:
            for request in self._scheduler.requests:
                self._fail(request, *DRAINING)
            for request_id in self._compiling:
                self._link.send(Failed(request_id, *DRAINING))
            self._compiling.clear()
        return not (self._scheduler.requests or self._compiling)

    # ---- a step ----

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        if not batch.n_rows:
            return
        if batch.admitted:
            self._announce(batch)
        requests = {chunk.sequence.request.id: chunk.sequence.request for chunk in batch.chunks}
        self._in_step = requests
        try:
            self._run(batch)
        except Exception as error:
            if isinstance(error, EngineError) and error.code == "cancelled":
                return  # its Cancel ends the request; other requests are scheduled again
            log.exception("a step of %d rows failed", batch.n_rows)
            code = error.code if isinstance(error, EngineError) else "internal"
            for request in requests.values():
                if self._scheduler.find(request.id):
                    self._fail(request, code, f"the step failed: {error}")
        finally:
            self._in_step = {}
            self._cancelled.clear()

    def _run(self, batch: Batch) -> None:
        started = time.perf_counter()
        result = self._runner.step(batch)
        self._pool(batch)
        advance = self._scheduler.advance(batch, result)
        self._runner.copy(advance.copies)
        for request, row in advance.failed:
            self._fail_row(request, result.status[row], self._runner.row_error(row))
        deltas = self._sample(advance)
        deltas += [delta for s in advance.done if (delta := self._end_scoring(s))]
        n_prefill = batch.n_rows - batch.n_decodes
        progress = _progress(batch) if n_prefill else ()
        if deltas or progress:
            self._link.send(Step(tuple(deltas), progress))
        seconds = time.perf_counter() - started
        self._pace.observe(batch.n_decodes, n_prefill, seconds)
        self._stats.count_step(seconds, sum(len(delta.tokens) for delta in deltas))

    def _pool(self, batch: Batch) -> None:
        """Add the states of rows to the embeddings that they are part of."""
        for chunk in batch.chunks:
            pooling = chunk.sequence.request.submit.sampling.pooling
            last = chunk.first + chunk.n - 1
            if pooling == "mean":
                for i in range(chunk.n):
                    chunk.sequence.pool(chunk.first + i, self._runner.state(chunk.row + i))
            elif pooling == "last" and last == chunk.sequence.n_prompt - 1:
                chunk.sequence.pool(last, self._runner.state(chunk.row + chunk.n - 1))

    def _announce(self, batch: Batch) -> None:
        """Report the requests that left the queue, before their first step."""
        begun = [s for s in batch.admitted if not s.request.is_prompt_done]
        if begun:
            progress = tuple(Progress(s.request.id, s.n_computed) for s in begun)
            self._link.send(Step((), progress))

    def _fail_row(self, request: Request, status: int, detail: str = "") -> None:
        if self._scheduler.find(request.id):
            code, text = STATUS_TEXT.get(status, ("internal", f"a row failed with status {status}"))
            if detail:
                text += f": {detail}"
                log.error("%s", text)
            self._fail(request, code, text)

    def _sample(self, advance: Advance) -> list[Delta]:
        self._prepare_masks(advance.draws)
        draws = [draw for draw in advance.draws if self._scheduler.find(draw.sequence.request.id)]
        deltas: dict[Sequence, Delta] = {}
        while draws:
            drawn = zip(draws, self._runner.sample(draws), strict=True)
            draws = [then for each in drawn if (then := self._take_choice(*each, deltas))]
        return list(deltas.values())

    def _take_choice(
        self, draw: Draw, choice: Choice, deltas: dict[Sequence, Delta]
    ) -> Draw | None:
        """Add a token to its sequence and to the sequence's delta. Returns the next draw if the
        token equals a draft."""
        sequence = draw.sequence
        if choice.status:
            self._fail_row(sequence.request, choice.status)
        elif self._scheduler.find(sequence.request.id):
            try:
                following = self._scheduler.take(draw, choice.token)
                delta = self._accept(sequence, choice)
            except EngineError as error:
                self._fail_alone(sequence.request, error)
            else:
                deltas[sequence] = deltas[sequence] + delta if draw.n_accepted else delta
                return following if delta.finish is None else None
        return None

    def _prepare_masks(self, draws: list[Draw]) -> None:
        """Wait for the masks of sequences with a grammar. Requests whose grammar fails end."""
        for draw in draws:
            if draw.sequence.grammar is not None:
                try:
                    draw.sequence.prepare_mask()
                except EngineError as error:
                    self._fail_alone(draw.sequence.request, error)

    def _fail_alone(self, request: Request, error: EngineError) -> None:
        if self._scheduler.find(request.id):
            self._fail(request, error.code, str(error))

    def _accept(self, sequence: Sequence, choice: Choice) -> Delta:
        is_last = sequence.grammar is not None and sequence.grammar.append(choice.token)
        text, finish = sequence.transcript.push(choice.token, is_last=is_last)
        score = choice.score
        logprobs = (Logprob(*score),) if score is not None else ()
        if finish is not None:
            self._scheduler.finish(sequence)
        request = sequence.request
        is_first = sequence.choice == 0 and sequence.transcript.n_tokens == 1
        return Delta(
            request.id,
            sequence.choice,
            (choice.token,),
            text,
            logprobs,
            finish,
            request.n_cached if is_first else None,
            _prompt_logprobs(request) if is_first else None,
            sequence.disk if finish is not None else None,
        )

    def _end_scoring(self, sequence: Sequence) -> Delta | None:
        """End a request for zero tokens after its prompt."""
        embedding = sequence.embedding()
        if embedding is not None and not np.isfinite(np.frombuffer(embedding, "<f4")).all():
            self._fail(sequence.request, *STATUS_TEXT[const.Status.ENUMERIC])
            return None
        self._scheduler.finish(sequence)
        request, is_first = sequence.request, sequence.choice == 0
        return Delta(
            request.id,
            sequence.choice,
            finish=Finish("length"),
            n_cached=request.n_cached if is_first else None,
            prompt_logprobs=_prompt_logprobs(request) if is_first else None,
            disk=sequence.disk,
            embedding=embedding,
        )


def _is_late(request: Request, now: float) -> bool:
    deadline = request.submit.deadline
    return deadline is not None and deadline <= now


def _time_out(sequence: Sequence) -> Delta:
    return Delta(
        sequence.request.id,
        sequence.choice,
        text=sequence.transcript.rest(),
        finish=TIMED_OUT,
        disk=sequence.disk,
    )


def _prompt_logprobs(request: Request) -> tuple[Logprob | None, ...] | None:
    if request.submit.sampling.n_prompt_logprobs is None:
        return None
    return (None, *request.prompt_scores)


def _progress(batch: Batch) -> tuple[Progress, ...]:
    return tuple(
        Progress(chunk.sequence.request.id, chunk.sequence.n_computed)
        for chunk in batch.chunks
        if chunk.n > 1 and not chunk.sequence.request.is_prompt_done
    )


def serve(sock: socket.socket, load: Load) -> int:
    """Run a worker on its end of the socket until it is drained; returns the exit status."""
    link = Link(sock)
    try:
        hello = _await_hello(link)
        config = msgspec.convert(hello.engine, EngineConfig)
        loaded = load(config, hello.digest, lambda *progress: link.send(Loading(*progress)))
    except EngineError as error:
        link.send(Fatal(error.code, str(error)))
        return 1
    except Exception as error:
        log.exception("the model could not be loaded")
        link.send(Fatal("internal", f"{type(error).__name__}: {error}"))
        return 1
    worker = Worker(link, config, loaded)
    link.send(loaded.ready)
    worker.run()
    return 0


def _await_hello(link: Link) -> Hello:
    (hello,) = link.receive(None)
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
        raise EngineError("internal", f"expected Hello of protocol {PROTOCOL}, got {hello!r}")
    return hello


def main(fd: int) -> None:
    """Serve on the inherited socket `fd`, then exit."""
    ignore_signals()
    faulthandler.enable()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    sys.exit(serve(socket.socket(fileno=fd), load))
