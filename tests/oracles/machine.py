"""The scheduler at work, in this process and step by step."""

from collections.abc import Iterable
from typing import Any

from cflow.engine.base.messages import SamplingParams, Submit
from cflow.engine.base.native_types import Choice, Score, TokenBytes
from cflow.engine.worker.batch import Batch, Draw
from cflow.engine.worker.pace import Pace
from cflow.engine.worker.runner import Runner
from cflow.engine.worker.scheduler import Scheduler
from cflow.engine.worker.sequence import Request, Sequence
from cflow.engine.worker.transcript import Transcript
from oracles.toy_model import EOS, TOKEN_BYTES, ToyContext

GREEDY = SamplingParams(max_tokens=12, temperature=0)
MAX_LOGITS = 64


class FreeRows(Pace):
    """A draft costs nothing."""

    def row_price(self, n_rows: int) -> float:
        return 1e-9

    def n_trial_rows(self, n_rows: int) -> int:
        return 0


class Machine:
    """The worker's loop without its messages, by default around a toy model. drafts: they are made
    as if all of them paid."""

    def __init__(
        self,
        *,
        n_blocks: int = 64,
        max_sequences: int = 8,
        max_context: int = 256,
        max_rows: int = 64,
        drafts: bool = False,
        context: Any = None,
        token_bytes: TokenBytes = TOKEN_BYTES,
        eos_ids: tuple[int, ...] = (EOS,),
    ) -> None:
        self.context = context or ToyContext(n_blocks)
        self.scheduler = Scheduler(
            n_blocks=n_blocks,
            max_sequences=max_sequences,
            max_context=max_context,
            pace=FreeRows(1.0, max_rows) if drafts else Pace(1.0, max_rows),
            max_logits=MAX_LOGITS if drafts else 0,
        )
        self._max_context = max_context
        self._token_bytes = token_bytes
        self._eos_ids = eos_ids
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.scores: dict[tuple[int, int], list[Score | None]] = {}
        self.finished: set[tuple[int, int]] = set()
        self.failed: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self._runner = Runner(self.context)
        self._n = 0

    def submit(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams = GREEDY,
        *,
        n_choices: int = 1,
        key: str = "",
        priority: int = 0,
        place: int = 0,
    ) -> int:
        submit = Submit(self._n, tuple(prompt), n_choices, sampling, key, priority, place)
        request = Request(submit, self._n)
        limit = min(sampling.max_tokens, self._max_context - len(submit.prompt))
        eos_ids = self._eos_ids
        for choice in range(n_choices):
            transcript = Transcript(sampling, self._token_bytes, eos_ids, limit)
            request.sequences.append(Sequence(request, choice, eos_ids, transcript))
            self.answers[self._n, choice] = []
            self.scores[self._n, choice] = []
        self.requests[self._n] = request
        self.scheduler.add(request)
        self._n += 1
        return request.id

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        if not batch.n_rows:
            return batch
        result = self._runner.step(batch)
        advance = self.scheduler.advance(batch, result)
        self._runner.copy(advance.copies)
        for request, row in advance.failed:
            if self.scheduler.find(request.id):
                self.scheduler.remove(request)
                self.failed[request.id] = result.status[row]
        for sequence in advance.done:
            self._finish(sequence)
        draws = [draw for draw in advance.draws if draw.sequence.request.id not in self.failed]
        while draws:
            choices = self._runner.sample(draws)
            following = [self._take(d, c) for d, c in zip(draws, choices, strict=True)]
            draws = [draw for draw in following if draw is not None]
        return batch

    def _take(self, draw: Draw, choice: Choice) -> Draw | None:
        assert not choice.status
        sequence, token = draw.sequence, choice.token
        self.answers[sequence.request.id, sequence.choice].append(token)
        self.scores[sequence.request.id, sequence.choice].append(choice.score)
        following = self.scheduler.take(draw, token)
        if sequence.transcript.push(token)[1]:
            self._finish(sequence)
            return None
        return following

    def _finish(self, sequence: Sequence) -> None:
        self.finished.add((sequence.request.id, sequence.choice))
        self.scheduler.finish(sequence)

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left; too many steps are a livelock."""
        for _ in range(max_steps):
            if not self.step().n_rows:
                break
        assert not self.scheduler.requests
        assert self.scheduler.pool.n_used == 0
        assert self.scheduler.n_running == self.scheduler.n_waiting == 0

    def cancel(self, request_id: int) -> str:
        return self.scheduler.remove(self.requests[request_id])
