"""An independent reader of .cflow files by struct offsets. Shares no code with the engine."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.tiles import ENCODINGS, unpack

MODEL_LEVEL = 0xFFFFFFFF


def words(text: str) -> list[str]:
    return text.split()


ROLES = words(
    "embedding head final_norm norm1 norm2 norm3 q k v o q_bias k_bias v_bias o_bias q_norm k_norm "
    "gate up down router shared_gate shared_up shared_down shared_scale "
    "expert_gate expert_up expert_down post_norm1 post_norm2 norm1_bias norm2_bias final_norm_bias "
    "gate_bias up_bias down_bias rope_divisors rope_divisors_long"
)
HEADER_FIELDS = words(
    "version order file_bytes n_layers n_blocks d_model vocab_size n_tokens context n_tensors "
    "n_records tied embedding_scale final_norm_eps final_norm_offset"
)
HEADER_TAIL_FIELDS = words("final_norm_kind logit_scale logit_cap")
LAYER_FIELDS = words(
    "block n_heads n_kv_heads head_dim window qk_norm v_norm attention_scale rope_kind rope_dim "
    "rope_base rope_scaling rope_factor rope_low_freq rope_high_freq rope_original_context d_ff "
    "activation activation_on_up n_experts top_k renormalise expert_scale d_expert d_shared "
    "shared_gate norm_eps norm_offset norms_shared dense_source expert_anchor expert_delay "
    "residual_scale norm_kind norm_place ungated score_cap rope_gain query_growth query_period "
    "query_start"
)
LAYER = struct.Struct("<7If2IfI3f7If3I2f4If3I3f2I28x")
TENSOR_FIELDS = words("role block encoding n_rows n_cols stripe_rows offset stripe_stride")
RECORD_FIELDS = words("block expert offset bytes crc")

Array = NDArray[np.float64]
Fields = dict[str, Any]


class ModelFile:
    """Header, layers and weights (f64, dequantised on demand) of one file."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, np.uint8, "r")
        head = self._data[:4096].tobytes()
        assert head[:8] == b"cflow\r\n\x1a"
        self.header = dict(zip(HEADER_FIELDS, struct.unpack_from("<2IQ9I3f", head, 8), strict=True))
        tail = struct.unpack_from("<I2f", head, 72 + 24 * 10)
        self.header |= dict(zip(HEADER_TAIL_FIELDS, tail, strict=True))
        self.sections = [struct.unpack_from("<2Q", head, 72 + 24 * i) for i in range(10)]
        self.layers = self._records(0, LAYER, LAYER_FIELDS)
        self._tensors = {
            (t["block"], ROLES[t["role"]]): t
            for t in self._records(1, struct.Struct("<6I2Q8x"), TENSOR_FIELDS)
        }
        self._experts = {
            (r["block"], r["expert"]): r
            for r in self._records(2, struct.Struct("<2I2QI4x"), RECORD_FIELDS)
        }
        self.metadata = json.loads(self._section(3))
        self.tokenizer = self._section(4).decode()

    def _section(self, index: int) -> bytes:
        offset, n_bytes = self.sections[index]
        return self._data[offset : offset + n_bytes].tobytes()

    def _records(self, index: int, layout: struct.Struct, names: list[str]) -> list[Fields]:
        records = layout.iter_unpack(self._section(index))
        return [dict(zip(names, values, strict=True)) for values in records]

    def record_offset(self, block: int, expert: int) -> int:
        """Offset of an expert's record from the start of the file."""
        return int(self.sections[8][0] + self._experts[block, expert]["offset"])

    def has(self, block: int, role: str) -> bool:
        return (block, role) in self._tensors

    def encoding(self, block: int, role: str) -> str:
        return ENCODINGS[self._tensors[block, role]["encoding"]]

    @cache  # noqa: B019 - lives as long as the file it reads
    def weight(self, block: int, role: str, expert: int = 0) -> Array:
        """A matrix (n_rows, n_cols) or vector (n_cols,)."""
        t = self._tensors[block, role]
        start = self.sections[7][0]
        if role.startswith("expert_"):
            start = self.sections[8][0] + self._experts[block, expert]["offset"]
        start += t["offset"]
        if t["stripe_rows"] == 0:
            vector = self._data[start : start + 4 * t["n_cols"]].view("<f4")
            return vector.astype(np.float64)
        return unpack(
            self._data[start:],
            ENCODINGS[t["encoding"]],
            (t["n_rows"], t["n_cols"]),
            t["stripe_rows"],
            t["stripe_stride"],
        )
