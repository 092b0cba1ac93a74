"""How much context fits."""

from typing import Any

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.capacity import Capacity, fit_capacity

MIB = 1 << 20


def fit(available: int = 1 << 40, **settings: Any) -> Capacity:
    """A model of 4,096 positions whose blocks take 1 MiB."""
    return fit_capacity(EngineConfig(model="m", **settings), 4096, MIB, available)


def test_four_full_contexts_are_the_default() -> None:
    assert fit() == Capacity(4096, 4 * 128)
    assert fit(context=1000) == Capacity(1000, 4 * 32)


def test_the_default_takes_a_quarter_of_what_is_available() -> None:
    assert fit(available=1200 * MIB) == Capacity(4096, 300)


def test_kv_memory_is_used_in_full() -> None:
    assert fit(kv_memory=1000 * MIB + 5) == Capacity(4096, 1000)


def test_a_context_that_does_not_fit_is_lowered_and_noted() -> None:
    capacity = fit(kv_memory=100 * MIB)
    assert (capacity.max_context, capacity.n_kv_blocks) == (3200, 100)
    assert "lowered from 4096 to 3200" in capacity.notes[0]


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(EngineError, match="raise kv_memory") as caught:
        fit(kv_memory=MIB - 1)
    assert caught.value.code == "out_of_memory"


def test_more_context_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(EngineError, match=r"context 5000 exceeds .* \(4096\)"):
        fit(context=5000)
