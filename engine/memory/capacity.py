"""How many KV blocks fit into memory, and how long a context they allow."""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.kv_blocks import BLOCK, n_blocks_for

DEFAULT_CONTEXTS = 4  # full contexts
DEFAULT_PART = 4  # at most a quarter of the available memory


@dataclass(frozen=True, slots=True)
class Capacity:
    """notes: settings that did not fit as given."""

    max_context: int
    n_kv_blocks: int
    notes: tuple[str, ...] = ()


def fit_capacity(
    config: EngineConfig, model_context: int, block_bytes: int, available_bytes: int
) -> Capacity:
    """KV blocks, and the context that one sequence can use: kv_memory if it is set, else four full
    contexts within a quarter of available_bytes. EngineError if not even one block fits."""
    wanted = config.check_context(model_context)
    full = n_blocks_for(wanted)
    if config.kv_memory is None:
        budget = available_bytes // DEFAULT_PART
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
