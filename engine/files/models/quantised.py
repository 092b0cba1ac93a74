"""Folders whose matrices are quantised: quantization_config of config.json.

A scheme is known by its name in the config. A matrix is quantised where the file stores it so, which
honours every list of excluded modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.matrix import Matrix
from cflow.engine.files.formats.quantise import values
from cflow.engine.files.formats.safetensors import SafetensorsFolder
from cflow.engine.files.formats.tiles import Planes

Shape = tuple[int, ...]
FLOAT8 = "F8_E4M3"
SCALES = (".weight_scale_inv", ".weight_scale")  # of fp8, of compressed-tensors
ACTIVATIONS = ".input_scale"  # activations are not quantised here, so nothing reads it
SUPPORTED = "fp8, and compressed-tensors with the format float-quantized"


@dataclass(frozen=True)
class Stored:
    """The tensors of a folder as a model sees them. matrix: by name, dequantised as rows are read."""

    shapes: dict[str, Shape]
    matrix: Callable[[str], Matrix]


def stored(folder: SafetensorsFolder) -> Stored:
    """Raises ModelError for a scheme that is not supported, and for scales that do not fit."""
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    block = _float8_block(folder)
    if block is None:
        return Stored(shapes, folder.matrix)
    scaled = {
        name: _scaled(folder, name, block)
        for name, tensor in folder.tensors.items()
        if tensor.dtype == FLOAT8
    }
    read = {
        name.removesuffix(".weight") + suffix
        for name in scaled
        for suffix in (*SCALES, ACTIVATIONS)
    }
    kept = {name: shape for name, shape in shapes.items() if name not in read}
    return Stored(kept, lambda name: scaled[name] if name in scaled else folder.matrix(name))


def notes(folder: SafetensorsFolder) -> tuple[str, ...]:
    """Whether bf16 holds the products exactly. A code has 4 significant bits, so it does for powers of
    two."""
    if _float8_block(folder) is None:
        return ()
    scales = [
        np.frexp(folder.matrix(name).floats()) for name in folder.tensors if name.endswith(SCALES)
    ]
    if all(np.all((np.abs(m) == 0.5) & (np.abs(e) < 100)) for m, e in scales):
        return ("its 8-bit floats are kept exactly, as bf16",)
    return (
        "its 8-bit floats have scales that are not powers of two: their products are rounded to "
        "bf16 (at most 2^-9 of each); --quant f32 keeps them",
    )


def _float8_block(folder: SafetensorsFolder) -> Shape | None:
    """Rows and columns that share a scale where scales are by block; (0, 0): none are; None: the folder
    is not quantised."""
    origin = f"{folder.path / 'config.json'}: quantization_config"
    config = folder.config.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{origin} is not an object")
    method, form = config.get("quant_method"), config.get("format")
    if method == "fp8":
        return _block(config.get("weight_block_size"), origin)
    if method == "compressed-tensors" and form == "float-quantized":
        groups = config.get("config_groups")
        weights = [
            group["weights"]
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict) and isinstance(group.get("weights"), dict)
        ]
        blocks = {_block(w.get("block_structure"), origin) for w in weights} - {(0, 0)}
        if len(blocks) > 1:
            raise ModelError(f"{origin} has blocks of several shapes, which is not supported")
        return blocks.pop() if blocks else (0, 0)
    name = f"{method!r:.60}" + (f" with the format {form!r:.60}" if form else "")
    raise ModelError(f"{origin} is of the method {name}; supported: {SUPPORTED}")


def _block(value: Any, origin: str) -> Shape:
    if value is None:
        return (0, 0)
    counts = value if isinstance(value, list) else []
    if len(counts) != 2 or any(type(n) is not int or not 0 < n < 1 << 31 for n in counts):
        raise ModelError(f"{origin} has the block size {value!r:.60}; two counts are required")
    return counts[0], counts[1]


def _scaled(folder: SafetensorsFolder, name: str, block: Shape) -> Matrix:
    """A matrix of 8-bit floats times its scales: one, one a row, or one a block."""
    shape, codes = folder.tensors[name].shape, folder.matrix(name)
    names = [name.removesuffix(".weight") + suffix for suffix in SCALES]
    found = [scale for scale in names if name.endswith(".weight") and scale in folder.tensors]
    if len(found) != 1 or len(shape) != 2:
        raise ModelError(
            f"{folder.path}: tensor {name} is {FLOAT8} {list(shape)}; a matrix with one of "
            f"{', '.join(names)} is required"
        )
    scale, scale_shape = folder.matrix(found[0]), folder.tensors[found[0]].shape
    n_rows, n_cols = shape
    if scale_shape in ((1,), (1, 1)):
        rows, cols = n_rows, n_cols
    elif scale_shape == (n_rows, 1):
        rows, cols = 1, n_cols
    else:
        rows, cols = block
        if not rows or scale_shape != (-(-n_rows // rows), -(-n_cols // cols)):
            raise ModelError(
                f"{folder.path}: tensor {found[0]} has the shape {list(scale_shape)}, which does not "
                f"fit {list(shape)} in blocks of {list(block)}"
            )
    columns = np.arange(n_cols) // cols

    def read(first: int, n: int) -> Planes:
        start, end = first // rows, (first + n - 1) // rows + 1
        scales = values(scale.rows(start, end - start, "f32"))
        each = scales[np.arange(first, first + n) // rows - start][:, columns]
        with np.errstate(over="ignore", invalid="ignore"):  # Matrix.rows refuses the result
            return Planes("f32", codes.read(first, n).codes * each, {})

    return replace(codes, read=read)
