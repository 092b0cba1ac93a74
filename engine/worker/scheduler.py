"""Which rows the next step computes: decodes first, then prompts in chunks, new ones among them.

Pure bookkeeping, no model. The worker calls schedule(), runs the batch, and reports with advance();
a step that was cancelled is simply scheduled again. Blocks of a whole prompt are taken when it is
admitted, so only decodes can find the memory full; then the last in rank is set back: its tokens are
kept, its blocks given up, and it goes to the front of the line. Random numbers depend on (seed,
choice, index) alone, so nobody sees that in an answer.
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
from cflow.engine.worker.drafts import Lookup, count_guesses, may_pay
from cflow.engine.worker.pace import Pace
from cflow.engine.worker.sequence import Request, Sequence
from cflow.engine.worker.waiting import WaitingLine, turn

Phase = Literal["queue", "prefill", "decode"]


@dataclass(slots=True)
class Counters:
    """Totals. Tokens of the prompts looked up in the prefix cache and found there count once per
    request, however often it is set back. preemptions_memory: of all preemptions, those for want of
    blocks; the others gave their slot to who had more of a claim. drafts: times that guesses were run
    for a sequence; right_at: of the first guesses, second ones and so on, those that were right."""

    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    preemptions_memory: int = 0
    drafts: int = 0
    guesses: int = 0
    right_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)


class Scheduler:
    """n_blocks must hold one sequence of max_context tokens, so that the first in rank always can
    go on. max_logits: rows of a step that can keep theirs; 0: nothing is guessed."""

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
        self._forked: list[Sequence] = []  # since the last step; their blocks are not bound yet

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """A new request; only its first choice waits, the others fork from it."""
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
        """Ids of requests of which something waits, the next first."""
        return self._waiting.order()

    def remove(self, request: Request) -> Phase:
        """Ends a request, wherever it is: where it was."""
        phase = self._phase(request)
        for sequence in list(request.sequences):
            self.finish(sequence)
        return phase

    def finish(self, sequence: Sequence) -> None:
        """Ends one choice."""
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
        """The next step; no rows if there is nothing to do."""
        batch = Batch(rebound=self._forked)
        self._forked = []
        self._make_way()
        n_preempted = self.counters.preemptions
        self._add_decodes(batch)
        if len(batch.chunks) < len(self._running) or self.n_waiting:  # else all there is decodes
            room = self._pace.n_prefill_rows(batch.n_rows)
            if self.counters.preemptions == n_preempted:
                self._admit(batch, room)
            self._add_prefills(batch, room)
        return batch

    def _make_way(self) -> None:
        """Where all slots are taken, the first in line gets that of a less urgent one, of one with a
        later turn, or of another key that holds more; one a step. Who is set back finds its blocks in
        the prefix cache, unless somebody needed them."""
        first = None if self._slots else self._waiting.first()
        if first is None:
            return
        held = Counter(sequence.request.submit.key for sequence in self._running)
        victim = max(self._running, key=lambda s: _claim(s, held))
        own, other = first.request.submit, victim.request.submit
        is_between_keys = own.priority == other.priority and own.key != other.key
        if is_between_keys and held[own.key] + 1 >= held[other.key]:
            return  # it would have to give the slot back
        if self._waiting.rank(first) < self._waiting.rank(victim):
            self._preempt(victim)

    def _add_decodes(self, batch: Batch) -> None:
        decodes = [
            sequence
            for sequence in self._running.copy()
            if sequence.slot >= 0 and sequence.n_pending == 1 and self._grow(sequence, batch)
        ]
        for sequence, guess in zip(decodes, self._guess(decodes), strict=True):
            batch.add(sequence, 1, self._fit(sequence, guess, batch) if guess else ())
        batch.n_decodes = batch.n_rows

    def _guess(self, decodes: list[Sequence]) -> list[tuple[int, ...]]:
        """What to run of the guesses at each, beside one row of all that run or may begin."""
        n = len(decodes)
        room = self._max_logits - len(self._running) - min(self.n_waiting, len(self._slots))
        room = min(room, self._pace.n_guess_rows(n))
        if not n or room <= 0 or not may_pay(n, self._pace):
            return [()] * n
        odds = [self._look_up(sequence) for sequence in decodes]
        if not any(odds):
            return [()] * n
        limits = [self._guess_limit(sequence) for sequence in decodes]
        counts = count_guesses(odds, limits, room, self._pace)
        return [
            sequence.lookup.guess(count) if sequence.lookup and count else ()
            for sequence, count in zip(decodes, counts, strict=True)
        ]

    @staticmethod
    def _look_up(sequence: Sequence) -> float:
        """The odds of its next guess; 0: it has none."""
        if not sequence.request.is_prompt_done or sequence.grammar is not None:
            return 0.0
        if sequence.lookup is None:
            sequence.lookup = Lookup(sequence.tokens, sequence.n_prompt)
        return sequence.lookup.follow()

    def _guess_limit(self, sequence: Sequence) -> int:
        """So many guesses, and the token behind them, may still be said."""
        n_prompt = sequence.n_prompt
        most = min(sequence.request.submit.sampling.max_tokens, self._max_context - n_prompt)
        return min(MAX_DRAFTS, n_prompt + most - len(sequence.tokens) - 1)

    def _fit(self, sequence: Sequence, guess: tuple[int, ...], batch: Batch) -> tuple[int, ...]:
        """What of it the sequence has blocks for. It may take its next block early, but not one
        that another may need before."""
        n_tokens = len(sequence.tokens)
        is_short = n_tokens + len(guess) > len(sequence.blocks) * BLOCK
        if is_short and self.pool.n_free > len(self._running) and self._extend(sequence, batch):
            batch.rebound.append(sequence)
        guess = guess[: len(sequence.blocks) * BLOCK - n_tokens]
        self.counters.drafts += bool(guess)
        self.counters.guesses += len(guess)
        return guess

    def _admit(self, batch: Batch, room: int) -> None:
        """Lets prompts begin while rows are left for them, or while halves of the room are rows."""
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
        """Gives a waiting sequence the blocks of its tokens, cached ones where they are known. One
        more for each that runs must stay free, or somebody is set back at once."""
        n_tokens = len(sequence.tokens)
        found: list[int] = []
        if not sequence.is_scoring:
            # The last token is computed in any case: its logits are needed.
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
        """Makes sure the last token has a block, at the cost of those behind in rank. False: the
        sequence itself was last, and is set back."""
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

    # ---- what a step brought ----

    def advance(self, batch: Batch, result: StepResult) -> Advance:
        """Takes in a step that ran."""
        advance = Advance()
        scores = iter(result.scores)
        any_failed = any(result.status)
        for chunk in batch.chunks:
            chunk_scores = list(islice(scores, chunk.n_scores)) if result.scores else []
            if any_failed and (row := _first_failure(result.status, chunk)) is not None:
                # What it wrote may be wrong. Its blocks of this step are in no prefix cache yet, and
                # those before it are right.
                advance.failed.append((chunk.sequence.request, row))
                continue
            if result.usage:
                chunk.sequence.charge(result.usage[chunk.row : chunk.row + chunk.n_rows])
            chunk.sequence.request.prompt_scores += map(_logprob, chunk_scores)
            guesses = _sound_guesses(result.status, chunk) if any_failed else chunk.guesses
            self._advance_chunk(chunk, guesses, advance)
        return advance

    def _advance_chunk(self, chunk: Chunk, guesses: tuple[int, ...], advance: Advance) -> None:
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
        advance.draws.append(Draw(chunk.row + chunk.n - 1, sequence, guesses))
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
        """Starts another choice from a prompt just computed: full blocks are shared, the one that
        both go on writing is copied. Without a slot or a block it waits, and computes for itself."""
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
        """Adds a sampled token. The next draw, if a guess was right and the sequence goes on."""
        sequence, n_right = draw.sequence, draw.n_right
        sequence.append(token)
        if n_right == len(draw.guesses) or draw.guesses[n_right] != token:
            return None
        sequence.n_computed += 1
        self._register(sequence)
        self._waiting.charge(sequence.request.submit.key, 1)
        self.counters.right_at[n_right] += 1
        return draw._replace(row=draw.row + 1, n_right=n_right + 1)


def share_rows(wanted: list[int], room: int) -> list[int]:
    """Each takes half of the rows that are left, the last all of them, so that a long prompt does
    not keep those behind it from beginning. What nobody wants goes to the first."""
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
    """Of those that run, the last gives up its memory first."""
    return (sequence.request.submit.priority, *turn(sequence))


def _claim(sequence: Sequence, held: Counter[str]) -> tuple[int, ...]:
    """The greatest has the weakest claim to its slot. held: slots by key."""
    submit = sequence.request.submit
    return (submit.priority, held[submit.key], *turn(sequence))


def _first_failure(status: list[int], chunk: Chunk) -> int | None:
    return next((row for row in range(chunk.row, chunk.row + chunk.n) if status[row]), None)


def _sound_guesses(status: list[int], chunk: Chunk) -> tuple[int, ...]:
    """Those before the first whose row failed: nobody asked for it yet."""
    n = 0
    while n < len(chunk.guesses) and not status[chunk.row + chunk.n + n]:
        n += 1
    return chunk.guesses[:n]


def _logprob(score: Score) -> Logprob:
    return Logprob(score.token, score.logprob, score.rank, score.top)
