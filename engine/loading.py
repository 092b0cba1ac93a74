"""Brings a model up in the worker: weights, KV memory, a first token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cflow.engine import machine
from cflow.engine.capacity import Capacity, fit_capacity
from cflow.engine.config import EngineConfig
from cflow.engine.errors import EngineError
from cflow.engine.messages import Ready
from cflow.engine.metadata import parse_metadata
from cflow.engine.native import Context, ContextOptions, Model, context_memory
from cflow.engine.native_types import Pick, Row, TokenBytes
from cflow.engine.reports import Progress
from cflow.engine.runner import ROW_LOGITS
from cflow.engine.runner import Context as AnyContext

HUGE_PAGES_WANTED = 0.5  # of the weights; below it a note says so


@dataclass(frozen=True, slots=True)
class Loaded:
    """A context that has made its first token."""

    context: AnyContext
    token_bytes: TokenBytes
    eos_ids: tuple[int, ...]
    ready: Ready


Load = Callable[[EngineConfig, Progress], Loaded]


def load(config: EngineConfig, progress: Progress) -> Loaded:
    """progress: bytes of weights read, and of all. Raises EngineError."""
    started = time.perf_counter()
    threads = config.threads or machine.cores().threads
    as_f32 = config.precision == "f32"
    model = Model(config.model, threads=threads, as_f32=as_f32, progress=progress)
    kv = "f32" if as_f32 else config.kv
    capacity = _capacity(model, config, kv)
    options = _options(config, threads, kv, capacity)
    kv_bytes, scratch_bytes = context_memory(model, **options)
    context = Context(model, **options)
    _make_a_token(context)
    memory = model.memory
    ready = Ready(
        pid=os.getpid(),
        isa=context.isa,
        n_threads=threads,
        n_kv_blocks=capacity.n_kv_blocks,
        max_context=capacity.max_context,
        resident_bytes=memory.resident_bytes,
        huge_bytes=memory.huge_bytes,
        kv_bytes=kv_bytes,
        scratch_bytes=scratch_bytes,
        load_s=time.perf_counter() - started,
        notes=(*capacity.notes, *_memory_notes(model)),
    )
    metadata = parse_metadata(model.metadata, model.header.n_tokens)
    return Loaded(context, model.token_bytes, metadata.eos_ids, ready)


def _options(config: EngineConfig, threads: int, kv: str, capacity: Capacity) -> ContextOptions:
    return {
        "isa": config.isa,
        "threads": threads,
        "max_rows": config.max_step_tokens,
        "max_sequences": config.max_sequences,
        "max_context": capacity.max_context,
        "n_kv_blocks": capacity.n_kv_blocks,
        "kv_type": kv,
    }


def _capacity(model: Model, config: EngineConfig, kv: str) -> Capacity:
    one = _options(config, 1, kv, Capacity(max_context=1, n_kv_blocks=1))
    block_bytes, _ = context_memory(model, **one)
    available = machine.memory().available
    return fit_capacity(config, model.header.context, block_bytes, available)


def _make_a_token(context: Context) -> None:
    """What answers here will answer later: whoever says ready has made a token."""
    context.bind(0, [0])
    status = context.step([Row(0, 0, 0, ROW_LOGITS)]).status
    choice = context.sample([Pick(row=0, temperature=0)])[0]
    if any(status) or choice.status:
        raise EngineError("numeric", "the model's first logits are not finite numbers")


def _memory_notes(model: Model) -> list[str]:
    memory = model.memory
    notes = []
    if not memory.direct_io:
        notes.append(
            "weights were read through the page cache: the file system has no direct reads"
        )
    if memory.huge_bytes < HUGE_PAGES_WANTED * memory.resident_bytes:
        share = memory.huge_bytes / max(memory.resident_bytes, 1)
        setting = machine.huge_pages()
        notes.append(f"only {share:.0%} of the weights are in huge pages (setting: {setting})")
    return notes
