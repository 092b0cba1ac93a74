"""Grammars in the worker: which tokens may come next.

One thread compiles grammars and another computes masks, so neither blocks the loop. A mask is
computed while the native step computes the logits it applies to.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Submit
from cflow.engine.text.grammar import GrammarError, Vocabulary

_KNOWN = 32  # compiled grammars in the cache
Mask = NDArray[np.uint32]


class Constraint:
    """The state of one choice in its grammar. It depends only on the tokens appended, so preemption
    does not affect it."""

    def __init__(self, matcher: Any, n_words: int, pool: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._mask = np.zeros(n_words, np.uint32)
        self._pool = pool
        self._next: Future[Mask] = pool.submit(self._make)

    def mask(self) -> Mask:
        """The mask, (n_words,), with a bit set for each token that may come next. Valid until the
        next append. EngineError if it took too much work."""
        return self._next.result()

    def append(self, token: int) -> bool:
        """Advance by a token that the mask allowed. True if only the end can follow."""
        if not self._matcher.consume_token(token):
            raise self._error()
        if self._matcher.is_stopped():
            return True
        self._next = self._pool.submit(self._make)
        return False

    def _make(self) -> Mask:
        mask = self._mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise self._error()
        return mask

    def _error(self) -> EngineError:
        reason = self._matcher.get_error().split("\n")[0][:200]
        return EngineError("invalid_request", f"the grammar failed: {reason}")


class Compiled(NamedTuple):
    """The constraints of a request, one per choice. fault: why there are none."""

    request_id: int
    constraints: list[Constraint]
    fault: str = ""


class Grammars:
    """Compiles grammars and caches the most recent ones."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._n_words = (vocabulary.n_tokens + 31) // 32
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._masking = ThreadPoolExecutor(1, "mask")
        self._compile = lru_cache(_KNOWN)(vocabulary.compile)

    def compile(self, submit: Submit, done: Callable[[Compiled], object]) -> None:
        """Compile the grammar of a request; calls `done` from another thread."""
        self._compiling.submit(lambda: done(self._begin(submit)))

    def _begin(self, submit: Submit) -> Compiled:
        try:
            start = self._compile(submit.sampling.grammar)
        except GrammarError as error:
            return Compiled(submit.request_id, [], str(error))
        copies = [start.deep_copy() for _ in range(submit.n_choices)]
        constraints = [Constraint(copy, self._n_words, self._masking) for copy in copies]
        return Compiled(submit.request_id, constraints)
