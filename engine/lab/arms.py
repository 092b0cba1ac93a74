"""Sizes, arms and training settings of the pipeline-native family, declared without PyTorch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Source = Literal["post_attention", "x_in", "x_in_previous"]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a model, the same for all arms. n_layers counts each use of layers that share weights."""

    vocab_size: Count
    d_model: Count
    n_layers: Count
    n_heads: Count
    d_ff: Count
    n_experts: Count
    top_k: Count
    d_expert: Count
    context: Count
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    v_norm: bool = False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each part of a layer reads.

    passes: how often the blocks run; n_layers / passes blocks have weights of their own. streams:
    "one" for all arms but arch1 (decoupled) and arch3 (registers).
    """

    dense_source: Source = "post_attention"
    expert_anchor: Literal["post_attention", "x_in"] = "post_attention"
    expert_delay: Annotated[int, msgspec.Meta(ge=0)] = 0
    residual_scale: float = 1.0
    passes: Count = 1
    streams: Literal["one", "decoupled", "registers"] = "one"


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to train. A step of the optimiser (AdamW) takes batch x context tokens."""

    epochs: Count
    batch: Count
    peak_rate: float
    final_rate: float
    warm_up: Annotated[int, msgspec.Meta(ge=0)]  # steps
    betas: tuple[Share, Share]
    weight_decay: Annotated[float, msgspec.Meta(ge=0)]
    clip: Positive
    dropout: Share
    balance: float  # weight of the load-balancing loss
    validate_every: Count  # steps

    def rate(self, step: int, n_steps: int) -> float:
        """Learning rate: linear up to peak_rate over warm_up steps, then a cosine down to final_rate."""
        if step < self.warm_up:
            return self.peak_rate * (step + 1) / self.warm_up
        part = (step - self.warm_up) / max(n_steps - self.warm_up, 1)
        return (
            self.final_rate
            + (self.peak_rate - self.final_rate) * (1 + math.cos(math.pi * part)) / 2
        )


ARMS = {
    "sequential": Arm(),
    "parallel": Arm("x_in", "x_in"),
    "arch1": Arm(streams="decoupled"),
    "arch2_4_combined": Arm("x_in_previous", "x_in", 2),
    "arch2_4_sync": Arm("x_in_previous", "x_in", 0),
    "arch3": Arm(streams="registers"),
    "arch4_async_experts": Arm("post_attention", "x_in", 2),
    "arch5": Arm(passes=3),
}
