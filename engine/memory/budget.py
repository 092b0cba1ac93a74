"""How the memory of a machine is shared: one arithmetic for server, plan, bench and perplexity.

It needs a model's header and the settings, and reads no weights. The available memory holds

    weights      all but experts, or those that weights_memory leaves in memory (layer_memory.py)
    KV blocks    what the caller asks for, or what a server chooses (capacity.py)
    scratch      buffers of the context
    spare        memory that the caller takes later
    experts      all of them, or a cache (experts.py)
    reserve      1/16 of the available memory, which a cache chosen here leaves free
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.reports import Progress
from cflow.engine.memory.capacity import fit_capacity
from cflow.engine.memory.experts import ExpertBank, asked_cache, choose_cache, expert_options
from cflow.engine.memory.layer_memory import fix_weights
from cflow.engine.native import ContextOptions, Model, context_memory

RESERVE_PART = 16  # the reserve is 1/16 of the available memory


class Sizes(TypedDict):
    """How large a context is: fields of ContextOptions."""

    max_rows: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a model gets. expert_cache: bytes, 0 if all experts stay in memory. notes: settings that
    did not fit as given."""

    context: ContextOptions
    kv_bytes: int
    scratch_bytes: int
    expert_cache: int
    notes: tuple[str, ...] = ()


class Budget:
    """The memory of this machine, and what one model needs of it."""

    def __init__(self, config: EngineConfig) -> None:
        """EngineError for settings that this model does not allow."""
        self.config = config
        self.model = open_header(config)
        self.bank = ExpertBank.of(self.model)
        self.weights = fix_weights(config, self.model, self.bank)
        self.memory = machine.memory()
        self.cores = machine.cores()

    @property
    def threads(self) -> int:
        return self.config.threads or self.cores.threads

    @property
    def threads_reason(self) -> str:
        return "as set" if self.config.threads else self.cores.reason

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of BLOCK positions of keys and values."""
        one = Sizes(max_rows=1, max_sequences=1, max_context=1, n_kv_blocks=1)
        return context_memory(self.model, **self._options(one))[0]

    def share(self, sizes: Sizes | None = None, *, spare: int = 0) -> Share:
        """Shares for a context of these sizes; None: of a server with these settings, whose KV
        memory depends on what is left. EngineError if the memory does not hold them."""
        asked, all_experts = self.config.expert_cache, self._expert_bytes
        if asked is not None:
            return self._share_beside(min(asked_cache(asked, self.bank), all_experts), sizes, spare)
        with suppress(EngineError):
            if not (whole := self._share_beside(all_experts, sizes, spare)).expert_cache:
                return whole
        return self._share_beside(0, sizes, spare)

    def load(self, share: Share, progress: Progress) -> Model:
        """The model, its weights in the memory that `share` gives them."""
        return Model(
            self.config.model,
            threads=self.threads,
            as_f32=self.config.precision == "f32",
            defer_experts=self.config.defer_experts,
            experts=expert_options(self.config, share.expert_cache),
            weights_memory=self.weights.budget,
            progress=progress,
        )

    @property
    def _expert_bytes(self) -> int:
        """Bytes of the experts that self.weights does not count."""
        return 0 if self.config.precision == "f32" else self.bank.n_bytes

    def _share_beside(self, expert_bytes: int, sizes: Sizes | None, spare: int) -> Share:
        """Shares for a context beside `expert_bytes` of experts, and the cache that it leaves room
        for."""
        weight_bytes = self.weights.n_bytes + expert_bytes
        left = self.memory.available - weight_bytes
        notes: tuple[str, ...] = ()
        to_lower: tuple[str, ...] = ()
        if sizes is None:
            if left <= 0:
                raise self._too_little(f"the weights need {weight_bytes:,} bytes")
            sizes, notes = self._server_sizes(left)
            to_lower = ("kv_memory", "context", "max_step_tokens")
        options = self._options(sizes)
        kv_bytes, scratch_bytes = context_memory(self.model, **options)
        taken = kv_bytes + scratch_bytes + spare
        if taken > left:
            need = (
                f"weights of {weight_bytes:,} bytes, keys and values of {kv_bytes:,} and buffers of "
                f"{scratch_bytes + spare:,} need {weight_bytes + taken:,}"
            )
            raise self._too_little(need, *to_lower)
        room = room_for_experts(self.memory.available, self.weights.n_bytes + taken)
        cache = choose_cache(self.config, self.bank, room)
        return Share(options, kv_bytes, scratch_bytes, cache, notes)

    def _server_sizes(self, left: int) -> tuple[Sizes, tuple[str, ...]]:
        """Sizes of a server's context within `left` bytes, and notes."""
        capacity = fit_capacity(self.config, self.model.header.context, self.kv_block_bytes, left)
        sizes = Sizes(
            max_rows=self.config.max_step_tokens,
            max_sequences=self.config.max_logits,
            max_context=capacity.max_context,
            n_kv_blocks=capacity.n_kv_blocks,
        )
        return sizes, capacity.notes

    def _options(self, sizes: Sizes) -> ContextOptions:
        return {
            "isa": self.config.isa,
            "threads": self.threads,
            "kv_type": "f32" if self.config.precision == "f32" else self.config.kv,
            "max_rows": sizes["max_rows"],
            "max_sequences": sizes["max_sequences"],
            "max_context": sizes["max_context"],
            "n_kv_blocks": sizes["n_kv_blocks"],
        }

    def _too_little(self, need: str, *to_lower: str) -> EngineError:
        """need: what exceeds the memory; to_lower: settings that would help."""
        if self.config.expert_cache is not None:
            to_lower = ("expert_cache", *to_lower)
        advice = f"lower {', '.join(to_lower)}, or " if to_lower else ""
        return EngineError(
            "out_of_memory",
            f"{need}, {self.memory.available:,} are available ({self.memory.limited_by}); "
            f"{advice}leave layers on disk with weights_memory",
        )


def open_header(config: EngineConfig) -> Model:
    """The model as `config` runs it, without weights. EngineError if it cannot run so."""
    return Model(
        config.model,
        header_only=True,
        as_f32=config.precision == "f32",
        defer_experts=config.defer_experts,
    )


def room_for_experts(available: int, taken: int) -> int:
    """Bytes left for experts: `available`, less a reserve, less `taken`."""
    return available - available // RESERVE_PART - taken
