"""What a model will need and how fast it can go, from its header alone."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cflow.engine import machine, native
from cflow.engine.native import Model
from cflow.engine.native_types import OpInfo
from cflow.engine.synth import shape_names, synth_header

PROBE_BYTES = 1 << 30
PROBE_PASSES = 3


@dataclass(frozen=True)
class Stage:
    """Ops that run together between two barriers."""

    index: int
    bytes: int  # weights read
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. Critical paths count the layers only, without router and head."""

    model: str
    n_stages: int
    n_barriers: int
    bytes_per_token: int
    layer_bytes: int
    critical_path_bytes: int
    critical_path_closed_form_bytes: float
    resident_bytes: int
    kv_bytes_per_token: int
    context: int
    available_bytes: int  # memory this machine can give
    probe_gb_s: float
    threads: int
    stages: tuple[Stage, ...]

    @property
    def predicted_decode_tok_s(self) -> float:
        """One stream: memory bandwidth over the bytes of a token."""
        return self.probe_gb_s * 1e9 / self.bytes_per_token

    @property
    def context_in_memory(self) -> int:
        """Positions, over all sequences, whose KV fits beside the weights."""
        return max(self.available_bytes - self.resident_bytes, 0) // self.kv_bytes_per_token

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["stage_list"] = fields.pop("stages")
        return {
            "stages": self.n_stages,
            "barriers": self.n_barriers,
            "predicted_decode_tok_s": self.predicted_decode_tok_s,
            "context_in_memory": self.context_in_memory,
        } | fields


def is_shape(reference: str) -> bool:
    return reference in shape_names() or reference.endswith(".toml")


def run(path: Path) -> Plan:
    """The plan of a model file, next to this machine. Measures memory bandwidth: some seconds."""
    model = Model(str(path), header_only=True)
    info, threads = model.plan, machine.cores().threads
    n_bytes = max(PROBE_BYTES, 4 * machine.cpu().l3_bytes)
    return Plan(
        model=str(model.metadata.get("name") or path.stem),
        n_stages=info.n_stages,
        n_barriers=info.n_barriers,
        bytes_per_token=info.bytes_per_token,
        layer_bytes=info.layer_bytes,
        critical_path_bytes=info.critical_path_bytes,
        critical_path_closed_form_bytes=info.critical_path_closed_form_bytes,
        resident_bytes=model.header.file_bytes,  # all but some small sections stays in memory
        kv_bytes_per_token=info.kv_bytes_per_token,
        context=model.header.context,
        available_bytes=machine.memory().available,
        probe_gb_s=native.probe_bandwidth(n_bytes, threads, PROBE_PASSES) / 1e9,
        threads=threads,
        stages=_stages(model.ops),
    )


def run_shape(shape: str) -> Plan:
    """The plan of a shape of configs/shapes, in q4_0; no weights are made."""
    with tempfile.TemporaryDirectory(prefix="cflow-plan-") as folder:
        path = Path(folder) / f"{Path(shape).stem}.cflow"
        synth_header(shape, path)
        return run(path)


def _stages(ops: list[OpInfo]) -> tuple[Stage, ...]:
    by_stage: dict[int, list[OpInfo]] = {}
    for op in ops:
        by_stage.setdefault(op.stage, []).append(op)
    return tuple(
        Stage(index, sum(op.bytes for op in group), tuple(op.name for op in group))
        for index, group in sorted(by_stage.items())
    )
