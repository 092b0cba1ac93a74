"""The engine's settings: the same on every command that runs a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cflow.engine.base.errors import ConfigError, EngineError
from cflow.engine.base.limits import EXPERT_READS, MAX_DRAFTS

KV_TYPES = ("f16", "f32", "bf16", "q8")
PRECISIONS = ("int8", "f32")
EXPERT_IO = ("direct", "cached")
SPECULATION = ("ngram", "off")
ISAS = ("scalar", "avx2", "avx512vnni")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError, which names the field and its value. None means
    that the engine chooses.

    context           positions of a sequence, at most the model's own. Default: the model's own, or
                      what the KV memory holds.
    kv_memory         bytes for keys and values. Default: four full contexts, at most a quarter of
                      the memory left beside the weights.
    expert_cache      bytes of memory for experts, or a share of all as in "25%"; the rest are read
                      from the file when a token needs them. Default: all that fit.
    weights_memory    bytes of memory for the matrices of layers, or a share of all as in "25%"; the
                      rest are read from the file in every step. Default: all layers.
    expert_io         how experts and layers are read: "direct" (bypassing the page cache, if the
                      file system can) or "cached".
    defer_experts     add the N lowest-weighted experts of each token one layer late, giving their
                      reads more time. Changes the output. 0: as the model says.
    expert_reads      most reads in flight, counted separately for experts and layers.
    expert_read_rate  most bytes read a second, counted separately for experts and layers.
    speculation       "ngram": draft tokens that prompt and answer repeat and check several in one
                      step, where that is faster; the output stays the same. Or "off".
    max_queue         answers that may wait besides those that run.
    max_step_ms       limit on the time of a step with prefill while other sequences decode; four
                      times that otherwise.
    stuck_s           a step without progress for this long counts as hung: the worker is replaced.
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
                "a step must have room for one token of each sequence",
            )

    @property
    def max_logits(self) -> int:
        """Rows of a step that keep their logits: one of each sequence, or one sequence's drafts."""
        if self.speculation == "off":
            return self.max_sequences
        return max(self.max_sequences, min(MAX_DRAFTS + 1, self.max_step_tokens))

    def check_context(self, model_context: int) -> int:
        """The context that is set, else the model's. Raises EngineError if it exceeds the model's."""
        if self.context is not None and self.context > model_context:
            message = f"context {self.context} exceeds the model's own ({model_context}); lower it"
            raise EngineError("invalid_request", message)
        return self.context or model_context


def read_share(text: str) -> float:
    """A percentage as a share: "25%" is 0.25. ValueError unless it is above 0 and at most 100."""
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
        raise ConfigError(field, f"{value!r} is not one of {names}")
