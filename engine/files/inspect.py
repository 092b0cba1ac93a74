"""Contents of a model file: header, layers, tensors, vocabulary. Reads no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from cflow.engine.base.errors import ModelError
from cflow.engine.base.native_types import Header, Layer, Tensor
from cflow.engine.native import Model, const


@dataclass(frozen=True)
class Inspection:
    """layers: (first, last, layer) of runs of layers that are equal except for their weight block."""

    path: str
    header: Header
    metadata: dict[str, Any]
    layers: tuple[tuple[int, int, Layer], ...]
    tensors: tuple[Tensor, ...]

    @property
    def order(self) -> str:
        """Order of the weights in the file: "layer" or "stage"."""
        return name_of(const.Order, self.header.order)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "header": asdict(self.header) | {"order": self.order},
            "metadata": self.metadata,
            "layers": [
                {"first": first, "last": last} | asdict(layer) for first, last, layer in self.layers
            ],
            "tensors": [describe(tensor) for tensor in self.tensors],
        }


def name_of(kind: type[IntEnum], value: int) -> str:
    """An enum value as files and flags spell it: "q4_0", "layer"."""
    return kind(value).name.lower()


def describe(tensor: Tensor) -> dict[str, Any]:
    is_model_level = tensor.block == const.CFLOW_MODEL_LEVEL
    return asdict(tensor) | {
        "role": name_of(const.Role, tensor.role),
        "encoding": name_of(const.Encoding, tensor.encoding),
        "block": None if is_model_level else tensor.block,
    }


def run(path: Path) -> Inspection:
    """Open and check the file. Raises ModelError that names the part at fault."""
    model = Model(str(path), header_only=True)
    check_whole(model)
    return Inspection(
        path=str(path),
        header=model.header,
        metadata=model.metadata,
        layers=_runs(model.layers),
        tensors=tuple(model.tensors),
    )


def check_whole(model: Model) -> None:
    """Raise ModelError unless the file is as long as its header says. Reading the header does not
    check that; loading does, with the same words."""
    n_bytes, needed = Path(model.path).stat().st_size, model.header.file_bytes
    if n_bytes != needed:
        fault = "file is truncated:" if n_bytes < needed else "file has"
        raise ModelError(f"{model.path}: the {fault} {n_bytes} bytes, its header says {needed}")


def _runs(layers: list[Layer]) -> tuple[tuple[int, int, Layer], ...]:
    runs: list[tuple[int, int, Layer]] = []
    for index, layer in enumerate(layers):
        if runs and asdict(layer) | {"block": 0} == asdict(runs[-1][2]) | {"block": 0}:
            runs[-1] = (runs[-1][0], index, runs[-1][2])
        else:
            runs.append((index, index, layer))
    return tuple(runs)
