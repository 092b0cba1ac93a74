"""Chooses the rows of each step: decodes first, then chunks of prompts, some of them new.

Bookkeeping only, without a model. The worker calls schedule(), runs the batch, and reports the
result to advance(); a cancelled step is scheduled again. A prompt gets all its blocks when it is
admitted, so only decodes can run out of blocks. Then the sequence last in rank is preempted: it
keeps its tokens, loses its blocks, and waits at the front of the queue. Random numbers depend only
on (seed, choice, index), so preemption does not change an answer.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from cflow.engine.base.limits import MAX_DRAFTS
from cflow.engine.base.messages import Logprob
from cflow.engine.base.native_types import Score, StepResult
from cflow.engine.memory.kv_blocks import BLOCK, BlockPool, n_blocks_for
from cflow.engine.worker.batch import Advance, Batch, Chunk, Draw
from cflow.engine.worker.drafts import Lookup, count_drafts, may_pay
from cflow.engine.worker.pace import Pace
from cflow.engine.worker.sequence import Request, Sequence
from cflow.engine.worker.waiting import WaitingLine, turn

Phase = Literal["queue", "prefill", "decode"]


@dataclass(slots=True)
class Counters:
    """Totals. prefix_queries and prefix_hits: prompt tokens looked up in the prefix cache and
    found, once per request even if it is preempted. preemptions_memory: those because blocks ran
    out; the others freed a slot. draft_rounds: steps that checked drafts, counted per sequence.
    accepted_at: accepted drafts by position, the first draft first."""

    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    preemptions_memory: int = 0
    draft_rounds: int = 0
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)


class Scheduler:
    """n_blocks must hold one sequence of max_context tokens, so that the first in rank can always
    run. max_logits: most rows of a step that keep logits; 0: no drafts."""

    def __init__(
        self,
        *,
        n_blocks: int,
        max_sequences: int,
        max_context: int,
        pace: Pace,
        max_logits: int = 0,
    ) -> None:
        assert n_blocks >= n_blocks_for(max_context)
        self.pool = BlockPool(n_blocks)
        self.counters = Counters()
        self._pace = pace
        self._max_context = max_context
        self._max_logits = max_logits
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._waiting = WaitingLine()
        self._running: list[Sequence] = []  # by rank
        self._requests: dict[int, Request] = {}
        self._n_turns = 0
        self._forked: list[Sequence] = []  # since the last step; blocks not bound yet

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Add a request. Only its first choice waits; the others fork from it."""
        if not request.submit.place:
            self._n_turns += 1
        request.turn = self._n_turns
        self._requests[request.id] = request
        self._waiting.open(request.submit.key)
        self._waiting.add(request.sequences[0])

    def find(self, request_id: int) -> Request | None:
        return self._requests.get(request_id)

    @property
    def requests(self) -> list[Request]:
        return list(self._requests.values())

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def line(self) -> list[int]:
        """Ids of requests with waiting sequences, the next to run first."""
        return self._waiting.order()

    def remove(self, request: Request) -> Phase:
        """End a request in any phase; returns that phase."""
        phase = self._phase(request)
        for sequence in list(request.sequences):
            self.finish(sequence)
        return phase

    def finish(self, sequence: Sequence) -> None:
        """End one choice."""
        if sequence.slot >= 0:
            self._stop_running(sequence)
        elif sequence.is_waiting:
            self._waiting.remove(sequence)
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences:
            del self._requests[request.id]
            self._waiting.close(request.submit.key)

    @staticmethod
    def _phase(request: Request) -> Phase:
        first = request.sequences[0]
        if request.is_prompt_done:
            return "decode"
        return "prefill" if first.slot >= 0 else "queue"

    # ---- a step ----

    def schedule(self) -> Batch:
        """The next step, without rows if there is nothing to do."""
        batch = Batch(rebound=self._forked)
        self._forked = []
        self._make_way()
        n_preempted = self.counters.preemptions
        self._add_decodes(batch)
        if len(batch.chunks) < len(self._running) or self.n_waiting:  # else all sequences decode
            room = self._pace.n_prefill_rows(batch.n_rows)
            if self.counters.preemptions == n_preempted:
                self._admit(batch, room)
            self._add_prefills(batch, room)
        return batch

    def _make_way(self) -> None:
        """If all slots are taken, preempt at most one sequence for the first in the queue: one of
        lower priority, of a later turn, or of a key that holds more slots. Its blocks stay in the
        prefix cache until they are evicted."""
        first = None if self._slots else self._waiting.first()
        if first is None:
            return
        held = Counter(sequence.request.submit.key for sequence in self._running)
        victim = max(self._running, key=lambda s: _claim(s, held))
        own, other = first.request.submit, victim.request.submit
        is_between_keys = own.priority == other.priority and own.key != other.key
        if is_between_keys and held[own.key] + 1 >= held[other.key]:
            return  # it would be preempted for the other key next
        if self._waiting.rank(first) < self._waiting.rank(victim):
            self._preempt(victim)

    def _add_decodes(self, batch: Batch) -> None:
        decodes = [
            sequence
            for sequence in self._running.copy()
            if sequence.slot >= 0 and sequence.n_pending == 1 and self._grow(sequence, batch)
        ]
        for sequence, drafts in zip(decodes, self._draft(decodes), strict=True):
            batch.add(sequence, 1, self._fit(sequence, drafts, batch) if drafts else ())
        batch.n_decodes = batch.n_rows

    def _draft(self, decodes: list[Sequence]) -> list[tuple[int, ...]]:
        """Drafts to check for each decode. One row stays reserved for every sequence that runs or
        can start."""
        n = len(decodes)
        room = self._max_logits - len(self._running) - min(self.n_waiting, len(self._slots))
        room = min(room, self._pace.n_draft_rows(n))
        if not n or room <= 0 or not may_pay(n, self._pace):
            return [()] * n
        odds = [self._look_up(sequence) for sequence in decodes]
        if not any(odds):
            return [()] * n
        limits = [self._draft_limit(sequence) for sequence in decodes]
        counts = count_drafts(odds, limits, room, self._pace)
        return [
            sequence.lookup.draft(count) if sequence.lookup and count else ()
            for sequence, count in zip(decodes, counts, strict=True)
        ]

    @staticmethod
    def _look_up(sequence: Sequence) -> float:
        """Odds of the next draft; 0: none."""
        if not sequence.request.is_prompt_done or sequence.grammar is not None:
            return 0.0
        if sequence.lookup is None:
            sequence.lookup = Lookup(sequence.tokens, sequence.n_prompt)
        return sequence.lookup.follow()

    def _draft_limit(self, sequence: Sequence) -> int:
        """Upper bound on drafts: the request can still take this many tokens plus one."""
        n_prompt = sequence.n_prompt
        most = min(sequence.request.submit.sampling.max_tokens, self._max_context - n_prompt)
        return min(MAX_DRAFTS, n_prompt + most - len(sequence.tokens) - 1)

    def _fit(self, sequence: Sequence, drafts: tuple[int, ...], batch: Batch) -> tuple[int, ...]:
        """The drafts that the sequence has blocks for. It may allocate its next block early if one
        stays free for every other sequence."""
        n_tokens = len(sequence.tokens)
        is_short = n_tokens + len(drafts) > len(sequence.blocks) * BLOCK
        if is_short and self.pool.n_free > len(self._running) and self._extend(sequence, batch):
            batch.rebound.append(sequence)
        drafts = drafts[: len(sequence.blocks) * BLOCK - n_tokens]
        self.counters.draft_rounds += bool(drafts)
        self.counters.drafts += len(drafts)
        return drafts

    def _admit(self, batch: Batch, room: int) -> None:
        """Admit prompts while share_rows() has rows for another one."""
        wanted = [sequence.n_pending for sequence in self._running if sequence.n_pending > 1]
        while self._slots and (sum(wanted) < room or len(wanted) < room.bit_length()):
            sequence = self._waiting.first()
            if sequence is None or not self._place(sequence, batch):
                return
            self._waiting.remove(sequence)
            self._start_running(sequence)
            batch.admitted.append(sequence)
            wanted.append(sequence.n_pending)

    def _add_prefills(self, batch: Batch, room: int) -> None:
        prompts = [s for s in self._running if s.n_pending > 1 or s in batch.admitted]
        prompts.sort(key=self._waiting.rank)
        shares = share_rows([sequence.n_pending for sequence in prompts], room)
        for sequence, n in zip(prompts, shares, strict=True):
            if n:
                batch.add(sequence, n)

    def _place(self, sequence: Sequence, batch: Batch) -> bool:
        """Give a waiting sequence blocks for all its tokens, from the prefix cache where possible.
        False if that leaves less than one free block for each running sequence: one would soon be
        preempted."""
        n_tokens = len(sequence.tokens)
        found: list[int] = []
        if not sequence.needs_all_rows:
            # The last token is always computed, because its logits are needed.
            found = self.pool.find(sequence.block_keys((n_tokens - 1) // BLOCK))
        n_fresh = n_blocks_for(n_tokens) - len(found)
        n_needed = n_fresh + self.pool.n_idle(found) + len(self._running)
        if n_needed > self.pool.n_free and self._running:
            return False
        for block in found:
            self.pool.share(block)
        sequence.blocks = found
        sequence.n_computed = len(found) * BLOCK
        sequence.n_registered = len(found)
        for _ in range(n_fresh):
            self._extend(sequence, batch)
        batch.rebound.append(sequence)
        self._count_lookup(sequence)
        return True

    def _count_lookup(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.is_counted:
            return
        request.is_counted = True
        request.n_cached = sequence.n_computed
        self._waiting.charge(request.submit.key, sequence.n_pending)
        self.counters.prefix_queries += sequence.n_prompt
        self.counters.prefix_hits += request.n_cached

    def _grow(self, sequence: Sequence, batch: Batch) -> bool:
        """Make sure that the last token has a block, preempting sequences of lower rank if needed.
        False if the sequence itself was last in rank and was preempted."""
        if len(sequence.tokens) <= len(sequence.blocks) * BLOCK:
            return True
        while not self._extend(sequence, batch):
            victim = self._running[-1]
            self._preempt(victim)
            self.counters.preemptions_memory += 1
            if victim is sequence:
                return False
        batch.rebound.append(sequence)
        return True

    def _extend(self, sequence: Sequence, batch: Batch) -> bool:
        block = self.pool.allocate()
        if block is None:
            return False
        sequence.blocks.append(block)
        batch.fresh.append(block)
        return True

    # ---- running or not ----

    def _start_running(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        insort(self._running, sequence, key=_rank)

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pool.release(sequence.blocks)
        sequence.slot = -1
        sequence.blocks = []
        sequence.n_computed = 0

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.is_scoring:
            sequence.request.prompt_scores.clear()
        self._stop_running(sequence)
        self._waiting.add(sequence)
        self.counters.preemptions += 1

    # ---- the result of a step ----

    def advance(self, batch: Batch, result: StepResult) -> Advance:
        """Update all sequences after a step."""
        advance = Advance()
        scores = iter(result.scores)
        any_failed = any(result.status)
        for chunk in batch.chunks:
            chunk_scores = list(islice(scores, chunk.n_scores)) if result.scores else []
            if any_failed and (row := _first_failure(result.status, chunk)) is not None:
                # The keys and values of this step may be wrong, but they are not yet in the prefix
                # cache. Those of earlier steps are right.
                advance.failed.append((chunk.sequence.request, row))
                continue
            if result.usage:
                chunk.sequence.charge(result.usage[chunk.row : chunk.row + chunk.n_rows])
            chunk.sequence.request.prompt_scores += map(_logprob, chunk_scores)
            drafts = _sound_drafts(result.status, chunk) if any_failed else chunk.drafts
            self._advance_chunk(chunk, drafts, advance)
        return advance

    def _advance_chunk(self, chunk: Chunk, drafts: tuple[int, ...], advance: Advance) -> None:
        sequence = chunk.sequence
        request = sequence.request
        sequence.n_computed += chunk.n
        self._register(sequence)
        if sequence.n_pending:
            return
        is_first_time = not request.is_prompt_done
        if is_first_time:
            request.is_prompt_done = True
            self.counters.prompt_tokens += sequence.n_prompt
        if not request.submit.sampling.max_tokens:
            advance.done += request.sequences
            return
        advance.draws.append(Draw(chunk.row + chunk.n - 1, sequence, drafts))
        self._waiting.charge(request.submit.key, 1)
        if is_first_time:
            for other in request.sequences[1:]:
                self._fork(sequence, other, chunk.row + chunk.n - 1, advance)

    def _register(self, sequence: Sequence) -> None:
        n_full = sequence.n_computed // BLOCK
        if n_full <= sequence.n_registered:
            return
        keys = sequence.block_keys(n_full)
        for i in range(sequence.n_registered, n_full):
            self.pool.register(sequence.blocks[i], keys[i])
        sequence.n_registered = n_full

    def _fork(self, first: Sequence, other: Sequence, row: int, advance: Advance) -> None:
        """Start another choice from a prompt just computed. Full blocks are shared; the last one,
        which both will write to, is copied. Without a free slot or block the choice waits and
        computes the prompt itself."""
        n_full, n_rest = divmod(first.n_computed, BLOCK)
        copy = self.pool.allocate() if n_rest and self._slots else None
        if not self._slots or (n_rest and copy is None):
            self._waiting.add(other)
            return
        for block in first.blocks[:n_full]:
            self.pool.share(block)
        other.blocks = first.blocks[:n_full]
        if copy is not None:
            other.blocks.append(copy)
            advance.copies.append((first.blocks[n_full], copy))
        other.n_computed = first.n_computed
        other.n_registered = n_full
        self._start_running(other)
        self._forked.append(other)
        advance.draws.append(Draw(row, other))

    def take(self, draw: Draw, token: int) -> Draw | None:
        """Append a sampled token. Returns the next draw if the token equals a draft."""
        sequence, n_accepted = draw.sequence, draw.n_accepted
        sequence.append(token)
        if n_accepted == len(draw.drafts) or draw.drafts[n_accepted] != token:
            return None
        sequence.n_computed += 1
        self._register(sequence)
        self._waiting.charge(sequence.request.submit.key, 1)
        self.counters.accepted_at[n_accepted] += 1
        return draw._replace(row=draw.row + 1, n_accepted=n_accepted + 1)


def share_rows(wanted: list[int], room: int) -> list[int]:
    """Each prompt gets half of the remaining rows and the last one all of them, so that a long
    prompt does not block later ones. Rows still left go to the first prompts."""
    shares, left = [], room
    for i, n in enumerate(wanted):
        shares.append(min(n, left if i == len(wanted) - 1 else (left + 1) // 2))
        left -= shares[i]
    for i, n in enumerate(wanted):
        more = min(n - shares[i], left)
        shares[i] += more
        left -= more
    return shares


def _rank(sequence: Sequence) -> tuple[int, ...]:
    """Sort key of running sequences: the last one is preempted first if blocks run out."""
    return (sequence.request.submit.priority, *turn(sequence))


def _claim(sequence: Sequence, held: Counter[str]) -> tuple[int, ...]:
    """Sort key of running sequences: the greatest loses its slot first. held: slots by key."""
    submit = sequence.request.submit
    return (submit.priority, held[submit.key], *turn(sequence))


def _first_failure(status: list[int], chunk: Chunk) -> int | None:
    return next((row for row in range(chunk.row, chunk.row + chunk.n) if status[row]), None)


def _sound_drafts(status: list[int], chunk: Chunk) -> tuple[int, ...]:
    """The drafts before the first failed row. A failed draft does not fail its request."""
    n = 0
    while n < len(chunk.drafts) and not status[chunk.row + chunk.n + n]:
        n += 1
    return chunk.drafts[:n]


def _logprob(score: Score) -> Logprob:
    return Logprob(score.token, score.logprob, score.rank, score.top)
