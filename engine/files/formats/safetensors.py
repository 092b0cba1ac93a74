"""A strict reader of Hugging Face folders: config.json and safetensors shards. Files are not trusted.

A shard is u64 header bytes, a JSON header {name: {dtype, shape, data_offsets}}, and the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.matrix import Matrix
from cflow.engine.files.formats.pread import InputFile
from cflow.engine.files.formats.tiles import Floats, Planes

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_JSON_BYTES = 256 << 20
MAX_DIMS = 8
MAX_SHARDS = 10_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
    "F8_E4M3": ("bf16", np.dtype("u1")),
}


def _e4m3() -> Floats:
    """The values of the 256 codes of e4m3fn: a sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.ldexp(np.where(exponent, 8 + mantissa, mantissa), np.maximum(exponent, 1) - 10)
    magnitude[code & 127 == 127] = np.nan
    found: Floats = np.where(code < 128, magnitude, -magnitude).astype(np.float32)
    return found


E4M3 = _e4m3()


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a shard; a scalar has the shape (1,). offset: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class Shard:
    """One .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = InputFile(path)
        try:
            self.tensors = self._header()
        except BaseException:
            self._file.close()
            raise

    def matrix(self, name: str) -> Matrix:
        """The tensor as rows of its last dimension; leading dimensions are folded."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise self._fail(
                f"tensor {name} is {tensor.dtype}, which is not supported; supported: "
                + ", ".join(DTYPES)
            )
        encoding, dtype = DTYPES[tensor.dtype]
        n_cols, n_rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
        row_bytes = n_cols * dtype.itemsize

        def read(first: int, n: int) -> Planes:
            data = self._file.read(tensor.offset + first * row_bytes, n * row_bytes)
            codes = np.frombuffer(data, dtype).reshape(n, n_cols)
            if tensor.dtype == "F8_E4M3":
                return Planes("f32", E4M3[codes], {})
            return Planes(encoding, codes, {})

        return Matrix(self.path, name, n_rows, n_cols, encoding, read)

    def close(self) -> None:
        self._file.close()

    def _fail(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def _header(self) -> dict[str, SafeTensor]:
        if self._file.n_bytes < 8:
            raise self._fail(f"truncated: {self._file.n_bytes} bytes, the header needs 8 at least")
        n_bytes = int.from_bytes(self._file.read(0, 8), "little")
        if n_bytes > MAX_HEADER_BYTES:
            raise self._fail(f"its header claims {n_bytes:,} bytes; {MAX_HEADER_BYTES:,} at most")
        missing = 8 + n_bytes - self._file.n_bytes
        if missing > 0:
            raise self._fail(f"truncated: {missing:,} bytes of the header are missing")
        entries = parse_json(self._file.read(8, n_bytes), str(self.path))
        self._check_metadata(entries.pop("__metadata__", {}))
        tensors = {name: self._tensor(name, entry, 8 + n_bytes) for name, entry in entries.items()}
        self._check_places(tensors, 8 + n_bytes)
        return {name: tensor for name, (tensor, _) in tensors.items()}

    def _check_metadata(self, metadata: Any) -> None:
        if not isinstance(metadata, dict):
            raise self._fail("__metadata__ is not an object of strings")
        for key, value in metadata.items():
            if not isinstance(value, str):
                raise self._fail(
                    f"__metadata__ holds {key!r}: {value!r:.40}, which is not a string"
                )

    def _tensor(self, name: str, entry: Any, start: int) -> tuple[SafeTensor, int]:
        """The tensor, and the offset of its end."""
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            first, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._fail(f"tensor {name} lacks a dtype, a shape or two offsets") from error
        if not name or "\0" in name or not isinstance(dtype, str):
            raise self._fail(f"tensor {name!r} has no proper name or dtype")
        numbers = (*shape, first, end)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise self._fail(f"tensor {name} has a shape or offsets that are not counts")
        if len(shape) > MAX_DIMS or min(shape, default=1) < 1:
            raise self._fail(f"tensor {name} has the shape {list(shape)}")
        if dtype in DTYPES:
            n_bytes = math.prod(shape) * DTYPES[dtype][1].itemsize
            if end - first != n_bytes:
                raise self._fail(
                    f"tensor {name} has {end - first:,} bytes, {dtype} {list(shape)} is {n_bytes:,}"
                )
        return SafeTensor(name, shape or (1,), dtype, start + first), start + end

    def _check_places(self, tensors: dict[str, tuple[SafeTensor, int]], start: int) -> None:
        """Raise ModelError unless tensors fill the rest of the file, as the safetensors library
        demands: a hole or a trailing byte may hide data."""
        end, last = start, ""
        for tensor, tensor_end in sorted(tensors.values(), key=lambda pair: pair[0].offset):
            if tensor.offset < end and last:
                raise self._fail(f"tensors {last} and {tensor.name} overlap")
            if tensor_end < tensor.offset:
                raise self._fail(f"tensor {tensor.name} ends before it begins")
            if tensor.offset > end:
                raise self._fail(
                    f"a hole of {tensor.offset - end:,} bytes before tensor {tensor.name}"
                )
            end, last = tensor_end, tensor.name
        if end > self._file.n_bytes:
            raise self._fail(
                f"truncated: tensor {last} ends at byte {end:,}, the file has "
                f"{self._file.n_bytes:,} ({end - self._file.n_bytes:,} bytes are missing)"
            )
        if end < self._file.n_bytes:
            raise self._fail(f"{self._file.n_bytes - end:,} bytes follow the last tensor")


class SafetensorsFolder:
    """config: config.json. tensors: of all shards, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self.json("config.json")
        self._shards: dict[str, Shard] = {}
        self.tensors: dict[str, SafeTensor] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the folder. Raises ModelError if it is missing."""
        data = self.text(name)
        if data is None:
            raise ModelError(f"{self.path} has no {name}")
        return parse_json(data, str(self.path / name))

    def text(self, name: str, folder: str = "") -> bytes | None:
        """The bytes of a file of the folder, or of a folder in it; None if it is missing."""
        path = self.path / folder / name
        if not path.exists():
            return None
        with InputFile(self._inside(name, folder)) as file:
            if file.n_bytes > MAX_JSON_BYTES:
                raise ModelError(f"{path} has {file.n_bytes:,} bytes; {MAX_JSON_BYTES:,} at most")
            return file.read(0, file.n_bytes)

    def matrix(self, name: str) -> Matrix:
        return self._owner[name].matrix(name)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def files(self) -> list[Path]:
        """The weight files."""
        return [shard.path for shard in self._shards.values()]

    def _open(self) -> None:
        promised = self._weight_map()
        names = [SINGLE] if promised is None else sorted(set(promised.values()))
        for name in names:
            self._shards[name] = Shard(self._inside(name))
        self._owner: dict[str, Shard] = {}
        for name, shard in self._shards.items():
            for tensor in shard.tensors.values():
                self._claim(tensor, name, promised)
                self._owner[tensor.name] = shard
        for tensor_name, name in (promised or {}).items():
            if tensor_name not in self.tensors:
                raise ModelError(f"{self.path}: tensor {tensor_name} is not in {name}")

    def _claim(self, tensor: SafeTensor, shard: str, promised: dict[str, str] | None) -> None:
        if promised is not None and promised.get(tensor.name) != shard:
            raise ModelError(
                f"{self.path}: {shard} holds tensor {tensor.name}, which {INDEX} "
                f"places in {promised.get(tensor.name, 'no file')}"
            )
        self.tensors[tensor.name] = tensor

    def _weight_map(self) -> dict[str, str] | None:
        """Tensor name to shard name; None if a single file holds all tensors."""
        if not (self.path / INDEX).exists():
            if not (self.path / SINGLE).exists():
                raise ModelError(f"{self.path} has neither {SINGLE} nor {INDEX}")
            return None
        weight_map = self.json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{self.path / INDEX}: weight_map is missing or empty")
        names = set(map(str, weight_map.values()))
        if len(names) > MAX_SHARDS:
            raise ModelError(f"{self.path / INDEX}: {len(names):,} shards; {MAX_SHARDS:,} at most")
        missing = sorted(name for name in names if not self._inside(name).exists())
        if missing:
            raise ModelError(f"{self.path}: missing shards: {', '.join(missing[:5])}")
        return {str(tensor): str(name) for tensor, name in weight_map.items()}

    def _inside(self, name: str, folder: str = "") -> Path:
        """The path of a file directly in the folder, or in a folder of it. A symlink may leave it only
        towards the blobs of its own snapshot, as in the hub's cache."""
        for part in (name, folder or "x"):
            if not part or part in (".", "..") or any(c in part for c in "/\\\0"):
                raise ModelError(f"{self.path}: {part!r} is not a plain file name")
        path = self.path / folder / name
        home = self.path.resolve()
        allowed = [home / folder]
        if home.parent.name == "snapshots":
            allowed.append(home.parent.parent / "blobs")
        if path.resolve().parent not in allowed:
            raise ModelError(f"{self.path}: {name} is a link that leads out of the folder")
        return path


def parse_json(data: bytes, origin: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ModelError otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ModelError(f"{origin}: an object holds a key twice")
        return found

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{origin}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{origin}: not a JSON object")
    return value
