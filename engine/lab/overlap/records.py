"""The expert records of a model file, by number as the engine counts them: layer by layer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Model, const


class Records:
    """Reads go through the expert cache of the model that is passed, one opened on the same file."""

    def __init__(self, model: Model) -> None:
        bank, layers = ExpertBank.of(model), model.layers
        self.n, self.bytes = bank.n_records, bank.record_bytes
        self._first = [0, *accumulate(layer.n_experts for layer in layers)]  # of each layer
        self._places = [  # of each record: a tensor in it, which expert
            (index, expert)
            for index, tensor in enumerate(model.tensors)
            if tensor.role == const.Role.EXPERT_DOWN
            for expert in range(layers[tensor.block].n_experts)
        ]

    def of(self, layer: int, experts: Iterable[int]) -> list[int]:
        return [self._first[layer] + expert for expert in experts]

    def shuffled(self) -> list[int]:
        """All of them, in the same random order each time."""
        return random.Random(3).sample(range(self.n), self.n)

    def read(self, model: Model, record: int) -> None:
        index, expert = self._places[record]
        model.rows(index, expert, 0, 0)

    def read_together(self, model: Model, records: Sequence[int]) -> None:
        """Demands records at once and waits for all; the cache must hold them together."""
        uses = np.zeros(self.n, np.uint64)
        uses[list(records)] = 1
        model.warm(uses)
