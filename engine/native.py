"""The C library for Python; no other module uses cffi.

Handles close with their last reference or by close(); a context keeps its model open. Calls release
the GIL. Only one thread at a time may use a context, except for cancel() and stage_count.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import fields
from enum import IntEnum
from hashlib import blake2b
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from cflow.engine._native import ffi, lib
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.limits import EXPERT_READS
from cflow.engine.base.model_header import parse_metadata_json
from cflow.engine.base.native_types import (
    Choice,
    Header,
    Layer,
    LayerRecords,
    Memory,
    OpInfo,
    Pick,
    PlanInfo,
    Row,
    RowUsage,
    Score,
    StageTime,
    StepResult,
    Tensor,
    TierStats,
    TokenBytes,
)
from cflow.engine.base.reports import Progress

__all__ = [
    "Choice",
    "Context",
    "ContextOptions",
    "ExpertOptions",
    "Header",
    "Layer",
    "LayerRecords",
    "Memory",
    "Model",
    "NativeError",
    "OpInfo",
    "Pick",
    "PlanInfo",
    "Row",
    "RowUsage",
    "Score",
    "StageTime",
    "StepResult",
    "Tensor",
    "TierStats",
    "TokenBytes",
    "best_isa",
    "const",
    "context_memory",
    "crc32c",
    "pack",
    "probe_bandwidth",
    "sizeof",
]

Floats = NDArray[np.float32]
T = TypeVar("T")

POLL_S = 0.1

# ---- constants and structs of the header ----


def _enum(name: str) -> tuple[str, Any]:
    """An enum of cflow.h: cflow_rope_kind with CFLOW_ROPE_HALF becomes RopeKind.HALF, without
    counts (CFLOW_N_...)."""
    values = ffi.typeof(name).relements
    words = {key: key.split("_") for key in values if not key.startswith("CFLOW_N_")}
    columns = zip(*words.values(), strict=False)  # first words, second words, ...
    n_shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    title = name.removeprefix("cflow_").title().replace("_", "")
    members = {
        "_".join(words[key][n_shared:]): values[key] for key in sorted(words, key=values.get)
    }
    return title, IntEnum(title, members)


def _constants() -> SimpleNamespace:
    names = ffi.list_types()[0]
    enums = dict(_enum(name) for name in names if ffi.typeof(name).kind == "enum")
    plain = {name: getattr(lib, name) for name in dir(lib) if name.startswith("CFLOW_")}
    return SimpleNamespace(**enums, **plain)


# Enums of cflow.h as IntEnums (const.Role.Q, const.Encoding.Q4_0), and its constants by their names
# (const.CFLOW_ROW_LOGITS).
const: Any = _constants()


def sizeof(struct_name: str) -> int:
    return int(ffi.sizeof(struct_name))


def pack(struct_name: str, values: Mapping[str, Any]) -> bytes:
    """The bytes of a struct; missing fields are 0. KeyError for an unknown field."""
    return bytes(ffi.buffer(ffi.new(f"{struct_name} *", values)))


def _record(kind: type[T], source: Any) -> T:
    """A dataclass from a struct with its fields; char arrays become str, other arrays tuples."""
    values = {field.name: getattr(source, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, ffi.CData):
            is_text = ffi.typeof(value).item.cname == "char"
            values[name] = ffi.string(value).decode() if is_text else tuple(value)
    return kind(**values)


# ---- errors ----

_CODES = {
    const.Status.ENOMEM: "out_of_memory",
    const.Status.ECANCELLED: "cancelled",
    const.Status.ENUMERIC: "numeric",
}
_MODEL_STATUS = (const.Status.EFORMAT, const.Status.EIO, const.Status.EUNSUPPORTED)


class NativeError(EngineError):
    """A native call failed. status: one of const.Status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(_CODES.get(status, "internal"), message)
        self.status = status


def _text(err: Any) -> str:
    return str(ffi.string(err.text).decode(errors="replace"))


def _check(status: int, err: Any) -> None:
    if status:
        raise NativeError(const.Status(status), _text(err))


# ---- the model ----


class ExpertOptions(TypedDict):
    """How experts are held and read. cache: bytes of memory for them, 0: all are resident. io:
    "direct" or "cached". expert_reads: most reads in flight. bytes_per_s: limit, 0: none.
    speculate: read ahead what the next layer's router will probably choose. window: "delay";
    measurements also use "layer" and "none" (cflow_window).
    """

    cache: int
    io: NotRequired[str]
    expert_reads: NotRequired[int]
    timeout_s: NotRequired[float]
    bytes_per_s: NotRequired[float]
    speculate: NotRequired[bool]
    window: NotRequired[str]


def _expert_options(options: ExpertOptions) -> dict[str, Any]:
    return {
        "expert_cache": options["cache"],
        "expert_io": const.Io[options.get("io", "direct").upper()],
        "expert_reads": options.get("expert_reads", EXPERT_READS),
        "expert_timeout_s": options.get("timeout_s", 10.0),
        "expert_bytes_per_s": options.get("bytes_per_s", 0.0),
        "speculate": options.get("speculate", True),
        "expert_window": const.Window[options.get("window", "delay").upper()],
    }


class Model:
    """An open model file. ModelError if it is invalid.

    header_only     without weights, for inspection and plans
    defer_experts   add the N lowest-weighted experts of each token one layer late
    weights_memory  bytes of memory for the matrices of layers; the rest are read in every step with
                    the options in `experts`. 0: all are resident
    """

    def __init__(
        self,
        path: str,
        *,
        threads: int = 1,
        header_only: bool = False,
        as_f32: bool = False,
        experts: ExpertOptions | None = None,
        defer_experts: int = 0,
        weights_memory: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.path = path
        state = ffi.new("cflow_progress *")
        c_path = ffi.new("char[]", os.fsencode(path))
        options = ffi.new(
            "cflow_model_options *",
            {
                "path": c_path,
                "n_threads": threads,
                "header_only": header_only,
                "as_f32": as_f32,
                "defer_experts": defer_experts,
                "weights_memory": weights_memory,
                "progress": state,
                **_expert_options(experts or {"cache": 0}),
            },
        )
        out, err = ffi.new("cflow_model **"), ffi.new("cflow_error *")
        try:
            status = _watched(lambda: lib.cflow_model_open(out, options, err), state, progress)
        except BaseException:
            lib.cflow_model_close(out[0])
            raise
        if status in _MODEL_STATUS:
            raise ModelError(f"{path}: {_text(err)}")
        _check(status, err)
        self._handle = ffi.gc(out[0], lib.cflow_model_close)
        self.header: Header = _record(Header, lib.cflow_model_header(self._handle))

    def close(self) -> None:
        """Frees the weights, once no context uses them."""
        self._handle = None

    @property
    def layers(self) -> list[Layer]:
        count = self.header.n_layers
        return [_record(Layer, lib.cflow_model_layer(self._handle, i)) for i in range(count)]

    @property
    def tensors(self) -> list[Tensor]:
        count = self.header.n_tensors
        return [_record(Tensor, lib.cflow_model_tensor(self._handle, i)) for i in range(count)]

    @property
    def encoding(self) -> str:
        """The encoding of most weights, such as "q4_0"."""
        n_experts = {layer.block: layer.n_experts for layer in self.layers}
        n_weights: Counter[str] = Counter()
        for tensor in self.tensors:
            copies = n_experts[tensor.block] if tensor.role >= const.Role.EXPERT_GATE else 1
            name = const.Encoding(tensor.encoding).name.lower()
            n_weights[name] += tensor.n_rows * tensor.n_cols * copies
        return n_weights.most_common(1)[0][0]

    def section(self, section: int) -> bytes:
        """A copy of a section, b"" for the two banks."""
        size = ffi.new("uint64_t *")
        data = lib.cflow_model_section(self._handle, section, size)
        return bytes(ffi.buffer(data, size[0])) if data else b""

    def place(self, section: int) -> tuple[int, int]:
        """Offset of a section or bank in the file, and its size in bytes without padding."""
        found = lib.cflow_model_header(self._handle).sections[section]
        return found.offset, found.bytes

    @property
    def digest(self) -> str:
        """A hash of the header. It covers the file: the header has checksums of the sections, which
        have those of the weights."""
        header = lib.cflow_model_header(self._handle)
        return blake2b(ffi.buffer(header), digest_size=16).hexdigest()

    @property
    def metadata(self) -> dict[str, Any]:
        return parse_metadata_json(self.path, self.section(const.SectionId.METADATA))

    @property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes.parse(self.section(const.SectionId.TOKEN_BYTES))

    @property
    def plan(self) -> PlanInfo:
        info = ffi.new("cflow_plan_info *")
        lib.cflow_model_plan(self._handle, info)
        return _record(PlanInfo, info)

    @property
    def ops(self) -> list[OpInfo]:
        info, err = ffi.new("cflow_op_info *"), ffi.new("cflow_error *")
        ops = []
        for index in range(self.plan.n_ops):
            _check(lib.cflow_model_op(self._handle, index, info, err), err)
            ops.append(_record(OpInfo, info))
        return ops

    @property
    def reading_order(self) -> list[Tensor]:
        """The tensors in the order in which a step first reads them."""
        order = ffi.new("uint32_t[]", self.header.n_tensors)
        lib.cflow_model_reading_order(self._handle, order)
        tensors = self.tensors
        return [tensors[index] for index in order]

    @property
    def memory(self) -> Memory:
        memory = ffi.new("cflow_memory *")
        lib.cflow_model_memory(self._handle, memory)
        return _record(Memory, memory)

    @property
    def tier(self) -> TierStats | None:
        """The expert cache and its counters so far; None if all experts are resident."""
        stats = ffi.new("cflow_tier_stats *")
        lib.cflow_model_tier(self._handle, stats)
        return _record(TierStats, stats) if stats.n_slots else None

    @property
    def layer_records(self) -> LayerRecords | None:
        """The layers' records, if some are on disk; None without weights_memory."""
        records = ffi.new("cflow_layer_records *")
        lib.cflow_model_layer_records(self._handle, records)
        return _record(LayerRecords, records) if records.n_records else None

    @property
    def layer_tier(self) -> TierStats | None:
        """Counters of layer reads so far; None if all layers are resident."""
        stats = ffi.new("cflow_tier_stats *")
        lib.cflow_model_layer_tier(self._handle, stats)
        return _record(TierStats, stats) if stats.n_slots else None

    @property
    def expert_uses(self) -> NDArray[np.uint64]:
        """How often each record was used, (n_records,); zeros without an expert cache."""
        uses = np.zeros(self.header.n_records, np.uint64)
        pointer = ffi.from_buffer("uint64_t[]", uses, require_writable=True)
        lib.cflow_model_expert_uses(self._handle, pointer)
        return uses

    def warm(self, uses: NDArray[np.uint64], progress: Progress | None = None) -> None:
        """Fill the expert cache with the most used records. uses: expert_uses of an earlier run."""
        if uses.shape != (self.header.n_records,):
            raise ValueError(f"uses of {uses.shape} records, the model has {self.header.n_records}")
        state, err = ffi.new("cflow_progress *"), ffi.new("cflow_error *")
        pointer = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(uses, np.uint64))
        status = _watched(
            lambda: lib.cflow_model_warm(self._handle, pointer, state, err), state, progress
        )
        _check(status, err)

    def rows(self, tensor: int, expert: int, first: int, n: int) -> Floats:
        """Dequantised rows [first, first + n) of a tensor, (n, n_cols)."""
        source = lib.cflow_model_tensor(self._handle, tensor)
        if not source:
            raise NativeError(const.Status.EINVAL, f"tensor {tensor} of {self.header.n_tensors}")
        out = np.empty((n, source.n_cols), np.float32)
        err = ffi.new("cflow_error *")
        pointer = ffi.from_buffer("float[]", out, require_writable=True)
        _check(
            lib.cflow_model_rows(self._handle, tensor, expert, first, n, pointer, err),
            err,
        )
        return out


def _watched(call: Callable[[], int], state: Any, progress: Progress | None) -> int:
    """The status of a long native call. `progress` runs in this thread; an exception here, Ctrl-C
    included, cancels the call."""
    if progress is None:
        return call()
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        try:
            while True:
                try:
                    status = calling.result(timeout=POLL_S)
                    break
                except NotYet:
                    progress(state.done_bytes, state.total_bytes)
            if not status:
                progress(state.done_bytes, state.total_bytes)
        except BaseException:
            state.cancel = 1
            calling.result()
            raise
        return status


# ---- the context ----


class ContextOptions(TypedDict):
    """cflow_ctx_options. isa: None: the best. kv_type: "f16", "f32", "bf16" or "q8"."""

    threads: int
    max_rows: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int
    isa: NotRequired[str | None]
    kv_type: NotRequired[str]
    keep_values: NotRequired[bool]


def _context_options(options: ContextOptions) -> tuple[Any, Any]:
    """The struct, and an object that must live as long."""
    isa = options.get("isa")
    c_isa = ffi.NULL if isa is None else ffi.new("char[]", isa.encode())
    values = {
        "isa": c_isa,
        "n_threads": options["threads"],
        "max_rows": options["max_rows"],
        "max_sequences": options["max_sequences"],
        "max_context": options["max_context"],
        "n_kv_blocks": options["n_kv_blocks"],
        "kv_type": const.KvType[options.get("kv_type", "f16").upper()],
        "keep_values": options.get("keep_values", False),
    }
    return ffi.new("cflow_ctx_options *", values), c_isa


def context_memory(model: Model, **options: Unpack[ContextOptions]) -> tuple[int, int]:
    """Bytes that a Context with these options allocates: KV blocks, everything else."""
    out, err = ffi.new("uint64_t[2]"), ffi.new("cflow_error *")
    c_options, _keep = _context_options(options)
    _check(lib.cflow_ctx_memory(out, out + 1, model._handle, c_options, err), err)
    return out[0], out[1]


_ROW = struct.Struct("=7i4x")  # cflow_row
_PICK = struct.Struct("=4iQ6f4i32x")  # cflow_pick, its four pointers NULL
_USAGE = struct.Struct("=3I4x2Q")  # cflow_row_usage
_MASK_64 = (1 << 64) - 1


class Context:
    """KV memory, scratch buffers and threads that run a model."""

    def __init__(self, model: Model, **options: Unpack[ContextOptions]) -> None:
        c_options, _keep = _context_options(options)
        out, self._err = ffi.new("cflow_ctx **"), ffi.new("cflow_error *")
        model_handle = model._handle
        _check(lib.cflow_ctx_open(out, model_handle, c_options, self._err), self._err)
        # The destructor holds the model's handle, so the model cannot close first.
        self._handle = ffi.gc(out[0], lambda ctx, _model=model_handle: lib.cflow_ctx_close(ctx))
        self._vocab_size = model.header.vocab_size
        self._n_stages = model.plan.n_stages
        self._max_rows = options["max_rows"]
        self._max_picks = options["max_sequences"]
        self._rows = ffi.new("cflow_row[]", self._max_rows)
        self._row_bytes = ffi.buffer(self._rows)
        self._status = ffi.new("int32_t[]", self._max_rows)
        self._scores = ffi.new("cflow_score[]", self._max_rows)
        self._picks = ffi.new("cflow_pick[]", self._max_picks)
        self._pick_bytes = ffi.buffer(self._picks)
        self._choices = ffi.new("cflow_choice[]", self._max_picks)

    def close(self) -> None:
        self._handle = None

    @property
    def isa(self) -> str:
        return str(ffi.string(lib.cflow_ctx_isa(self._handle)).decode())

    def bind(self, sequence: int, blocks: Sequence[int]) -> None:
        """Give a sequence its KV blocks: position p lies in blocks[p // CFLOW_KV_BLOCK]."""
        _check(
            lib.cflow_ctx_bind(self._handle, sequence, list(blocks), len(blocks), self._err),
            self._err,
        )

    def copy_block(self, source: int, target: int) -> None:
        _check(lib.cflow_ctx_copy_block(self._handle, source, target, self._err), self._err)

    def clear_block(self, block: int) -> None:
        _check(lib.cflow_ctx_clear_block(self._handle, block, self._err), self._err)

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Run a forward pass. NativeError with status ECANCELLED: nothing was kept."""
        n = len(rows)
        if n > self._max_rows:
            raise NativeError(const.Status.EINVAL, f"{n} rows in a step, at most {self._max_rows}")
        n_scores = 0
        for i, row in enumerate(rows):
            _ROW.pack_into(self._row_bytes, i * _ROW.size, *row)
            n_scores += bool(row.flags & const.CFLOW_ROW_SCORE)
        status = lib.cflow_ctx_step(
            self._handle, self._rows, n, self._status, self._scores, self._err
        )
        _check(status, self._err)
        scores = [_score(self._scores[i]) for i in range(n_scores)]
        return StepResult(ffi.unpack(self._status, n), scores, self._usage(n))

    def _usage(self, n: int) -> list[RowUsage]:
        usage = lib.cflow_ctx_usage(self._handle)
        if not usage:
            return []
        return list(map(RowUsage._make, _USAGE.iter_unpack(ffi.buffer(usage, n * _USAGE.size))))

    def row_error(self, row: int) -> str:
        """Why a row of the last step has status EIO or EFORMAT; "" for any other row."""
        lib.cflow_ctx_row_error(self._handle, row, self._err)
        return _text(self._err)

    def logits(self, row: int) -> Floats:
        """A copy of the logits that a row of the last step kept, (vocab_size,)."""
        logits = lib.cflow_ctx_logits(self._handle, row)
        if not logits:
            raise NativeError(const.Status.EINVAL, f"row {row} kept no logits")
        return np.frombuffer(ffi.buffer(logits, 4 * self._vocab_size), np.float32).copy()

    def sample(self, picks: Sequence[Pick]) -> list[Choice]:
        """Sample tokens from the logits that the last step kept."""
        n = len(picks)
        if n > self._max_picks:
            raise NativeError(const.Status.EINVAL, f"{n} picks, at most {self._max_picks}")
        borrowed: list[Any] = []  # arrays that the C side reads
        for i, pick in enumerate(picks):
            self._fill_pick(i, pick, borrowed)
        status = lib.cflow_ctx_sample(self._handle, self._picks, n, self._choices, self._err)
        _check(status, self._err)
        return [_choice(self._choices[i], pick.n_top >= 0) for i, pick in enumerate(picks)]

    def _fill_pick(self, i: int, p: Pick, borrowed: list[Any]) -> None:
        _PICK.pack_into(
            self._pick_bytes,
            i * _PICK.size,
            *(p.row, p.choice, p.index, p.n_top, p.seed & _MASK_64),
            *(p.temperature, p.top_p, p.min_p),
            *(p.repetition_penalty, p.frequency_penalty, p.presence_penalty),
            *(p.top_k, p.n_prompt),
            0 if p.history is None else len(p.history),
            0 if p.bias_ids is None else len(p.bias_ids),
        )
        pointers = (
            ("history", "int32_t[]", p.history),
            ("bias_ids", "int32_t[]", p.bias_ids),
            ("bias", "float[]", p.bias),
            ("mask", "uint32_t[]", p.mask),
        )
        for name, kind, array in pointers:
            if array is not None:
                borrowed.append(ffi.from_buffer(kind, array))
                setattr(self._picks[i], name, borrowed[-1])

    def cancel(self) -> None:
        """End the running step early. May be called from any thread."""
        lib.cflow_ctx_cancel(self._handle)

    @property
    def stage_count(self) -> int:
        """Stages run so far. May be read from any thread."""
        return int(lib.cflow_ctx_stage_count(self._handle))

    @property
    def read_bytes(self) -> int:
        """Weight bytes streamed so far."""
        return int(lib.cflow_ctx_read_bytes(self._handle))

    @property
    def stage_times(self) -> list[StageTime]:
        """Times of the plan's stages, of the head, and of sampling and scoring."""
        n = self._n_stages + 2
        times = ffi.new("cflow_stage_time[]", n)
        lib.cflow_ctx_stage_times(self._handle, times)
        return [_record(StageTime, times[i]) for i in range(n)]

    def value(self, name: str, row: int) -> Floats:
        """A value of the plan ("L0.q") for a row of the last step; all but "final_norm" need
        keep_values."""
        width = ffi.new("int32_t *")
        args = (self._handle, name.encode(), row)
        status = lib.cflow_ctx_value(*args, ffi.NULL, 0, width, self._err)
        out = np.empty(width[0], np.float32)
        if width[0]:
            pointer = ffi.from_buffer("float[]", out, require_writable=True)
            status = lib.cflow_ctx_value(*args, pointer, width[0], width, self._err)
        _check(status, self._err)
        return out


def _score(score: Any) -> Score:
    n = score.n_top
    tokens, logprobs = ffi.unpack(score.top_tokens, n), ffi.unpack(score.top_logprobs, n)
    return Score(score.token, score.logprob, score.rank, tuple(zip(tokens, logprobs, strict=True)))


def _choice(choice: Any, has_score: bool) -> Choice:
    score = _score(choice.score) if has_score and not choice.status else None
    return Choice(choice.status, choice.score.token, score)


# ---- tools ----


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a bytes-like object, continuing from crc."""
    view = ffi.from_buffer(data)
    return int(lib.cflow_crc32c(crc, view, len(view)))


def probe_bandwidth(n_bytes: int, threads: int, passes: int) -> float:
    """Read bandwidth of main memory in bytes a second: the best of `passes`."""
    out, err = ffi.new("double *"), ffi.new("cflow_error *")
    _check(lib.cflow_probe_bandwidth(out, n_bytes, threads, passes, err), err)
    return float(out[0])


def best_isa() -> str:
    """The best instruction set of this machine."""
    return str(ffi.string(lib.cflow_best_isa()).decode())
