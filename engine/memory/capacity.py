"""How much context fits into how much KV memory, and what is said where memory does not do."""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.kv_blocks import BLOCK, n_blocks_for

DEFAULT_CONTEXTS = 4  # full ones
DEFAULT_SHARE = 4  # at most one part in so many of the available memory


@dataclass(frozen=True, slots=True)
class Capacity:
    """notes: what does not fit as it was asked for."""

    max_context: int
    n_kv_blocks: int
    notes: tuple[str, ...] = ()


def check_context(config: EngineConfig, model_context: int) -> int:
    """The context asked for. EngineError if the model was not made for it."""
    if config.context is not None and config.context > model_context:
        message = f"context {config.context} is more than the model was made for ({model_context})"
        raise EngineError("invalid_request", message)
    return config.context or model_context


def fit_capacity(
    config: EngineConfig, model_context: int, block_bytes: int, available_bytes: int
) -> Capacity:
    """Blocks for the KV memory of the config, or four full contexts within a quarter of what is
    available; and the context that one sequence can use of them."""
    wanted = check_context(config, model_context)
    full = n_blocks_for(wanted)
    if config.kv_memory is None:
        budget = available_bytes // DEFAULT_SHARE
        n_blocks = min(budget // block_bytes, DEFAULT_CONTEXTS * full)
    else:
        budget = config.kv_memory
        n_blocks = budget // block_bytes
    if not n_blocks:
        message = f"KV memory of {budget:,} bytes does not hold one block of {block_bytes:,} bytes"
        raise EngineError("out_of_memory", f"{message}; raise kv_memory")
    if n_blocks >= full:
        return Capacity(wanted, n_blocks)
    note = (
        f"context lowered from {wanted} to {n_blocks * BLOCK}: KV memory is {budget:,} bytes, "
        f"{full * block_bytes:,} are needed"
    )
    return Capacity(n_blocks * BLOCK, n_blocks, (note,))
