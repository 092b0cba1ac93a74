"""Loads a model in the worker: weights, KV memory, a first token."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.messages import DiskStats, Ready
from cflow.engine.base.metadata import Metadata, parse_metadata
from cflow.engine.base.native_types import Pick, Row, TierStats, TokenBytes
from cflow.engine.base.reports import Report
from cflow.engine.memory.budget import Budget, open_header
from cflow.engine.memory.experts import Experts
from cflow.engine.native import Context, Model, const
from cflow.engine.text.grammar import Vocabulary
from cflow.engine.text.template import ChatTemplate
from cflow.engine.worker.read_header import header_of
from cflow.engine.worker.runner import Context as AnyContext

log = logging.getLogger("cflow.worker")

TRIAL_TOKENS = 16  # they fit into one KV block
HUGE_PAGES_WANTED = 0.5  # share of the weights; below it there is a note


@dataclass(frozen=True, slots=True)
class Loaded:
    """A context that has generated a token. vocabulary: for grammars, if the model supports them.
    experts: if some are on disk. disk_stats: of each kind of weights on disk; thread-safe."""

    context: AnyContext
    token_bytes: TokenBytes
    eos_ids: tuple[int, ...]
    ready: Ready
    vocabulary: Vocabulary | None = None
    experts: Experts | None = None
    disk_stats: Callable[[], dict[str, DiskStats]] = dict


Load = Callable[[EngineConfig, str, Report], Loaded]


def load(config: EngineConfig, digest: str, report: Report) -> Loaded:
    """Load a model and generate a token. digest: of the file that the front end has read. report:
    bytes done and in total of "weights", then of "experts". Raises EngineError."""
    started = time.perf_counter()
    header = open_header(config)
    _expect(digest, header)  # before a long load
    reading = ThreadPoolExecutor(1, "vocabulary")
    vocabulary = reading.submit(Vocabulary.of, header_of(header))  # while the weights are read
    reading.shutdown(wait=False)
    budget = Budget(config)
    share = budget.share()
    model = budget.load(share, lambda done, total: report("weights", done, total))
    _expect(digest, model)
    context = Context(model, **share.context)
    n_rows = min(TRIAL_TOKENS, share.context["max_rows"], share.context["max_context"])
    if share.expert_cache:  # the experts of many tokens would fill the cache before it is warmed
        n_rows = 1
    _make_a_token(context, model, share.context["kv_type"], n_rows)
    experts = Experts(model) if share.expert_cache else None
    if experts:
        experts.warm(lambda done, total: report("experts", done, total))
    memory = model.memory
    known = parse_metadata(model.metadata, model.header.n_tokens)
    ready = Ready(
        pid=os.getpid(),
        isa=context.isa,
        n_threads=budget.threads,
        threads_reason=budget.threads_reason,
        n_kv_blocks=share.context["n_kv_blocks"],
        max_context=share.context["max_context"],
        resident_bytes=memory.resident_bytes,
        huge_bytes=memory.huge_bytes,
        kv_bytes=share.kv_bytes,
        scratch_bytes=share.scratch_bytes,
        load_s=time.perf_counter() - started,
        n_deferred=config.defer_experts,
        notes=(
            *share.notes,
            *_thread_notes(budget.threads, budget.cores),
            *_memory_notes(model),
            *_expert_notes(model, config),
            *_template_notes(known),
        ),
        **_disk_facts(model),
    )
    return Loaded(
        context,
        model.token_bytes,
        known.eos_ids,
        ready,
        vocabulary.result(),
        experts,
        _DiskWatch(model),
    )


def _expect(digest: str, model: Model) -> None:
    """ModelError if this is not the file that the front end has read: its prompts use that file's
    tokenizer and template."""
    if model.digest != digest:
        raise ModelError(
            f"{model.path} is no longer the file that this server started with; restart the server "
            "to serve the new one, or put the old one back"
        )


def _make_a_token(context: Context, model: Model, kv: str, n_rows: int) -> None:
    """Generate one token before reporting ready, so that a model that cannot run fails at load. The
    prompt is n_rows tokens from all over the vocabulary: few of them may overflow."""
    context.bind(0, [0])
    tokens = [i * model.header.n_tokens // n_rows for i in range(n_rows)]
    rows = [Row(0, token, i) for i, token in enumerate(tokens[:-1])]
    rows.append(Row(0, tokens[-1], n_rows - 1, const.CFLOW_ROW_LOGITS))
    status = context.step(rows).status
    choice = context.sample([Pick(row=n_rows - 1, temperature=0)])[0]
    if any(status) and (why := next(filter(None, map(context.row_error, range(n_rows))), "")):
        raise EngineError("io_error", why)
    if any(status) or choice.status:
        way_out = "; keys or values may exceed f16, try --kv bf16" if kv in ("f16", "q8") else ""
        raise EngineError(
            "numeric", f"{model.path}: the model's first logits are not finite numbers{way_out}"
        )


def _thread_notes(threads: int, cores: machine.Cores) -> list[str]:
    notes = []
    if cores.nodes > 1:
        notes.append(f"{cores.nodes} memory nodes: {machine.ONE_NODE}")
    if cores.quota and threads > max(1, cores.quota.cpus):
        notes.append(
            f"{threads} threads and a CPU quota of {cores.quota.cpus:g} ({cores.quota.source}): the "
            "kernel will stop them in most periods; remove the threads setting"
        )
    return notes


def _memory_notes(model: Model) -> list[str]:
    memory = model.memory
    notes = []
    if not memory.direct_io:
        notes.append(
            "weights were read through the page cache: the file system does not support direct reads"
        )
    if memory.huge_bytes < HUGE_PAGES_WANTED * memory.resident_bytes:
        share = memory.huge_bytes / max(memory.resident_bytes, 1)
        setting = machine.huge_pages()
        notes.append(f"only {share:.0%} of the weights are in huge pages (setting: {setting})")
    return notes


def _expert_notes(model: Model, config: EngineConfig) -> list[str]:
    tier = model.tier
    if tier is None or tier.direct_io or config.expert_io == "cached":
        return []
    return [
        "experts are read through the page cache: the file system does not support direct reads"
    ]


def _template_notes(known: Metadata) -> list[str]:
    notes = []
    sources = {"chat template": known.chat_template, "template for tools": known.tool_template}
    for what, source in sources.items():
        if source is None:
            continue
        template = ChatTemplate(source)
        if error := template.syntax_error():
            notes.append(f"the model's {what} has a syntax error, so chats fail: {error}")
        template.close()
    return notes


def _disk_facts(model: Model) -> dict[str, Any]:
    """Fields of Ready about experts and layers on disk."""
    facts: dict[str, Any] = {}
    if tier := model.tier:
        facts |= {
            "n_experts": tier.n_records,
            "n_expert_slots": tier.n_slots,
            "expert_bytes": tier.n_slots * tier.slot_bytes,
            "expert_io": "direct" if tier.direct_io else "cached",
        }
    if records := model.layer_records:
        facts |= {
            "n_layers": records.n_records,
            "n_layers_kept": records.n_kept,
            "n_layer_slots": records.n_slots,
            "layer_bytes": records.n_slots * records.slot_bytes,
            "layer_step_bytes": records.step_bytes,
        }
    return facts


class _DiskWatch:
    """Counters of each kind of weights on disk. Logs once if direct reads of a kind end: a file
    system may refuse them at any time, and reads then go through the page cache."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._direct = {weights for weights, tier in self._tiers().items() if tier.direct_io}

    def __call__(self) -> dict[str, DiskStats]:
        tiers = self._tiers()
        for weights in sorted(self._direct):
            if not tiers[weights].direct_io:
                self._direct.discard(weights)
                log.warning(
                    "%s: the file system refused a direct read; %s are read through the page cache "
                    "from now on",
                    self._model.path,
                    weights,
                )
        names = DiskStats.__struct_fields__
        return {
            weights: DiskStats(**{name: getattr(tier, name) for name in names})
            for weights, tier in tiers.items()
        }

    def _tiers(self) -> dict[str, TierStats]:
        found = {"experts": self._model.tier, "layers": self._model.layer_tier}
        return {weights: tier for weights, tier in found.items() if tier is not None}
