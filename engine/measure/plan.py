"""Memory and speed of a model on this machine, predicted from its header."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.native_types import OpInfo
from cflow.engine.files.inspect import check_whole
from cflow.engine.files.synth import synth_header
from cflow.engine.measure.disk_probe import probe_disk
from cflow.engine.memory.budget import Budget, Share, open_header
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.memory.kv_blocks import BLOCK
from cflow.engine.memory.layer_memory import FixedWeights, pieces
from cflow.engine.native import Model

PROBE_PASSES = 3


@dataclass(frozen=True)
class Stage:
    """Ops that run in parallel between two barriers."""

    index: int
    bytes: int  # weights read
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. Critical paths are those of the layers, without router and head."""

    model: str
    pooling: str | None  # of a model for embeddings, which generates no text
    n_stages: int
    n_barriers: int
    bytes_per_token: int
    layer_bytes: int
    critical_path_bytes: int
    critical_path_closed_form_bytes: float
    resident_bytes: int  # weights in memory
    n_experts: int  # of all layers
    expert_bytes: int  # of all experts
    expert_cache_bytes: int  # memory for them, part of resident_bytes
    # If some layers are on disk, else 0:
    layer_memory_bytes: int  # memory for layers, part of resident_bytes
    layers_kept: int  # layers always in memory
    layers_at_once: int  # slots that the other layers pass through
    layer_disk_bytes: int  # read from disk in every step
    disk_bytes_per_token: float  # layers, and experts if all are equally likely; one stream
    disk_gb_s: float | None  # measured, or expert_read_rate if lower; None: nothing to read
    problem: str | None  # why the model does not fit
    kv: str  # how keys and values are stored
    kv_bytes_per_token: int
    kv_positions: int  # positions of all sequences in KV memory; 0 with a problem
    context: int  # of one sequence
    notes: tuple[str, ...]  # settings that did not fit as given
    available_bytes: int  # available memory of this machine
    memory_limited_by: str  # the file that limits it
    probe_gb_s: float
    threads: int
    threads_reason: str
    cpu_share: float  # share of time that the CPU quota lets the threads run
    stages: tuple[Stage, ...]

    @property
    def predicted_decode_tok_s(self) -> float:
        """Tokens a second of one stream: memory bandwidth over bytes of a token, times cpu_share,
        or the speed of the disk if that is lower (reads overlap compute)."""
        tok_s = self.cpu_share * self.probe_gb_s * 1e9 / self.bytes_per_token
        if self.disk_gb_s is not None:
            tok_s = min(tok_s, self.disk_gb_s * 1e9 / self.disk_bytes_per_token)
        return tok_s

    @property
    def context_in_memory(self) -> int:
        """Positions of all sequences whose keys and values fit beside the weights."""
        return max(self.available_bytes - self.resident_bytes, 0) // self.kv_bytes_per_token

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["stage_list"] = fields.pop("stages")
        return {
            "stages": self.n_stages,
            "barriers": self.n_barriers,
            "predicted_decode_tok_s": self.predicted_decode_tok_s,
            "context_in_memory": self.context_in_memory,
        } | fields


def run(config: EngineConfig) -> Plan:
    """The plan of a model file on this machine, as a server with these settings runs it, except
    that the debugging precision is ignored. Measures memory bandwidth, and the disk where weights
    stay there: takes seconds. ModelError for an incomplete file."""
    check_whole(open_header(config))
    return _run(config)


def _run(config: EngineConfig) -> Plan:
    """The plan; the file may be a header without weights."""
    config = replace(config, precision="int8")
    budget = Budget(config)
    model, bank, weights, memory = budget.model, budget.bank, budget.weights, budget.memory
    share, problem = _share(budget)
    cache = (share.expert_cache if share else 0) or bank.n_bytes
    info, layers, quota = model.plan, weights.layers, budget.cores.quota
    layer_disk_bytes = layers.step_bytes if layers else 0
    disk_bytes = layer_disk_bytes + _disk_bytes_per_token(model, bank, cache)
    return Plan(
        model=str(model.metadata.get("name") or Path(config.model).stem),
        pooling=model.metadata.get("pooling"),
        n_stages=info.n_stages,
        n_barriers=info.n_barriers,
        bytes_per_token=info.bytes_per_token,
        layer_bytes=info.layer_bytes,
        critical_path_bytes=info.critical_path_bytes,
        critical_path_closed_form_bytes=info.critical_path_closed_form_bytes,
        resident_bytes=weights.n_bytes + cache,
        n_experts=bank.n_records,
        expert_bytes=bank.n_bytes,
        expert_cache_bytes=cache,
        layer_memory_bytes=weights.budget,
        layers_kept=layers.n_kept if layers else 0,
        layers_at_once=layers.n_slots - layers.n_kept if layers else 0,
        layer_disk_bytes=layer_disk_bytes,
        disk_bytes_per_token=disk_bytes,
        disk_gb_s=_probe_disk(model, bank, config, weights) if disk_bytes else None,
        problem=problem,
        kv=config.kv,
        kv_bytes_per_token=budget.kv_block_bytes // BLOCK,
        kv_positions=share.context["n_kv_blocks"] * BLOCK if share else 0,
        context=(
            share.context["max_context"] if share else config.check_context(model.header.context)
        ),
        notes=share.notes if share else (),
        available_bytes=memory.available,
        memory_limited_by=memory.limited_by,
        probe_gb_s=_probe_memory(memory.available, budget.threads),
        threads=budget.threads,
        threads_reason=budget.threads_reason,
        cpu_share=min(1.0, quota.cpus / budget.threads) if quota else 1.0,
        stages=_stages(model.ops),
    )


def run_shape(config: EngineConfig) -> Plan:
    """The plan of a shape of configs/shapes in q4_0. The disk is not measured: there is no file."""
    with tempfile.TemporaryDirectory(prefix="cflow-plan-") as folder:
        path = Path(folder) / f"{Path(config.model).stem}.cflow"
        synth_header(config.model, path)
        return _run(replace(config, model=str(path)))


def _probe_memory(available: int, threads: int) -> float:
    """Memory bandwidth in GB/s."""
    n_bytes = machine.beyond_caches(available)
    return native.probe_bandwidth(n_bytes, threads, PROBE_PASSES) / 1e9


def _share(budget: Budget) -> tuple[Share | None, str | None]:
    """What a server would get; or None and why memory is too small. EngineError for settings that
    no amount of memory makes right."""
    try:
        return budget.share(), None
    except EngineError as error:
        if error.code != "out_of_memory":
            raise
        return None, str(error)


def _disk_bytes_per_token(model: Model, bank: ExpertBank, cache: int) -> float:
    """Bytes of the experts that a token misses on average, if all experts are equally likely."""
    if cache == bank.n_bytes:
        return 0.0
    n_wanted = sum(layer.top_k for layer in model.layers if layer.n_experts)
    hit_ratio = cache // bank.record_bytes / bank.n_records
    return n_wanted * (1 - hit_ratio) * bank.n_bytes / bank.n_records


def _probe_disk(
    model: Model, bank: ExpertBank, config: EngineConfig, weights: FixedWeights
) -> float | None:
    """Speed of disk reads in GB/s; None for a file without weights."""
    path = Path(model.path)
    if path.stat().st_size < model.header.file_bytes:
        return None
    if weights.layers:
        bank = pieces(model, weights.layers.slot_bytes)
    rate = probe_disk(path, bank, config.expert_reads)
    return min(rate, config.expert_read_rate or rate) / 1e9


def _stages(ops: list[OpInfo]) -> tuple[Stage, ...]:
    by_stage: dict[int, list[OpInfo]] = {}
    for op in ops:
        by_stage.setdefault(op.stage, []).append(op)
    return tuple(
        Stage(index, sum(op.bytes for op in group), tuple(op.name for op in group))
        for index, group in sorted(by_stage.items())
    )
