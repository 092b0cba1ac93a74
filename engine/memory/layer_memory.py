"""Memory of all weights except experts, when weights_memory leaves some layers on disk.

A record is the matrices of one block in the file. Every step reads the records that are not in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.config import EngineConfig, read_share
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.experts import ExpertBank, check_rate, expert_options
from cflow.engine.native import LayerRecords, Model, const

EVERYTHING = 1 << 60  # bytes


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """Memory of all weights except experts, in bytes. budget: the part for layers; layers: what it
    holds. 0 and None: all layers stay in memory."""

    n_bytes: int
    budget: int = 0
    layers: LayerRecords | None = None


def fix_weights(config: EngineConfig, model: Model, bank: ExpertBank) -> FixedWeights:
    """Memory for all weights except experts. model: its header. EngineError if weights_memory
    cannot hold the layers that a step needs at once."""
    as_f32 = config.precision == "f32"
    everything = FixedWeights(weight_bytes(model, as_f32=as_f32) - (0 if as_f32 else bank.n_bytes))
    if config.weights_memory is None:
        return everything
    if as_f32:
        message = "weights_memory is set, but f32 keeps all in memory; leave it out"
        raise EngineError("invalid_request", message)
    records = _records(config, bank, EVERYTHING)
    budget = config.weights_memory
    if isinstance(budget, str):
        budget = round(read_share(budget) * records.n_records * records.slot_bytes)
    apart_bytes = _apart_bytes(model)
    if budget >= everything.n_bytes - apart_bytes:
        return everything
    _check_budget(config, records, budget)
    layers = _records(config, bank, budget)
    return FixedWeights(apart_bytes + layers.n_slots * layers.slot_bytes, budget, layers)


def weight_bytes(model: Model, *, as_f32: bool) -> int:
    """Memory of all weights of a model, experts included."""
    if not as_f32:
        return model.header.file_bytes  # includes some small sections
    copies = {layer.block: layer.n_experts for layer in model.layers}
    n = 0
    for tensor in model.tensors:
        is_expert = tensor.role >= const.Role.EXPERT_GATE
        n += tensor.n_rows * tensor.n_cols * (copies[tensor.block] if is_expert else 1)
    return 4 * n


def pieces(model: Model, slot_bytes: int) -> ExpertBank:
    """The layers' bank cut into pieces of one slot, for disk_probe."""
    start, n_bytes = model.place(const.SectionId.RESIDENT)
    end = start + -(-n_bytes // 4096) * 4096
    offsets = tuple(range(start, end - slot_bytes + 1, slot_bytes))
    return ExpertBank(offsets, slot_bytes, len(offsets) * slot_bytes)


def _records(config: EngineConfig, bank: ExpertBank, budget: int) -> LayerRecords:
    """Layer records within a budget. Counted as if experts were on disk too, which can need more
    layers at once."""
    experts = expert_options(config, bank.n_bytes)
    model = Model(config.model, header_only=True, weights_memory=budget, experts=experts)
    if model.layer_records is None:
        raise ValueError(f"a budget of {budget}")
    return model.layer_records


def _apart_bytes(model: Model) -> int:
    """Bytes of embedding, head and vectors."""
    n = 0
    for tensor in model.tensors:
        if not tensor.stripe_rows:
            n += 4 * tensor.n_cols
        elif tensor.block == const.CFLOW_MODEL_LEVEL:
            n += -(-tensor.n_rows // tensor.stripe_rows) * tensor.stripe_stride
    return n


def _check_budget(config: EngineConfig, records: LayerRecords, budget: int) -> None:
    least = records.n_least * records.slot_bytes
    if budget < least:
        raise EngineError(
            "invalid_request",
            f"weights_memory is {budget:,} bytes, but at least {least:,} are needed: "
            f"{records.n_least} layers of {records.slot_bytes:,} each, for those that a step uses "
            f"at once and {config.expert_reads} reads in flight; raise it or lower expert_reads",
        )
    check_rate(config, "layer", records.slot_bytes)
