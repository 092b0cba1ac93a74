"""Writes model files of random weights for any layer records, even those that no converter makes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cflow.engine.files.formats import cflow, quantise, tiles
from cflow.engine.files.formats.cflow import Run, Weight
from cflow.engine.files.formats.order import ordered
from cflow.engine.files.target import order_of

VOCAB_SIZE = 160
LAYER: dict[str, Any] = {
    "block": 0,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "attention_scale": 0.25,
    "rope_kind": 1,
    "rope_dim": 16,
    "rope_base": 10000.0,
    "rope_factor": 1.0,
    "rope_low_freq": 1.0,
    "rope_high_freq": 4.0,
    "rope_original_context": 512,
    "d_ff": 96,
    "expert_scale": 1.0,
    "norm_eps": 1e-5,
    "norms_shared": 1,
    "residual_scale": 1.0,
}
EXTRAS = ("divisors", "ffn_biases")  # of a layer here: tensors that its record does not name
EXPERTS: dict[str, Any] = {"n_experts": 6, "top_k": 2, "d_expert": 48}

Floats = NDArray[np.float32]


class RandomModel:
    """Random weights for a header and layers. Each layer has a block of its own unless they share one."""

    def __init__(self, layers: Sequence[dict[str, Any]], *, seed: int = 0, **header: Any) -> None:
        self.layers = [{**LAYER, "block": i, **layer} for i, layer in enumerate(layers)]
        self.header: dict[str, Any] = {
            "n_blocks": len({layer["block"] for layer in self.layers}),
            "d_model": 64,
            "vocab_size": VOCAB_SIZE,
            "n_tokens": VOCAB_SIZE,
            "context": 512,
            "tied": 0,
            "embedding_scale": 1.0,
            "final_norm_eps": 1e-5,
            "final_norm_offset": 0.0,
            **header,
        }
        self.generator = np.random.default_rng(seed)
        self.encoding = "f32"

    def write(self, path: Path, encoding: str = "f32") -> Path:
        """Writes path, in the order given by its suffix."""
        self.encoding = encoding
        blocks = {layer["block"]: layer for layer in self.layers}
        d, vocab = self.header["d_model"], self.header["vocab_size"]
        resident: list[Run] = [(self.matrix("embedding", cflow.MODEL_LEVEL, vocab, d, 1.0),)]
        for layer in blocks.values():
            resident += self.attention(layer) + self.norms(layer) + self.feed_forward(layer)
        resident.append((self.vector("final_norm", cflow.MODEL_LEVEL, d, 1.0),))
        if self.header.get("final_norm_kind"):
            resident.append((self.vector("final_norm_bias", cflow.MODEL_LEVEL, d, 0.0),))
        if not self.header["tied"]:
            resident.append((self.matrix("head", cflow.MODEL_LEVEL, vocab, d),))
        contents = cflow.Contents(
            header=self.header,
            layers=[{k: v for k, v in layer.items() if k not in EXTRAS} for layer in self.layers],
            metadata={"name": "random", "eos_ids": []},
            tokenizer=b"",
            token_bytes=token_bytes(self.header["n_tokens"]),
            resident=resident,
            experts={b: self.experts(layer) for b, layer in blocks.items() if "n_experts" in layer},
        )
        cflow.write(ordered(contents, order_of(path, None)), path)
        return path

    def attention(self, layer: dict[str, Any]) -> list[Run]:
        block, d, head = layer["block"], self.header["d_model"], layer["head_dim"]
        widths = {"q": layer["n_heads"] * head, "k": layer["n_kv_heads"] * head}
        widths["v"] = widths["k"]
        before = layer.get("norm_place", 0) != 1
        runs: list[Run] = [(self.vector("norm1", block, d, 1.0),)] if before else []
        for role, width in widths.items():
            runs.append((self.matrix(role, block, width, d),))
            norm = {0: 0, 1: head, 2: width, 3: head}[layer.get("qk_norm", 0)]
            if norm and role != "v":
                runs.append((self.vector(f"{role}_norm", block, norm, 1.0),))
        if layer.get("divisors"):
            divisors = self.vector("rope_divisors", block, layer["rope_dim"] // 2, 2.0)
            runs.append((divisors,))
        return [*runs, (self.matrix("o", block, d, widths["q"]),)]

    def norms(self, layer: dict[str, Any]) -> list[Run]:
        block, d, place = layer["block"], self.header["d_model"], layer.get("norm_place", 0)
        roles = ["norm2"] if place != 1 and (layer["d_ff"] or layer["norms_shared"]) else []
        roles += ["norm3"] if "n_experts" in layer and not layer["norms_shared"] else []
        roles += ["post_norm1", "post_norm2"] if place else []
        runs: list[Run] = [(self.vector(role, block, d, 1.0),) for role in roles]
        if layer.get("norm_kind"):
            biases = ["norm1", "norm2"] if "norm2" in roles else ["norm1"]
            runs += [(self.vector(f"{role}_bias", block, d, 0.0),) for role in biases]
        return runs

    def feed_forward(self, layer: dict[str, Any]) -> list[Run]:
        block, d = layer["block"], self.header["d_model"]
        runs = self.dense(layer) if layer["d_ff"] else []
        if "n_experts" in layer:
            runs.append((self.matrix("router", block, layer["n_experts"], d, encoding="f32"),))
        if layer.get("d_shared"):
            runs += self.gated("shared_", block, layer["d_shared"])
        if layer.get("shared_gate"):
            runs.append((self.matrix("shared_scale", block, 1, d, encoding="f32"),))
        return runs

    def dense(self, layer: dict[str, Any]) -> list[Run]:
        block, d, d_ff = layer["block"], self.header["d_model"], layer["d_ff"]
        runs = self.gated("", block, d_ff)
        if layer.get("ungated"):
            runs[0] = runs[0][1:]
        if layer.get("ffn_biases"):
            widths = {"gate": d_ff, "up": d_ff, "down": d}
            if layer.get("ungated"):
                del widths["gate"]
            runs += [(self.vector(f"{role}_bias", block, n, 0.0),) for role, n in widths.items()]
        return runs

    def experts(self, layer: dict[str, Any]) -> list[list[Run]]:
        count = range(layer["n_experts"])
        return [self.gated("expert_", layer["block"], layer["d_expert"]) for _ in count]

    def gated(self, prefix: str, block: int, width: int) -> list[Run]:
        d = self.header["d_model"]
        gate, up = (self.matrix(prefix + side, block, width, d) for side in ("gate", "up"))
        return [(gate, up), (self.matrix(prefix + "down", block, d, width),)]

    def matrix(
        self,
        role: str,
        block: int,
        n_rows: int,
        n_cols: int,
        scale: float = 0.0,
        encoding: str = "",
    ) -> Weight:
        scale = scale or 1.5 / n_cols**0.5
        encoding = encoding or self.encoding
        planes = random_planes(self.generator, encoding, n_rows, n_cols, scale)
        packed = tiles.pack(planes, tiles.stripe_rows(n_rows))
        stripes = lambda first, n: packed[first : first + n]  # noqa: E731
        return Weight(role, block, encoding, n_rows, n_cols, stripes)

    def vector(self, role: str, block: int, n: int, around: float) -> Weight:
        noise = around + 0.3 * self.generator.standard_normal(n, np.float32)
        packed = noise.astype("<f4").view(np.uint8)[None]
        return Weight(role, block, "f32", 1, n, lambda first, count: packed, is_vector=True)


def token_bytes(n: int) -> bytes:
    """The token-bytes section of n one-byte tokens."""
    ends = np.arange(1, n + 1, dtype="<u4").tobytes()
    return n.to_bytes(4, "little") + ends + bytes(n) + bytes(i % 256 for i in range(n))


def random_planes(
    generator: np.random.Generator, encoding: str, n_rows: int, n_cols: int, scale: float
) -> tiles.Planes:
    """Weights of standard deviation about `scale`. Quantised ones use all codes and scales, even those
    that no quantiser makes."""
    form = tiles.FORMS[encoding]
    if form.bits > 8:
        noise = scale * generator.standard_normal((n_rows, n_cols), np.float32)
        return quantise.encode(tiles.Planes("f32", noise, {}), encoding)
    n_codes = 1 << form.bits
    step = scale / (n_codes * 0.29)  # 0.29: deviation of a uniform variable

    def drawn(unit: float, cols: int) -> NDArray[np.float16]:
        spread = 1 + 0.3 * generator.standard_normal((n_rows, -(-n_cols // cols)))
        return (unit * spread).astype(np.float16)

    def octets(low: int, high: int, kind: type) -> NDArray[np.integer]:
        return generator.integers(low, high, (n_rows, -(-n_cols // 32))).astype(kind)

    fields: dict[str, tiles.Array] = {
        "d": drawn(step, 256 if form.tile_fields else 32),
        "m": drawn(-step * n_codes / 2 if form.zero == 0 else step, 32),
    }
    if encoding == "q4_k":
        half = n_codes / 2
        fields |= {"d": drawn(step / 128, 256), "dmin": drawn(step * half / 128, 256)}
        fields |= {"s": octets(0, 256, np.uint8), "t": octets(0, 256, np.uint8)}
    if encoding == "q6_k":
        fields |= {"d": drawn(step / 74, 256)}
        fields |= {name: octets(-128, 128, np.int8) for name in ("s0", "s1")}
    codes = generator.integers(0, n_codes, (n_rows, n_cols)).astype(np.uint8)
    names = (*form.block_fields, *form.tile_fields)
    return tiles.Planes(encoding, codes, {name: fields[name] for name in names})
