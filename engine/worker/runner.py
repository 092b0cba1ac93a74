"""Runs a batch as one native step and samples from its logits."""

from __future__ import annotations

from typing import Protocol

from cflow.engine.base.native_types import Choice, Pick, Row, StepResult
from cflow.engine.native import Floats, const
from cflow.engine.worker.batch import Batch, Chunk, Draw

_LOGITS, _SCORE = const.CFLOW_ROW_LOGITS, const.CFLOW_ROW_SCORE


class Context(Protocol):
    """The part of native.Context that the worker uses."""

    def bind(self, sequence: int, blocks: list[int]) -> None: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def clear_block(self, block: int) -> None: ...
    def step(self, rows: list[Row]) -> StepResult: ...
    def row_error(self, row: int) -> str: ...
    def value(self, name: str, row: int) -> Floats: ...
    def sample(self, picks: list[Pick]) -> list[Choice]: ...
    def cancel(self) -> None: ...
    @property
    def stage_count(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...


class Runner:
    def __init__(self, context: Context) -> None:
        self._context = context

    def step(self, batch: Batch) -> StepResult:
        """Run the batch. After a NativeError nothing was kept, and the batch can run again."""
        for block in batch.fresh:
            self._context.clear_block(block)
        for sequence in batch.rebound:
            if sequence.slot >= 0:
                self._context.bind(sequence.slot, sequence.blocks)
        rows: list[Row] = []
        for chunk in batch.chunks:
            _append_rows(rows, chunk)
        return self._context.step(rows)

    def row_error(self, row: int) -> str:
        """Details of a failed row of the last step, or ""."""
        return self._context.row_error(row)

    def state(self, row: int) -> Floats:
        """The state of a row of the last step after the last norm, (d_model,)."""
        return self._context.value("final_norm", row)

    def copy(self, blocks: list[tuple[int, int]]) -> None:
        for source, target in blocks:
            self._context.copy_block(source, target)

    def sample(self, draws: list[Draw]) -> list[Choice]:
        """Sample a token for each draw from the logits of the last step."""
        return self._context.sample([draw.sequence.prepare_pick(draw.row) for draw in draws])


def _append_rows(rows: list[Row], chunk: Chunk) -> None:
    sequence, first, n = chunk.sequence, chunk.first, chunk.n
    tokens, slot = sequence.tokens, sequence.slot
    params = sequence.request.submit.sampling
    n_experts, n_top = params.n_experts, params.n_prompt_logprobs or 0
    n_scores = chunk.n_scores
    for p in range(first, first + n_scores):
        rows.append(Row(slot, tokens[p], p, _SCORE, tokens[p + 1], n_top, n_experts))
    sampled = len(tokens) - 1 if params.max_tokens else -1  # the next token comes from its logits
    for p in range(first + n_scores, first + n):
        rows.append(Row(slot, tokens[p], p, _LOGITS if p == sampled else 0, 0, 0, n_experts))
    for p, draft in enumerate(chunk.drafts, first + n):
        rows.append(Row(slot, draft, p, _LOGITS, 0, 0, n_experts))
