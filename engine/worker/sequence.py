"""A request and its choices as the scheduler sees them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from cflow.engine.base.messages import DiskUsage, Logprob, SamplingParams, Submit
from cflow.engine.base.native_types import Pick, RowUsage
from cflow.engine.memory.kv_blocks import BLOCK, block_key, root_key
from cflow.engine.worker.constraint import Constraint
from cflow.engine.worker.drafts import Lookup
from cflow.engine.worker.transcript import Transcript

BAN = -np.inf


class Request:
    """One prompt and its choices. order: arrival number. turn: arrival number of its HTTP request,
    which can have several prompts."""

    __slots__ = (
        "id",
        "is_counted",
        "is_prompt_done",
        "n_cached",
        "order",
        "prompt_scores",
        "sequences",
        "submit",
        "turn",
    )

    def __init__(self, submit: Submit, order: int) -> None:
        self.submit = submit
        self.id = submit.request_id
        self.order = order
        self.turn = 0
        self.is_prompt_done = False
        self.is_counted = False  # in the counters of prefix cache look-ups
        self.n_cached = 0  # prompt tokens that came from the prefix cache
        self.prompt_scores: list[Logprob] = []  # of prompt tokens from the second on
        self.sequences: list[Sequence] = []  # unfinished choices


class Sequence:
    """One choice: its tokens, how many of them are in KV blocks, and how it samples.

    blocks[i] holds positions BLOCK * i and on. slot: its number in the native context, -1 while it
    waits. transcript: for the worker; the scheduler does not use it.
    """

    __slots__ = (
        "_has_penalty",
        "_keys",
        "_pooled",
        "blocks",
        "choice",
        "disk",
        "grammar",
        "is_waiting",
        "lookup",
        "n_computed",
        "n_prompt",
        "n_registered",
        "pick",
        "request",
        "slot",
        "tokens",
        "transcript",
    )

    def __init__(
        self,
        request: Request,
        choice: int,
        eos_ids: Collection[int],
        transcript: Transcript,
        grammar: Constraint | None = None,
    ) -> None:
        self.request = request
        self.choice = choice
        self.tokens = array("i", request.submit.prompt)
        self.n_prompt = len(self.tokens)
        self.n_computed = 0
        self.blocks: list[int] = []
        self.n_registered = 0  # blocks offered to the prefix cache
        self.slot = -1
        self.is_waiting = False  # in the queue of waiting.py
        self.disk: DiskUsage | None = None  # so far, if some weights are on disk
        self.lookup: Lookup | None = None  # from its first decode on, if drafts are enabled
        self.transcript = transcript
        self.grammar = grammar
        self.pick = _pick(request.submit.sampling, choice, self.n_prompt, eos_ids)
        self._has_penalty = has_penalty(request.submit.sampling)
        self._keys: list[bytes] = []
        self._pooled: NDArray[np.float64] | None = None

    @property
    def needs_all_rows(self) -> bool:
        """No prompt token may be skipped: each is scored, or is part of a mean."""
        return self.is_scoring or self.request.submit.sampling.pooling == "mean"

    def pool(self, position: int, state: NDArray[np.float32]) -> None:
        """Add the state of a position, in their order, so that a mean has the same bits however its
        rows are divided into steps. Position 0 begins anew, also after a preemption."""
        if self._pooled is None or not position or self.request.submit.sampling.pooling == "last":
            self._pooled = state.astype(np.float64)
        else:
            self._pooled += state

    def embedding(self) -> bytes | None:
        """The pooled state, f32; None if none was asked for."""
        if self._pooled is None:
            return None
        is_mean = self.request.submit.sampling.pooling == "mean"
        return (self._pooled / (self.n_prompt if is_mean else 1)).astype("<f4").tobytes()

    @property
    def n_pending(self) -> int:
        """Number of known tokens that are not computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_scoring(self) -> bool:
        """Prompt log-probabilities are incomplete, so no prompt token may be skipped."""
        request = self.request
        return (
            request.submit.sampling.n_prompt_logprobs is not None
            and self.choice == 0
            and len(request.prompt_scores) < self.n_prompt - 1
        )

    def block_keys(self, n: int) -> list[bytes]:
        """Keys of the first n blocks, all of which must be full."""
        keys = self._keys
        while len(keys) < n:
            start = len(keys) * BLOCK
            parent = keys[-1] if keys else root_key(self.request.submit.sampling.n_experts)
            keys.append(block_key(parent, self.tokens[start : start + BLOCK]))
        return keys[:n]

    def prepare_pick(self, row: int) -> Pick:
        """The pick for the next token, from a row of the step. Valid until the next append."""
        pick, params = self.pick, self.request.submit.sampling
        pick.row = row
        pick.index = len(self.tokens) - self.n_prompt
        if pick.index == params.min_tokens and params.min_tokens:
            pick.bias_ids, pick.bias = _bias(params.logit_bias)
        if self._has_penalty:
            pick.history = np.frombuffer(self.tokens, np.int32)
        return pick

    def prepare_mask(self) -> None:
        """Wait for the mask of its grammar, if it has one. EngineError if the grammar fails."""
        if self.grammar is not None:
            self.pick.mask = self.grammar.mask()

    def charge(self, rows: Iterable[RowUsage]) -> None:
        """Add disk reads of some rows to those of the sequence."""
        self.disk = DiskUsage(*map(sum, zip(*rows, strict=True))) + self.disk

    def append(self, token: int) -> None:
        self.pick.history = None  # tokens cannot grow while numpy holds a view of them
        self.tokens.append(token)


def has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _pick(params: SamplingParams, choice: int, n_prompt: int, eos_ids: Collection[int]) -> Pick:
    bias = params.logit_bias
    if params.min_tokens:
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))
        bias = bias | dict.fromkeys(ends, BAN)
    bias_ids, bias_values = _bias(bias)
    return Pick(
        row=0,
        choice=choice,
        n_top=-1 if params.n_logprobs is None else params.n_logprobs,
        seed=params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        top_k=params.top_k,
        n_prompt=n_prompt,
        bias_ids=bias_ids,
        bias=bias_values,
    )


def _bias(bias: dict[int, float]) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    if not bias:
        return None, None
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
