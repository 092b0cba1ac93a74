"""A model and one context without a scheduler, of a size that the caller chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Unpack

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.base.reports import Report
from cflow.engine.memory.budget import Budget, Sizes
from cflow.engine.memory.kv_blocks import n_blocks_for
from cflow.engine.native import Context, Model, Row, StepResult, const


class Bare(NamedTuple):
    model: Model
    context: Context
    threads: int
    kv_bytes: int


def open_bare(
    config: EngineConfig, report: Report, *, spare: int = 0, **sizes: Unpack[Sizes]
) -> Bare:
    """A model and its context, with the settings and the memory that a server would give them.
    spare: bytes that the caller allocates later. EngineError if the memory is too small."""
    budget = Budget(config)
    share = budget.share(sizes, spare=spare)
    model = budget.load(share, lambda done, total: report("load", done, total))
    return Bare(model, Context(model, **share.context), budget.threads, share.kv_bytes)


def open_stream(model: Model, n_tokens: int, *, threads: int, keep_values: bool = False) -> Context:
    """A context for decode() of one stream of up to n_tokens."""
    context = Context(
        model,
        threads=threads,
        max_rows=1,
        max_sequences=1,
        max_context=n_tokens,
        n_kv_blocks=n_blocks_for(n_tokens),
        keep_values=keep_values,
    )
    context.bind(0, range(n_blocks_for(n_tokens)))
    return context


def decode(
    context: Context, tokens: Iterable[Sequence[int]], *, first: int = 0, n_experts: int = 0
) -> Iterator[int]:
    """Run one step for each item of `tokens`, which has one token of every stream, from position
    `first` on. n_experts: of each layer, 0: top_k. Yields the number of steps done after each step,
    while its logits can be read."""
    flags = const.CFLOW_ROW_LOGITS
    for n_done, fed in enumerate(tokens):
        at = first + n_done
        rows = [Row(s, token, at, flags, n_experts=n_experts) for s, token in enumerate(fed)]
        step(context, rows)
        yield n_done + 1


def step(context: Context, rows: Sequence[Row]) -> StepResult:
    """Run a step. CflowError if a row fails."""
    result = context.step(rows)
    failed = next((i for i, status in enumerate(result.status) if status), None)
    if failed is not None:
        raise CflowError(context.row_error(failed) or "the model's logits are not finite")
    return result
