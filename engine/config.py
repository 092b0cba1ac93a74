"""The engine's settings: the same on every command that runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cflow.engine.errors import ConfigError

KV_TYPES = ("f16", "f32", "bf16", "q8")
PRECISIONS = ("int8", "f32")
ISAS = ("scalar", "avx2", "avx512vnni")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked when made: ConfigError names the field and its value. None: chosen by the engine.

    context       positions one sequence may have; at most the model's own. Without it the model's,
                  or what the KV memory holds if that is less.
    kv_memory     bytes for keys and values. Without it four full contexts, but at most a quarter of
                  the memory that is available once the weights are loaded.
    max_queue     requests that may wait beyond those that run.
    max_step_ms   how long a step may get through prefill while others decode.
    stuck_s       a step without any progress for so long is taken as hung; the worker is replaced.
    """

    model: str  # path of a .cflow or .vflow file
    served_name: str | None = None
    threads: int | None = None
    context: int | None = None
    kv_memory: int | None = None
    kv: str = "f16"
    precision: str = "int8"
    isa: str | None = None
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_queue: int = 512
    max_step_ms: float = 250.0
    stuck_s: float = 60.0

    def __post_init__(self) -> None:
        _check_number("threads", self.threads, 1, 1024)
        _check_number("context", self.context, 1, 1 << 24)
        _check_number("kv_memory", self.kv_memory, 1 << 16, 1 << 50)
        _check_choice("kv", self.kv, KV_TYPES)
        _check_choice("precision", self.precision, PRECISIONS)
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


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(field, f"{value!r} is not in {low}..{high}")


def _check_choice(field: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        names = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ConfigError(field, f"{value!r} is none of {names}")
