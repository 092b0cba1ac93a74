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
from cflow.engine.text.grammar import GrammarError, Vocabulary, with_short_numbers

_KNOWN = 32  # compiled grammars in the cache
Mask = NDArray[np.uint32]


class Start(NamedTuple):
    """Matchers at the start of a grammar. short: of the same with short numbers, None without JSON."""

    matcher: Any
    short: Any


class Constraint:
    """The state of one choice in its grammar. It depends only on the tokens appended, so preemption
    does not affect it."""

    def __init__(self, start: Start, vocabulary: Vocabulary, pool: ThreadPoolExecutor) -> None:
        self._matcher = start.matcher.deep_copy()
        self._short = start.short and start.short.deep_copy()
        self._may_be_number = vocabulary.may_be_number
        self._is_number = False  # perhaps
        n_words = (vocabulary.n_tokens + 31) // 32
        self._mask, self._short_mask = np.zeros((2, n_words), np.uint32)
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
        if self._short is not None and not self._short.consume_token(token):
            self._short = None  # the schema itself asks for a longer number
        self._is_number = token in self._may_be_number
        if self._matcher.is_stopped():
            return True
        self._next = self._pool.submit(self._make)
        return False

    def _make(self) -> Mask:
        mask = self._mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise self._error()
        return self._shortened(mask) if self._is_number and self._short is not None else mask

    def _shortened(self, mask: Mask) -> Mask:
        """The mask without tokens that make a number too long, if others are left."""
        short = self._short_mask
        self._short.unsafe_compute_mask_ptr(short.ctypes.data, short.nbytes)
        short &= mask
        return short if short.any() else mask

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
        self._vocabulary = vocabulary
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._masking = ThreadPoolExecutor(1, "mask")
        self._compile = lru_cache(_KNOWN)(self._start)

    def compile(self, submit: Submit, done: Callable[[Compiled], object]) -> None:
        """Compile the grammar of a request; calls `done` from another thread."""
        self._compiling.submit(lambda: done(self._begin(submit)))

    def _begin(self, submit: Submit) -> Compiled:
        try:
            start = self._compile(submit.sampling.grammar)
        except GrammarError as error:
            return Compiled(submit.request_id, [], str(error))
        constraints = [
            Constraint(start, self._vocabulary, self._masking) for _ in range(submit.n_choices)
        ]
        return Compiled(submit.request_id, constraints)

    def _start(self, grammar: str) -> Start:
        matcher, short = self._vocabulary.compile(grammar), with_short_numbers(grammar)
        return Start(matcher, None if short is None else self._vocabulary.compile(short))
