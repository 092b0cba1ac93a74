"""A model with all experts in memory: which experts it chooses, and how long its stages take."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap.records import Records
from cflow.engine.lab.overlap.schedule import Trace
from cflow.engine.lab.overlap.streams import Case, decode_case, open_case, passes
from cflow.engine.native import Context, Model

Times = NDArray[np.float64]
LOOK_S = 2e-5  # between two looks at the stage that a context is in


class Resident:
    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self.model = Model(str(path), threads=threads)
        self.records = Records(self.model)
        self.layers = self.model.layers
        self.ops = self.model.ops

    @property
    def top_k(self) -> int:
        return max(layer.top_k for layer in self.layers)

    @property
    def least_slots(self) -> int:
        """Slots for all experts in the delay's window and one read; fewer would shorten the window."""
        window = max(layer.expert_delay for layer in self.layers) + 1
        return window * self.top_k + 1

    def trace(self, case: Case) -> Trace:
        """The records that each token of the case uses, layer by layer."""
        tokens: Trace = []
        with closing(open_case(self.model, case, keep_values=True)) as context:
            for _ in passes(context, case):
                tokens.append([self._used(context, layer) for layer in range(len(self.layers))])
        return tokens

    def _used(self, context: Context, layer: int) -> list[int]:
        chosen = context.value(f"L{layer}.routed", 0)
        return self.records.of(layer, sorted(chosen[chosen >= 0].astype(int).tolist()))

    def stage_seconds(self, context: Context, case: Case) -> list[float]:
        """Mean time of each stage, and last of the head with what lies between tokens."""
        n_stages, n_tokens = self.model.plan.n_stages, len(case.tokens)
        with _StageWatch(context) as watch:
            decode_case(context, case)
        began = watch.began(n_tokens * (n_stages + 2))
        each = np.diff(began).reshape(n_tokens, n_stages + 2).mean(axis=0)
        return [*each[:n_stages].tolist(), float(each[n_stages:].sum())]

    def close(self) -> None:
        self.model.close()


class _StageWatch(threading.Thread):
    """Notes from another thread when the stages of a context begin."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._over = threading.Event()
        self._looks: list[tuple[int, float]] = []

    def _look(self) -> None:
        self._looks.append((self._context.stage_count, time.perf_counter()))

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def __enter__(self) -> _StageWatch:
        self._look()
        self.start()
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._look()

    def began(self, n: int) -> Times:
        return first_seen(self._looks, self._began_s, n)


def first_seen(looks: Sequence[tuple[int, float]], began_s: float, n: int) -> Times:
    """When each of n stages was first seen, and the end: (n + 1,) seconds.

    looks: the count of stages begun so far and when it was read, from before the first to after the
    last. began_s: when the first began."""
    counts, times = (np.array(column) for column in zip(*looks, strict=True))
    if counts[-1] - counts[0] != n:
        raise LabError(f"{counts[-1] - counts[0]} stages ran, the plan has {n}")
    first = np.searchsorted(counts, counts[0] + 2 + np.arange(n - 1))
    return np.concatenate([[began_s], times[first], times[-1:]])
