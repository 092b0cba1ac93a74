"""A model and one context without a scheduler, for measuring: the caller says how large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict, Unpack

from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.base.reports import Report
from cflow.engine.memory.capacity import too_little
from cflow.engine.memory.experts import (
    ExpertBank,
    choose_cache,
    expert_options,
    read_header,
    room_for_experts,
)
from cflow.engine.memory.layer_memory import fix_weights
from cflow.engine.native import (
    Context,
    ContextOptions,
    Model,
    Row,
    StepResult,
    const,
    context_memory,
)


class Sizes(TypedDict):
    max_rows: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int


class Bare(NamedTuple):
    model: Model
    context: Context
    threads: int
    kv_bytes: int


def open_bare(
    config: EngineConfig, report: Report, *, spare: int = 0, **sizes: Unpack[Sizes]
) -> Bare:
    """The settings of config that count without a scheduler, as the server understands them. spare:
    bytes of memory that the caller takes later, and a cache chosen here must not. EngineError where
    memory does not hold it all."""
    threads = config.threads or machine.cores().threads
    as_f32 = config.precision == "f32"
    options: ContextOptions = {
        "threads": threads,
        "isa": config.isa,
        "kv_type": "f32" if as_f32 else config.kv,
        "max_rows": sizes["max_rows"],
        "max_sequences": sizes["max_sequences"],
        "max_context": sizes["max_context"],
        "n_kv_blocks": sizes["n_kv_blocks"],
    }
    header = read_header(config)
    bank = ExpertBank.of(header)
    weights = fix_weights(config, header, bank)
    kv_bytes, scratch_bytes = context_memory(header, **options)
    taken = spare + weights.n_bytes + kv_bytes + scratch_bytes
    memory = machine.memory()
    cache = choose_cache(config, bank, room_for_experts(memory.available, taken))
    expert_bytes = cache or (0 if as_f32 else bank.n_bytes)
    if taken + expert_bytes > memory.available:
        need = (
            f"weights of {weights.n_bytes + expert_bytes:,} bytes, keys and values of {kv_bytes:,} and "
            f"buffers of {scratch_bytes + spare:,} need {taken + expert_bytes:,}"
        )
        advice = "lower expert_cache, or " if config.expert_cache is not None else ""
        raise too_little(memory, need, advice)
    model = Model(
        config.model,
        threads=threads,
        as_f32=as_f32,
        defer_experts=config.defer_experts,
        experts=expert_options(config, cache),
        weights_memory=weights.budget,
        progress=lambda done, total: report("load", done, total),
    )
    return Bare(model, Context(model, **options), threads, kv_bytes)


def n_blocks(n_tokens: int) -> int:
    """KV blocks that hold a sequence of so many tokens."""
    return -(-n_tokens // int(const.CFLOW_KV_BLOCK))


def open_stream(model: Model, n_tokens: int, *, threads: int, keep_values: bool = False) -> Context:
    """A context for decode() of one stream of up to so many tokens."""
    context = Context(
        model,
        threads=threads,
        max_rows=1,
        max_sequences=1,
        max_context=n_tokens,
        n_kv_blocks=n_blocks(n_tokens),
        keep_values=keep_values,
    )
    context.bind(0, range(n_blocks(n_tokens)))
    return context


def decode(
    context: Context, tokens: Iterable[Sequence[int]], *, first: int = 0, n_experts: int = 0
) -> Iterator[int]:
    """Streams from position `first` on, fed with tokens: for each step one of every stream.
    n_experts: of each layer, 0: top_k. Yields behind each step, whose logits are there, how many
    are done."""
    flags = const.CFLOW_ROW_LOGITS
    for n_done, fed in enumerate(tokens):
        at = first + n_done
        rows = [Row(s, token, at, flags, n_experts=n_experts) for s, token in enumerate(fed)]
        step(context, rows)
        yield n_done + 1


def step(context: Context, rows: Sequence[Row]) -> StepResult:
    """A step all of whose rows come out well. CflowError says why one did not."""
    result = context.step(rows)
    failed = next((i for i, status in enumerate(result.status) if status), None)
    if failed is not None:
        raise CflowError(context.row_error(failed) or "the model's logits are not finite")
    return result
