"""Arguments and results of the C library as plain Python values.

Most mirror structs of native/include/cflow.h, which explains each field; a test compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Header:
    """cflow_header, without checks and sections."""

    version: int
    order: int
    file_bytes: int
    n_layers: int
    n_blocks: int
    d_model: int
    vocab_size: int
    n_tokens: int
    context: int
    n_tensors: int
    n_records: int
    tied: int
    embedding_scale: float
    final_norm_eps: float
    final_norm_offset: float
    final_norm_kind: int
    logit_scale: float
    logit_cap: float


@dataclass(frozen=True, slots=True)
class Layer:
    """cflow_layer."""

    block: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int
    qk_norm: int
    v_norm: int
    attention_scale: float
    rope_kind: int
    rope_dim: int
    rope_base: float
    rope_scaling: int
    rope_factor: float
    rope_low_freq: float
    rope_high_freq: float
    rope_original_context: int
    d_ff: int
    activation: int
    activation_on_up: int
    n_experts: int
    top_k: int
    renormalise: int
    expert_scale: float
    d_expert: int
    d_shared: int
    shared_gate: int
    norm_eps: float
    norm_offset: float
    norms_shared: int
    dense_source: int
    expert_anchor: int
    expert_delay: int
    residual_scale: float
    norm_kind: int
    norm_place: int
    ungated: int
    score_cap: float
    rope_gain: float
    query_growth: float
    query_period: int
    query_start: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """cflow_tensor."""

    role: int
    block: int
    encoding: int
    n_rows: int
    n_cols: int
    stripe_rows: int
    offset: int
    stripe_stride: int


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """cflow_plan_info."""

    n_stages: int
    n_barriers: int
    n_ops: int
    n_values: int
    bytes_per_token: int
    layer_bytes: int
    critical_path_bytes: int
    critical_path_closed_form_bytes: float
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class OpInfo:
    """cflow_op_info."""

    name: str
    stage: int
    layer: int
    bytes: int
    reads: str
    writes: str


@dataclass(frozen=True, slots=True)
class StageTime:
    """cflow_stage_time."""

    ns: int
    idle_ns: int


@dataclass(frozen=True, slots=True)
class Memory:
    """cflow_memory."""

    resident_bytes: int
    huge_bytes: int
    load_s: float
    direct_io: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """cflow_tier_stats."""

    n_records: int
    n_slots: int
    slot_bytes: int
    n_resident: int
    n_loading: int
    n_overdue: int
    direct_io: int
    hits: int
    misses: int
    reads: int
    disk_bytes: int
    warm_bytes: int
    extra_reads: int
    evictions: int
    speculated: int
    useful: int
    late: int
    wasted: int
    failed_io: int
    failed_cut: int
    failed_altered: int
    failed_timed_out: int
    stall_ns: int
    read_ns: int
    latencies: tuple[int, ...]
    ghost_hits_2x: int
    ghost_hits_4x: int


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """cflow_layer_records."""

    n_records: int
    n_slots: int
    n_least: int
    n_kept: int
    slot_bytes: int
    bytes: int
    step_bytes: int


class TokenBytes(list[bytes]):
    """The bytes of each token id, and which ids are special (never shown)."""

    def __init__(self, tokens: Iterable[bytes], flags: bytes) -> None:
        super().__init__(tokens)
        self._flags = flags

    @classmethod
    def parse(cls, section: bytes) -> TokenBytes:
        """From the token-bytes section of a model file that has been checked (docs/format.md)."""
        (count,) = struct.unpack_from("<I", section)
        ends = struct.unpack_from(f"<{count}I", section, 4)
        flags, data = section[4 + 4 * count :][:count], section[4 + 5 * count :]
        starts = (0, *ends[:-1])
        return cls((data[a:b] for a, b in zip(starts, ends, strict=True)), flags)

    def is_special(self, token: int) -> bool:
        return bool(self._flags[token] & 1)


class Row(NamedTuple):
    """One token of one sequence in a step: cflow_row."""

    sequence: int
    token: int
    position: int
    flags: int = 0
    target: int = 0
    n_top: int = 0
    n_experts: int = 0


class Score(NamedTuple):
    """A token's natural log-probability under softmax of the raw logits. top: best first."""

    token: int
    logprob: float
    rank: int  # how many tokens are more likely
    top: tuple[tuple[int, float], ...]


class RowUsage(NamedTuple):
    """What a row read from disk: cflow_row_usage."""

    expert_hits: int
    expert_misses: int
    layer_reads: int
    disk_bytes: int
    stall_ns: int


class StepResult(NamedTuple):
    """What a step computed. status: a cflow_status per row. scores: one per SCORE row, in row
    order. usage: one per row if some weights are on disk, else empty."""

    status: list[int]
    scores: list[Score]
    usage: Sequence[RowUsage] = ()


@dataclass(slots=True)
class Pick:
    """How to sample a token from a kept row of logits: cflow_pick. Reuse one per sequence.

    Arrays must be contiguous; they are not copied.
    """

    row: int
    choice: int = 0
    index: int = 0
    n_top: int = -1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_k: int = 0
    n_prompt: int = 0
    history: NDArray[np.int32] | None = None  # prompt, then output; for penalties
    bias_ids: NDArray[np.int32] | None = None
    bias: NDArray[np.float32] | None = None
    mask: NDArray[np.uint32] | None = None  # (ceil(n_tokens / 32),) bit set: allowed


class Choice(NamedTuple):
    """A sampled token. status: OK, EINVAL (no token is allowed) or ENUMERIC; token is -1 unless OK.
    score: if the pick's n_top is at least 0."""

    status: int
    token: int
    score: Score | None
