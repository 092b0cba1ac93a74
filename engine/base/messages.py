"""What crosses the socket pair between the front end and the worker: length-prefixed msgpack.

A frame is a little-endian u32 length and that many bytes, one message. Down: Hello, Submit, Cancel,
Drain. Up: Loading, Ready, Step, Failed, Line, Stats, Heartbeat, Fatal. Every choice of a request ends
with exactly one Finish in a Step or the request ends with one Failed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import astuple, replace

PROTOCOL = 3
MAX_FRAME_BYTES = 256 << 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when they stop. Already validated; the worker trusts it."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n_logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k best
    n_prompt_logprobs: int | None = None
    n_experts: int = 0  # 0: the model's own number
    grammar: str | None = None  # what the answer must follow (grammar.py), checked
    shown_ids: tuple[int, ...] = ()  # special tokens whose text is part of the answer


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message down: what to load and how. Everything a worker needs to know."""

    protocol: int
    engine: dict[str, str | int | float | bool | None]  # fields of config.EngineConfig
    digest: str  # of the model file, as the front end has read it


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One prompt, n_choices answers. Choice c samples with the generator (seed, c)."""

    request_id: int
    prompt: tuple[int, ...]
    n_choices: int
    sampling: SamplingParams
    key: str = ""  # whose request: fairness between keys
    priority: int = 0  # smaller goes first
    place: int = 0  # of its first choice among the answers of one HTTP request
    deadline: float | None = None  # of time.monotonic(); what is not finished then ends so


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs within timeout_s, fail the rest, then exit."""

    timeout_s: float


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability and the best alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: Literal["stop", "length"]
    stop: str | int | None = None  # the stop string or token id that matched; None: end of text


TIMED_OUT = Finish("length", "timeout")


class DiskUsage(msgspec.Struct, frozen=True, array_like=True):
    """What an answer's tokens asked of the disk: fields of RowUsage, summed. What several wanted in
    one step is charged to the first."""

    expert_hits: int = 0
    expert_misses: int = 0
    layer_reads: int = 0
    disk_bytes: int = 0
    stall_ns: int = 0

    def __add__(self, other: DiskUsage | None) -> DiskUsage:
        if other is None:
            return self
        return DiskUsage(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in a step. Text lags behind tokens while bytes are held back.

    The token that ends an answer counts as one of its tokens; logprobs follow tokens one to one.
    """

    request_id: int
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    # Set once, on the first delta of choice 0 (n_cached: prompt tokens that came from the cache).
    n_cached: int | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    # Set with the finish, where weights come from disk.
    disk: DiskUsage | None = None

    def __add__(self, then: Delta) -> Delta:
        """And what the choice gained next in the same step."""
        return replace(
            self,
            tokens=self.tokens + then.tokens,
            text=self.text + then.text,
            logprobs=self.logprobs + then.logprobs,
            finish=then.finish,
            disk=then.disk,
        )


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """A request's prompt is begun (first one: n_done tokens came from the cache) or further on."""

    request_id: int
    n_done: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    deltas: tuple[Delta, ...]
    progress: tuple[Progress, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request is over, all its choices. code: an errors.py code, e.g. "cancelled"."""

    request_id: int
    code: str
    message: str


class Line(msgspec.Struct, frozen=True, tag="line"):
    """Requests of which something waits to run, the next first. When that changes, at most once a
    second."""

    request_ids: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and a first token has been made."""

    pid: int
    isa: str
    n_threads: int
    n_kv_blocks: int
    max_context: int
    resident_bytes: int
    huge_bytes: int
    kv_bytes: int
    scratch_bytes: int
    load_s: float
    threads_reason: str = ""  # why n_threads, and not more
    notes: tuple[str, ...] = ()  # what did not go as wished: buffered reads, no huge pages
    n_deferred: int = 0  # experts of a token that join a layer late
    n_experts: int = 0  # where some stay on disk: of all layers
    n_expert_slots: int = 0  # how many of them fit into memory
    expert_bytes: int = 0  # what those take, part of resident_bytes
    expert_io: str = ""  # how the others are read: "direct" or "cached"
    n_layers: int = 0  # where some stay on disk: of all
    n_layers_kept: int = 0  # that are always in memory
    n_layer_slots: int = 0  # these and what passes through
    layer_bytes: int = 0  # what that takes, part of resident_bytes
    layer_step_bytes: int = 0  # of the others, read in every step


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    what: str  # "weights", or "experts" that were used most
    done_bytes: int
    total_bytes: int


class DiskStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of a kind of weights that come from disk: fields of cflow_tier_stats, which explains them."""

    n_resident: int = 0
    n_loading: int = 0
    n_overdue: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    speculated: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    reads: int = 0
    disk_bytes: int = 0
    warm_bytes: int = 0
    extra_reads: int = 0
    failed_io: int = 0
    failed_cut: int = 0
    failed_altered: int = 0
    failed_timed_out: int = 0
    stall_ns: int = 0
    read_ns: int = 0
    latencies: tuple[int, ...] = ()
    ghost_hits_2x: int = 0
    ghost_hits_4x: int = 0


class Stats(msgspec.Struct, frozen=True, tag="stats", kw_only=True):
    """Totals since the worker started, and gauges. Sent after a step, at most every 100 ms."""

    n_running: int = 0
    n_waiting: int = 0
    n_kv_used: int = 0
    n_kv_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    preemptions: int = 0
    preemptions_memory: int = 0  # of these, for want of KV blocks
    drafts: int = 0  # times that guesses were run for a sequence
    guesses: int = 0
    right_at: tuple[int, ...] = ()  # of the first guesses, second ones, ...: those that were right
    steps: int = 0
    step_s: float = 0.0
    read_bytes: int = 0
    cancelled_queue: int = 0
    cancelled_prefill: int = 0
    cancelled_decode: int = 0
    disk: dict[str, DiskStats] = {}  # of "experts" and "layers", where some stay there


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Every 500 ms from the reader thread, also during a step. stages: the native stage counter."""

    stages: int
    in_step: bool


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The worker cannot go on, e.g. the model cannot be loaded. Its last message."""

    code: str
    message: str


Down = Hello | Submit | Cancel | Drain
Up = Ready | Loading | Step | Failed | Line | Stats | Heartbeat | Fatal

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Down | Up) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(body)} bytes; at most {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """Cuts a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that data completes. Raises ValueError for a length no sender makes."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(self._buffer, start)
            if n > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {n} bytes; at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + n
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
