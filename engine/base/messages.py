"""The protocol between front end and worker: length-prefixed msgpack over a socket pair.

A frame is a little-endian u32 length and one message of that many bytes. Down: Hello, Submit,
Cancel, Drain. Up: Loading, Ready, Step, Failed, Line, Stats, Heartbeat, Fatal. A request ends with
one Finish for each choice, or with one Failed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import astuple, replace

PROTOCOL = 4
MAX_FRAME_BYTES = 256 << 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled and when they stop. The front end has validated it."""

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
    grammar: str | None = None  # what the answer must follow (text/grammar.py), checked
    shown_ids: tuple[int, ...] = ()  # special tokens whose text is part of the answer
    pooling: Literal["last", "mean"] | None = None  # the answer is the embedding; with max_tokens 0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message down: what to load and how."""

    protocol: int
    engine: dict[str, str | int | float | bool | None]  # fields of config.EngineConfig
    digest: str  # of the model file that the front end has read


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One prompt, n_choices answers. Choice c samples with the generator (seed, c)."""

    request_id: int
    prompt: tuple[int, ...]
    n_choices: int
    sampling: SamplingParams
    key: str = ""  # whose request; keys share the engine fairly
    priority: int = 0  # smaller goes first
    place: int = 0  # index of its first choice among all answers of the HTTP request
    deadline: float | None = None  # time.monotonic() at which unfinished choices end


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish requests for up to timeout_s, fail the rest, then exit."""

    timeout_s: float


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability and the best alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: Literal["stop", "length"]
    stop: str | int | None = None  # the stop string or token id that matched; None: end of text


TIMED_OUT = Finish("length", "timeout")


class DiskUsage(msgspec.Struct, frozen=True, array_like=True):
    """What a choice read from disk: fields of RowUsage, summed. A read that several rows of a step
    share is charged to the first."""

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
    """What a step added to one choice. Text lags behind tokens while bytes are held back. The token
    that ends an answer is one of its tokens. logprobs: one per token, if requested.
    """

    request_id: int
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    # Set on the first delta of choice 0. n_cached: prompt tokens found in the prefix cache.
    n_cached: int | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    # Set with the finish, if some weights are on disk.
    disk: DiskUsage | None = None
    embedding: bytes | None = None  # with the finish, if one was asked for: f32, little-endian

    def __add__(self, then: Delta) -> Delta:
        """This delta followed by another of the same step."""
        return replace(
            self,
            tokens=self.tokens + then.tokens,
            text=self.text + then.text,
            logprobs=self.logprobs + then.logprobs,
            finish=then.finish,
            disk=then.disk,
        )


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens done. The first one of a request tells how many were in the prefix cache."""

    request_id: int
    n_done: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    deltas: tuple[Delta, ...]
    progress: tuple[Progress, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request and all its choices have ended. code: of EngineError, such as "cancelled"."""

    request_id: int
    code: str
    message: str


class Line(msgspec.Struct, frozen=True, tag="line"):
    """Requests with waiting sequences, the next to run first. Sent when it changes, at most once a
    second."""

    request_ids: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and has generated a token."""

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
    threads_reason: str = ""  # why n_threads
    notes: tuple[str, ...] = ()  # what is worse than it could be: buffered reads, no huge pages
    n_deferred: int = 0  # experts of a token that are added one layer late
    # If some experts are on disk:
    n_experts: int = 0  # of all layers
    n_expert_slots: int = 0  # experts that fit into memory
    expert_bytes: int = 0  # memory of these slots, part of resident_bytes
    expert_io: str = ""  # how experts are read: "direct" or "cached"
    # If some layers are on disk:
    n_layers: int = 0
    n_layers_kept: int = 0  # layers always in memory
    n_layer_slots: int = 0  # these, and slots that the other layers pass through
    layer_bytes: int = 0  # memory of these slots, part of resident_bytes
    layer_step_bytes: int = 0  # read from disk in every step


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    what: str  # "weights", then "experts" while a cache warms up
    done_bytes: int
    total_bytes: int


class DiskStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Counters of one kind of weights on disk: fields of cflow_tier_stats, which explains them."""

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
    preemptions_memory: int = 0  # of these, because KV blocks ran out
    draft_rounds: int = 0  # steps that checked drafts, counted per sequence
    drafts: int = 0  # drafts checked
    accepted_at: tuple[int, ...] = ()  # drafts accepted, by their position in the step
    steps: int = 0
    step_s: float = 0.0
    read_bytes: int = 0
    cancelled_queue: int = 0
    cancelled_prefill: int = 0
    cancelled_decode: int = 0
    disk: dict[str, DiskStats] = {}  # of "experts" and "layers", if some are on disk


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every 500 ms, also during a step. stages: cflow_ctx_stage_count."""

    stages: int
    in_step: bool


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The worker's last message: it cannot go on, for example because the model does not load."""

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
    """Splits a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that data completes. ValueError for a length above MAX_FRAME_BYTES."""
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
