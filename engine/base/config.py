"""The engine's settings: the same on every command that runs a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cflow.engine.base.errors import ConfigError
from cflow.engine.base.limits import EXPERT_READS, MAX_DRAFTS

KV_TYPES = ("f16", "f32", "bf16", "q8")
PRECISIONS = ("int8", "f32")
EXPERT_IO = ("direct", "cached")
SPECULATION = ("ngram", "off")
ISAS = ("scalar", "avx2", "avx512vnni")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked when made: ConfigError names the field and its value. None: chosen by the engine.

    context       positions one sequence may have; at most the model's own. Without it the model's,
                  or what the KV memory holds if that is less.
    kv_memory     bytes for keys and values. Without it four full contexts, but at most a quarter of
                  the memory that is available once the weights are loaded.
    expert_cache  bytes of memory for experts, or their share of all as in "25%"; the others are read
                  from the file when they are wanted. Without it all experts if they fit beside
                  everything else, or else what fits.
    weights_memory
                  bytes of memory for the matrices of layers, or their share of all as in "25%"; the
                  others are read from the file in every step. Without it all layers.
    expert_io     "direct": past the page cache, where the file system allows it; "cached": through.
    defer_experts of a token's experts so many, those with the least weight, join the stream a layer
                  later: their reads have longer, and the output is another one. 0: as the model says.
    expert_reads, expert_read_rate
                  bounds that leave others their part of the disk: reads in flight, bytes a second;
                  for experts, and for layers as well.
    speculation   "ngram": guesses at an answer's next tokens, from what it and its prompt repeat, are
                  checked several in a step where that is faster; answers are the same. Or "off".
    max_queue     answers that may wait beyond those that run.
    max_step_ms   how long a step may get through prefill while others decode; four times that while
                  none do.
    stuck_s       a step without any progress for so long is taken as hung; the worker is replaced.
    """

    model: str  # path of a .cflow or .vflow file
    served_name: str | None = None
    threads: int | None = None
    context: int | None = None
    kv_memory: int | None = None
    kv: str = "f16"
    precision: str = "int8"
    expert_cache: int | str | None = None
    weights_memory: int | str | None = None
    expert_io: str = "direct"
    defer_experts: int = 0
    expert_reads: int = EXPERT_READS
    expert_read_rate: int | None = None
    speculation: str = "ngram"
    isa: str | None = None
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_queue: int = 1024
    max_step_ms: float = 250.0
    stuck_s: float = 60.0

    def __post_init__(self) -> None:
        _check_number("threads", self.threads, 1, 1024)
        _check_number("context", self.context, 1, 1 << 24)
        _check_number("kv_memory", self.kv_memory, 1 << 16, 1 << 50)
        _check_choice("kv", self.kv, KV_TYPES)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_share("expert_cache", self.expert_cache)
        _check_share("weights_memory", self.weights_memory)
        _check_choice("expert_io", self.expert_io, EXPERT_IO)
        _check_number("defer_experts", self.defer_experts, 0, 1024)
        _check_number("expert_reads", self.expert_reads, 1, 64)
        _check_number("expert_read_rate", self.expert_read_rate, 1 << 20, 1 << 40)
        _check_choice("speculation", self.speculation, SPECULATION)
        _check_choice("isa", self.isa, (None, *ISAS))
        _check_number("max_sequences", self.max_sequences, 1, 4096)
        _check_number("max_step_tokens", self.max_step_tokens, 1, 65536)
        _check_number("max_queue", self.max_queue, 0, 1 << 20)
        _check_number("max_step_ms", self.max_step_ms, 1, 3_600_000)
        _check_number("stuck_s", self.stuck_s, 1, 86_400)
        if self.max_step_tokens < self.max_sequences:
            raise ConfigError(
                "max_step_tokens",
                f"{self.max_step_tokens} is less than max_sequences ({self.max_sequences}); "
                "a step must have room for a token of each",
            )

    @property
    def max_logits(self) -> int:
        """Rows of a step that keep their logits: one of each sequence, and all that one guesses."""
        if self.speculation == "off":
            return self.max_sequences
        return max(self.max_sequences, min(MAX_DRAFTS + 1, self.max_step_tokens))


def read_share(text: str) -> float:
    """ "25%" as 0.25. ValueError for what is no percentage above 0 and up to 100."""
    percent = float(text[:-1]) if text.endswith("%") else math.nan
    if not 0 < percent <= 100:
        raise ValueError(f"{text!r} is not a percentage")
    return percent / 100


def _check_share(field: str, value: int | str | None) -> None:
    if not isinstance(value, str):
        return _check_number(field, value, 1, 1 << 50)
    try:
        read_share(value)
    except ValueError:
        raise ConfigError(
            field, f"{value!r} is neither a number of bytes nor a percentage"
        ) from None


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(field, f"{value!r} is not in {low}..{high}")


def _check_choice(field: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        names = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ConfigError(field, f"{value!r} is none of {names}")
