"""The forward pass, slow and obvious, in float64, with every feature of a layer record.

Equations: docs/architecture.md for the stock parts; delayed experts and dense sources follow
    x_mid = x_in + s attention(norm1(x_in))                  s = residual_scale
    dense reads norm2 of x_mid, x_in[l] or x_in[l-1]         experts read x_mid or x_in[l]
    x_in[l+1] = x_in + s attention + s dense + every expert output due after layer l
where the experts of layer l are due after layer min(l + delay, last), or, deferred, a layer later.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.model_file import MODEL_LEVEL, ModelFile

Array = NDArray[np.float64]
POST_ATTENTION, X_IN, X_IN_PREVIOUS = range(3)


class Forward:
    """Runs `tokens` as one sequence from position 0; `values` then holds every value by the plan's
    name, (n_tokens, width), and `logits` (n_tokens, vocab_size).

    given: values to feed each op instead of those computed here (the engine's own, to check one op
    at a time). int8: matmuls of quantised matrices round their input as the engine does.
    kv_dtype: what K and V are rounded to. defer: of every token's experts, how many with the least
    weight land a layer late.
    """

    def __init__(
        self,
        model: ModelFile,
        tokens: list[int],
        *,
        given: Mapping[str, Array] | None = None,
        int8: bool = False,
        kv_dtype: type = np.float32,
        defer: int = 0,
    ) -> None:
        self.model, self.given, self.int8, self.kv_dtype = model, given or {}, int8, kv_dtype
        self.defer = defer
        self.values: dict[str, Array] = {}
        table = model.weight(MODEL_LEVEL, "embedding")
        x = self.make("L0.x_in", table[tokens] * model.header["embedding_scale"])
        streams = [x]
        due: list[list[Array]] = [[] for _ in model.layers]
        for index, layer in enumerate(model.layers):
            streams.append(Layer(self, index, layer).run(streams, due))
        self.logits = self.head(streams[-1])

    def make(self, name: str, value: Array) -> Array:
        """Records what an op computed; returns the value for the next op to read."""
        self.values[name] = value
        return self.given.get(name, value)

    def head(self, x: Array) -> Array:
        header = self.model.header
        kind, offset, eps = (header[f"final_norm_{name}"] for name in ("kind", "offset", "eps"))
        normed = self.make("final_norm", self.norm(x, MODEL_LEVEL, "final_norm", kind, offset, eps))
        logits = self.matmul(normed, MODEL_LEVEL, "embedding" if header["tied"] else "head")
        return capped(logits * (header["logit_scale"] or 1), header["logit_cap"])

    def norm(self, x: Array, block: int, role: str, kind: int, offset: float, eps: float) -> Array:
        weight = self.model.weight(block, role) + offset
        if kind == 1:
            x = x - x.mean(-1, keepdims=True)
        y = rms_norm(x, weight, eps)
        return y + self.bias(block, role)

    def bias(self, block: int, role: str) -> Array | float:
        name = f"{role}_bias"
        return self.model.weight(block, name) if self.model.has(block, name) else 0.0

    def matmul(self, x: Array, block: int, role: str, expert: int = 0) -> Array:
        if self.int8 and self.model.encoding(block, role).startswith("q"):
            x = rounded_to_int8(x)
        return x @ self.model.weight(block, role, expert).T


class Layer:
    """One layer of a Forward."""

    def __init__(self, forward: Forward, index: int, layer: dict[str, Any]) -> None:
        self.forward, self.index, self.layer = forward, index, layer
        self.block = layer["block"]

    def make(self, name: str, value: Array) -> Array:
        return self.forward.make(f"L{self.index}.{name}", value)

    def matmul(self, x: Array, role: str, expert: int = 0) -> Array:
        y = self.forward.matmul(x, self.block, role, expert)
        return y + self.forward.bias(self.block, role)

    def norm(self, x: Array, role: str, name: str) -> Array:
        """x itself where the layer has no such norm."""
        if not self.forward.model.has(self.block, role):
            return self.make(name, x)
        kind, offset, eps = (self.layer[f"norm_{field}"] for field in ("kind", "offset", "eps"))
        return self.make(name, self.forward.norm(x, self.block, role, kind, offset, eps))

    def added(self, x: Array, role: str) -> Array:
        """The output x of a sublayer as the stream adds it."""
        if self.layer["norm_place"] > 0:
            x = self.norm(x, role, role)
        return np.asarray(self.layer["residual_scale"] * x)

    def run(self, streams: list[Array], due: list[list[Array]]) -> Array:
        """The stream after this layer. streams: x_in of the layers so far; due: expert outputs by
        the layer they join after."""
        layer, x_in = self.layer, streams[-1]
        attention = self.attention(x_in)
        x_mid = x_in + self.added(attention, "post_norm1")
        if POST_ATTENTION in (
            layer["dense_source"] if layer["d_ff"] else None,
            layer["expert_anchor"] if layer["n_experts"] else None,
        ):
            x_mid = self.make("x_mid", x_mid)
        previous = streams[max(self.index - 1, 0)]
        sources = {POST_ATTENTION: x_mid, X_IN: x_in, X_IN_PREVIOUS: previous}
        x_out = x_mid
        if layer["d_ff"]:
            dense = self.dense(sources[layer["dense_source"]])
            x_out = x_out + self.added(dense, "post_norm2")
        if layer["n_experts"]:
            last = len(due) - 1
            joins = min(self.index + layer["expert_delay"], last)
            anchor = sources[layer["expert_anchor"]]
            shares = layer["norms_shared"] and (
                not layer["d_ff"] or anchor is sources[layer["dense_source"]]
            )
            now, late = self.experts(anchor, "norm2" if shares else "norm3")
            due[joins].append(now)
            due[min(joins + 1, last)].append(late)
        for output in due[self.index]:
            x_out = x_out + output
        name = "x_out" if self.index + 1 == len(due) else f"L{self.index + 1}.x_in"
        return self.forward.make(name, x_out)

    # ---- attention ----

    def attention(self, x_in: Array) -> Array:
        normed = self.norm(x_in, "norm1", "norm1")
        q, k, v = (self.make(role, self.matmul(normed, role)) for role in "qkv")
        rotated = self.prepared(q, "q") * self.query_scales(len(q))[:, None, None]
        q = self.make("q_rot", rotated.reshape(len(q), -1))
        k, v = self.prepared(k, "k"), self.heads(v)
        if self.layer["v_norm"]:
            v = rms_norm(v, 1.0, self.layer["norm_eps"])
        k, v = (a.astype(self.forward.kv_dtype).astype(np.float64) for a in (k, v))
        heads = self.make("attention", self.attend(self.heads(q), k, v))
        return self.make("attention_out", self.matmul(heads, "o"))

    def heads(self, x: Array) -> Array:
        """(n, n_heads * head_dim) -> (n, n_heads, head_dim)"""
        return x.reshape(len(x), -1, self.layer["head_dim"])

    def prepared(self, x: Array, role: str) -> Array:
        """Queries or keys, normed and rotated, (n, n_heads, head_dim)."""
        if self.layer["qk_norm"] == 3:
            weight = self.forward.model.weight(self.block, f"{role}_norm")
            rotated = self.rotated(self.heads(x))
            return rms_norm(rotated, weight + self.layer["norm_offset"], self.layer["norm_eps"])
        return self.rotated(self.head_norm(x, role))

    def query_scales(self, n: int) -> Array:
        if not self.layer["query_growth"]:
            return np.ones(n)
        periods = (np.arange(n) + self.layer["query_start"]) // self.layer["query_period"]
        return np.asarray(1 + self.layer["query_growth"] * np.log(1 + periods))

    def head_norm(self, x: Array, role: str) -> Array:
        kind, eps = self.layer["qk_norm"], self.layer["norm_eps"]
        if kind == 0:
            return self.heads(x)
        weight = self.forward.model.weight(self.block, f"{role}_norm") + self.layer["norm_offset"]
        if kind == 1:
            return rms_norm(self.heads(x), weight, eps)
        return self.heads(rms_norm(x, weight, eps))

    def rotated(self, x: Array) -> Array:
        """x (n, heads, head_dim) with row i at position i."""
        layer, n_rotated = self.layer, self.layer["rope_dim"]
        if layer["rope_kind"] == 0:
            return x
        divisors: Array | float = 1.0
        if self.forward.model.has(self.block, "rope_divisors"):
            divisors = self.forward.model.weight(self.block, "rope_divisors")
        angle = np.arange(len(x))[:, None, None] * rope_frequencies(layer) / divisors
        gain = layer["rope_gain"] or 1
        cos, sin = gain * np.cos(angle), gain * np.sin(angle)
        half = n_rotated // 2
        if layer["rope_kind"] == 1:
            first, second = slice(0, half), slice(half, n_rotated)
        else:
            first, second = slice(0, n_rotated, 2), slice(1, n_rotated, 2)
        y = x.copy()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """q (n, n_heads, head_dim), k and v (n, n_kv_heads, head_dim) -> (n, n_heads * head_dim)"""
        n, n_heads, window = len(q), self.layer["n_heads"], self.layer["window"]
        query_at, key_at = np.arange(n)[:, None], np.arange(n)[None, :]
        seen = key_at <= query_at
        if window:
            seen &= key_at > query_at - window
        out = np.empty_like(q)
        for head in range(n_heads):
            kv_head = head * self.layer["n_kv_heads"] // n_heads
            scores = q[:, head] @ k[:, kv_head].T * self.layer["attention_scale"]
            scores = capped(scores, self.layer["score_cap"])
            out[:, head] = softmax(np.where(seen, scores, -np.inf)) @ v[:, kv_head]
        return out.reshape(n, -1)

    # ---- feed-forward ----

    def gated(self, gate: Array, up: Array) -> Array:
        act = ACTIVATIONS[self.layer["activation"]]
        return np.asarray(gate * act(up) if self.layer["activation_on_up"] else act(gate) * up)

    def hidden(self, x: Array) -> Array:
        if self.layer["ungated"]:
            return np.asarray(ACTIVATIONS[self.layer["activation"]](self.matmul(x, "up")))
        return self.gated(self.matmul(x, "gate"), self.matmul(x, "up"))

    def dense(self, source: Array) -> Array:
        x = self.norm(source, "norm2", "norm2")
        hidden = self.make("hidden", self.hidden(x))
        return self.make("dense_out", self.matmul(hidden, "down"))

    def experts(self, source: Array, norm: str) -> tuple[Array, Array]:
        """What router, experts and shared expert add, (n, d_model), and what those deferred add.
        norm: the name of their input."""
        x = self.norm(source, "norm2" if self.layer["norms_shared"] else "norm3", norm)
        ids, weights = self.routed(self.make("router", self.matmul(x, "router")))
        hidden, each = [], []
        for row, rank in np.ndindex(ids.shape):
            expert, one = int(ids[row, rank]), x[row : row + 1]
            gate, up = (self.matmul(one, f"expert_{side}", expert) for side in ("gate", "up"))
            hidden.append(self.gated(gate, up))
        shape = (*ids.shape, -1)
        ranks = self.make("expert_hidden", np.reshape(hidden, (len(x), -1))).reshape(shape)
        for row, rank in np.ndindex(ids.shape):
            one = ranks[row, rank : rank + 1]
            each.append(self.matmul(one, "expert_down", int(ids[row, rank])))
        ranks = self.make("expert_each", np.reshape(each, (len(x), -1))).reshape(shape)
        is_last = self.index + 1 == len(self.forward.model.layers)
        n_now = ids.shape[1] - (0 if is_last else self.forward.defer)
        weighted = weights[:, :, None] * ranks
        out = self.make("expert_out", weighted[:, :n_now].sum(axis=1))
        late = weighted[:, n_now:].sum(axis=1)
        return (out + self.shared_expert(x) if self.layer["d_shared"] else out), late

    def routed(self, router: Array) -> tuple[Array, Array]:
        """Expert ids and weights (n, top_k), best first; ties go to the smaller id."""
        layer = self.layer
        ids = np.argsort(-router, axis=1, kind="stable")[:, : layer["top_k"]]
        weights = np.take_along_axis(softmax(router), ids, axis=1)
        if layer["renormalise"]:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return (
            self.make("routed", ids.astype(np.float64)),
            self.make("routed_weights", weights * layer["expert_scale"]),
        )

    def shared_expert(self, x: Array) -> Array:
        hidden = self.gated(self.matmul(x, "shared_gate"), self.matmul(x, "shared_up"))
        out = self.make(
            "shared_out", self.matmul(self.make("shared_hidden", hidden), "shared_down")
        )
        if self.layer["shared_gate"]:
            scale = self.make("shared_scale", self.matmul(x, "shared_scale"))
            out = out / (1 + np.exp(-scale))
        return out


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def capped(x: Array, cap: float) -> Array:
    return np.asarray(cap * np.tanh(x / cap)) if cap else x


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def rounded_to_int8(x: Array) -> Array:
    """x rounded to the engine's int8 codes: scale amax / 127 for each 32 columns, in float32."""
    n, n_cols = x.shape
    padded = np.zeros((n, -(-n_cols // 32) * 32), np.float32)
    padded[:, :n_cols] = x
    blocks = padded.reshape(n, -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    codes = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.float64)
    scale = (amax / np.float32(127)).astype(np.float64)
    return np.asarray((codes * scale).reshape(n, -1)[:, :n_cols])


def rope_frequencies(layer: dict[str, Any]) -> Array:
    """Radians by which one position rotates each pair, (rope_dim / 2,)."""
    pairs = np.arange(0, layer["rope_dim"], 2)
    frequency = layer["rope_base"] ** (-pairs / layer["rope_dim"])
    factor = layer["rope_factor"]
    if layer["rope_scaling"] == 1:
        return np.asarray(frequency / factor)
    if layer["rope_scaling"] == 2:
        # Llama 3.1: long waves are slowed by factor, short ones kept, with a ramp in between
        turns = layer["rope_original_context"] * frequency / (2 * math.pi)
        low, high = layer["rope_low_freq"], layer["rope_high_freq"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return np.asarray(frequency * (kept + (1 - kept) / factor))
    return np.asarray(frequency)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def gelu_erf(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


ACTIVATIONS: tuple[Callable[[Array], Array], ...] = (silu, gelu_tanh, gelu_erf)
