"""A model independent of its source: the fields of cflow.h, and the tensors they imply."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from cflow.engine import native
from cflow.engine.base.errors import ModelError

MAX_LAYERS = 1024


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. kind: none, half, interleaved; scaling: plain, linear, llama3.

    divisors (dim / 2,): divide the frequencies; long_divisors: instead of them in contexts above
    original_context. gain: multiplies cosines and sines."""

    kind: str
    dim: int
    base: float
    scaling: str = "plain"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 1.0
    original_context: int = 0
    gain: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerSpec:
    """One layer, with the names of cflow_layer; enumerations are lower-case strings.

    attention_scale: None for 1 / sqrt(head_dim)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    window: int = 0
    qk_norm: str = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    d_ff: int = 0
    activation: str = "silu"
    activation_on_up: bool = False
    n_experts: int = 0
    top_k: int = 0
    renormalise: bool = False
    expert_scale: float = 1.0
    d_expert: int = 0
    d_shared: int = 0
    shared_gate: bool = False
    v_norm: bool = False
    norms_shared: bool = True
    dense_source: str = "post_attention"
    expert_anchor: str = "post_attention"
    expert_delay: int = 0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    norm_offset: float = 0.0
    norm_kind: str = "rms"
    norm_place: str = "before"
    norm_bias: bool = False
    ffn_bias: bool = False
    ungated: bool = False
    score_cap: float = 0.0
    query_growth: float = 0.0
    query_period: int = 0
    query_start: int = 0

    def fields(self, block: int) -> dict[str, Any]:
        """The fields of cflow_layer."""
        const = native.const
        fields = asdict(self)
        rope = fields.pop("rope")
        for name in ("qkv_bias", "o_bias", "norm_bias", "ffn_bias"):
            del fields[name]
        del rope["divisors"], rope["long_divisors"]
        fields |= {f"rope_{name}": value for name, value in rope.items()}
        fields |= {
            "block": block,
            "attention_scale": self.attention_scale or 1 / math.sqrt(self.head_dim),
            "norm_kind": const.NormKind[self.norm_kind.upper()],
            "norm_place": const.NormPlace[self.norm_place.upper()],
            "qk_norm": const.QkNorm[self.qk_norm.upper()],
            "rope_kind": const.RopeKind[self.rope.kind.upper()],
            "rope_scaling": const.RopeScaling[self.rope.scaling.upper()],
            "activation": const.Activation[self.activation.upper()],
            "dense_source": const.Source[self.dense_source.upper()],
            "expert_anchor": const.Source[self.expert_anchor.upper()],
        }
        return fields

    def shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Shape by role of tensors in the resident bank, in file order; (n,) is a vector."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes = self._norm_shapes("norm1", d_model)
        shapes |= {"q": (q, d_model), "k": (kv, d_model), "v": (kv, d_model)}
        if self.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.qk_norm in ("head", "rotated"):
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.qk_norm == "full":
            shapes |= {"q_norm": (q,), "k_norm": (kv,)}
        shapes["o"] = (d_model, q)
        if self.o_bias:
            shapes["o_bias"] = (d_model,)
        if self.norm_place != "before":
            shapes["post_norm1"] = (d_model,)
        shapes |= self._norm_shapes("norm2", d_model)
        if self.n_experts and not self.norms_shared:
            shapes["norm3"] = (d_model,)
        if self.n_experts:
            shapes["router"] = (self.n_experts, d_model)
        shapes |= self._dense_shapes(d_model)
        shapes |= _ffn_shapes("shared_", self.d_shared, d_model)
        if self.shared_gate:
            shapes["shared_scale"] = (1, d_model)
        return shapes

    def _norm_shapes(self, role: str, d_model: int) -> dict[str, tuple[int, ...]]:
        """Of a norm before a sublayer."""
        if self.norm_place == "after":
            return {}
        roles = (role, f"{role}_bias") if self.norm_bias else (role,)
        return dict.fromkeys(roles, (d_model,))

    def _dense_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        if not self.d_ff:
            return {}
        shapes = _ffn_shapes("", self.d_ff, d_model)
        if self.ungated:
            del shapes["gate"]
        if self.ffn_bias:
            shapes |= {f"{role}_bias": (shape[0],) for role, shape in shapes.items()}
        if self.norm_place != "before":
            shapes["post_norm2"] = (d_model,)
        return shapes

    def constants(self) -> dict[str, tuple[float, ...]]:
        """Vectors by role that the spec itself holds."""
        if self.rope.kind == "none":
            return {}
        all_of_them = {
            "rope_divisors": self.rope.divisors,
            "rope_divisors_long": self.rope.long_divisors,
        }
        return {role: values for role, values in all_of_them.items() if values}

    def expert_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Shape by role of the matrices of one expert."""
        return _ffn_shapes("expert_", self.d_expert, d_model)


@dataclass(frozen=True)
class ModelSpec:
    """A model without its vocabulary; weights are found by role.

    layers: those with their own weights. passes: how often they run, one pass after the other.
    """

    architecture: str
    name: str
    d_model: int
    vocab_size: int
    context: int
    tied: bool
    norm_eps: float
    layers: list[LayerSpec] = field(default_factory=list)
    passes: int = 1
    norm_offset: float = 0.0
    norm_kind: str = "rms"
    norm_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    def header(self, n_tokens: int) -> dict[str, Any]:
        """Fields of cflow_header that the model determines."""
        return {
            "order": native.const.Order.LAYER,
            "n_blocks": len(self.layers),
            "d_model": self.d_model,
            "vocab_size": self.vocab_size,
            "n_tokens": n_tokens,
            "context": self.context,
            "tied": int(self.tied),
            "embedding_scale": self.embedding_scale,
            "final_norm_eps": self.norm_eps,
            "final_norm_offset": self.norm_offset,
            "final_norm_kind": native.const.NormKind[self.norm_kind.upper()],
            "logit_scale": self.logit_scale,
            "logit_cap": self.logit_cap,
        }

    def layer_records(self) -> list[dict[str, Any]]:
        """Fields of every cflow_layer, in the order of execution."""
        return [
            layer.fields(block)
            for _ in range(self.passes)
            for block, layer in enumerate(self.layers)
        ]

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        table = (self.vocab_size, self.d_model)
        heads = {} if self.tied else {"head": table}
        norms = ("final_norm", "final_norm_bias") if self.norm_bias else ("final_norm",)
        return {"embedding": table, **dict.fromkeys(norms, (self.d_model,)), **heads}

    def n_parameters(self) -> int:
        total = sum(math.prod(shape) for shape in self.global_shapes().values())
        for layer in self.layers:
            total += sum(math.prod(shape) for shape in layer.shapes(self.d_model).values())
            one = sum(math.prod(shape) for shape in layer.expert_shapes(self.d_model).values())
            total += layer.n_experts * one
        return total

    def check(self) -> None:
        """Raise ModelError for numbers that contradict each other. The C reader checks again."""
        n_layers = len(self.layers) * self.passes
        if not 1 <= n_layers <= MAX_LAYERS:
            raise ModelError(f"{n_layers} layers; 1 to {MAX_LAYERS} are supported")
        for layer in self.layers:
            if layer.n_heads % layer.n_kv_heads:
                raise ModelError(
                    f"{layer.n_heads} heads cannot share {layer.n_kv_heads} KV heads evenly"
                )
            if layer.rope.dim % 2 or layer.rope.dim > layer.head_dim:
                raise ModelError(
                    f"{layer.rope.dim} rotary dimensions of a head of {layer.head_dim}: "
                    "an even number, at most the whole head, is needed"
                )
            for divisors in (layer.rope.divisors, layer.rope.long_divisors):
                if divisors and len(divisors) != layer.rope.dim // 2:
                    raise ModelError(
                        f"{len(divisors)} frequency factors for {layer.rope.dim} rotary dimensions; "
                        f"{layer.rope.dim // 2} are needed"
                    )
                if not all(0 < divisor < math.inf for divisor in divisors):
                    raise ModelError("a frequency factor is not above 0 and finite")
            if layer.top_k > layer.n_experts:
                raise ModelError(f"{layer.top_k} experts a token, but only {layer.n_experts} exist")


def _ffn_shapes(prefix: str, width: int, d_model: int) -> dict[str, tuple[int, ...]]:
    if not width:
        return {}
    return {
        f"{prefix}gate": (width, d_model),
        f"{prefix}up": (width, d_model),
        f"{prefix}down": (d_model, width),
    }
