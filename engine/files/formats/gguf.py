"""A strict reader of GGUF files, versions 2 and 3, little-endian. Files are not trusted.

Layout: magic, u32 version, u64 tensors, u64 keys; the keys (string, u32 type, value); the tensor
infos (string, u32 dims, u64 each, u32 type, u64 offset); padding; the data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.blocks import BLOCK_TYPES
from cflow.engine.files.formats.matrix import Matrix
from cflow.engine.files.formats.parts import parts_of
from cflow.engine.files.formats.pread import InputFile
from cflow.engine.files.formats.tiles import Planes

MAX_DIMS = 4
MAX_NAME_BYTES = 255
MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 1 << 26
MAX_ENTRIES = 1 << 24  # entries of an array, keys, tensors
MAX_ALIGNMENT = 1 << 16
READ_AHEAD = 1 << 20

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
BOOL, STRING, ARRAY = 7, 8, 9

Value = int | float | bool | str | list[str] | NDArray[Any]


@dataclass(frozen=True)
class GgufTensor:
    """shape: outermost first, so a matrix is (rows, columns). offset: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int

    @property
    def n_cols(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """A model in one file or in several. metadata: key to value, numeric arrays as numpy arrays; of the
    first part. tensors: by name, in file order. parts: its files."""

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of a split model."""
        self.path = path
        self.parts = parts_of(path)
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._files: list[InputFile] = []
        self._file_of: dict[str, InputFile] = {}
        try:
            for part in self.parts:
                self._open(part)
            self._check_total()
        except BaseException:
            self.close()
            raise

    def _open(self, part: Path) -> None:
        file = InputFile(part)
        self._files.append(file)
        header = _Header(file, len(self._files) - 1, len(self.parts))
        for name in header.tensors:
            if name in self.tensors:
                other = self._file_of[name].path.name
                raise ModelError(f"{part}: tensor {name} is in {other} too")
        if len(self._files) == 1:
            self.metadata = header.metadata
        self.tensors |= header.tensors
        self._file_of |= dict.fromkeys(header.tensors, file)

    def _check_total(self) -> None:
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelError(
                f"{self.path}: split.tensors.count is {total}, but the parts hold "
                f"{len(self.tensors)} tensors"
            )
        if not self.tensors:
            raise ModelError(
                f"{self.path}: holds no tensors: it is a vocabulary without weights; name the file of "
                "the model"
            )

    def matrix(self, name: str) -> Matrix:
        """The tensor as rows of its last dimension; leading dimensions are folded."""
        tensor = self.tensors[name]
        block = BLOCK_TYPES[tensor.type]
        n_blocks = tensor.n_cols // block.n_values
        row_bytes = n_blocks * block.n_bytes

        file = self._file_of[name]

        def read(first: int, n: int) -> Planes:
            data = file.read(tensor.offset + first * row_bytes, n * row_bytes)
            return block.planes(np.frombuffer(data, np.uint8).reshape(n, n_blocks, block.n_bytes))

        return Matrix(file.path, name, tensor.n_rows, tensor.n_cols, block.encoding, read)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Header:
    """Reads everything before the data; checks each length against the rest of the file."""

    def __init__(self, file: InputFile, number: int, n_parts: int) -> None:
        """number: of the part, from 0."""
        self._file = file
        self._at = 0
        self._buffer = b""
        self._buffer_at = 0
        n_tensors, n_keys = self._counts()
        self.metadata = self._keys(n_keys)
        self._check_part(number, n_parts)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        self.tensors = self._placed(infos)

    def _fail(self, message: str) -> ModelError:
        return ModelError(f"{self._file.path}: {message}")

    def _need(self, n_bytes: int, what: str) -> None:
        missing = n_bytes - (self._file.n_bytes - self._at)
        if missing > 0:
            raise self._fail(f"truncated: {what} at byte {self._at:,} needs {missing:,} bytes more")

    def _take(self, n_bytes: int, what: str) -> bytes:
        self._need(n_bytes, what)
        start = self._at - self._buffer_at
        if start + n_bytes > len(self._buffer):
            ahead = min(max(n_bytes, READ_AHEAD), self._file.n_bytes - self._at)
            self._buffer = self._file.read(self._at, ahead)
            self._buffer_at, start = self._at, 0
        self._at += n_bytes
        return self._buffer[start : start + n_bytes]

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        n_bytes = self._number("Q", what)
        if n_bytes > limit:
            raise self._fail(f"{what} is {n_bytes:,} bytes long, at most {limit:,} are allowed")
        try:
            return self._take(n_bytes, what).decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} is not UTF-8") from error

    def _bound(self, count: int, what: str) -> None:
        if count > MAX_ENTRIES:
            raise self._fail(f"{what} are too many; {MAX_ENTRIES:,} entries are allowed")

    def _counts(self) -> tuple[int, int]:
        magic = self._take(4, "the magic")
        if magic != b"GGUF":
            raise self._fail(f"not a GGUF file: it begins with {magic!r}")
        version = self._number("I", "the version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise self._fail("big-endian GGUF; only little-endian files are supported")
        if version not in (2, 3):
            raise self._fail(f"GGUF version {version}; versions 2 and 3 are supported")
        n_tensors, n_keys = self._number("Q", "the counts"), self._number("Q", "the counts")
        what = f"{n_tensors:,} tensors and {n_keys:,} keys"
        self._need(n_tensors * 33 + n_keys * 13, what)
        self._bound(n_tensors + n_keys, what)
        return n_tensors, n_keys

    def _keys(self, n_keys: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(n_keys):
            key = self._string(f"the name of key {index}", MAX_KEY_BYTES)
            if not key or "\0" in key:
                raise self._fail(f"key {index} has the name {key!r}: empty, or with a NUL")
            if key in metadata:
                raise self._fail(f"key {key!r} is there twice")
            metadata[key] = self._value(self._number("I", f"the type of key {key}"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Value:
        what = f"key {key}"
        if kind == STRING:
            return self._string(what)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self._fail(f"{what} has the unknown value type {kind}")
        if kind == BOOL:
            return self._bool(self._number("B", what), what)
        number: int | float = self._number(SCALARS[kind], what)
        return number

    def _bool(self, byte: int, what: str) -> bool:
        if byte > 1:
            raise self._fail(f"{what} is a bool with the value {byte}; 0 and 1 are allowed")
        return byte == 1

    def _array(self, key: str) -> Value:
        what = f"array {key}"
        kind, count = self._number("I", what), self._number("Q", what)
        self._bound(count, f"{what}: {count:,} entries")
        if kind == STRING:
            self._need(8 * count, f"{what} of {count:,} strings")
            return [self._string(f"{what}, entry {index}") for index in range(count)]
        if kind not in SCALARS:
            name = "arrays" if kind == ARRAY else f"unknown type {kind}"
            raise self._fail(f"{what} holds {name}; numbers, bools and strings are supported")
        dtype = np.dtype("u1" if kind == BOOL else "<" + SCALARS[kind])
        data = self._take(count * dtype.itemsize, f"{what} of {count:,} numbers")
        return np.frombuffer(data, dtype)

    def _check_part(self, number: int, n_parts: int) -> None:
        """Raise ModelError if the file says that it is another part than its name does."""
        for key, want in (("split.no", number), ("split.count", n_parts)):
            found = self.metadata.get(key, want)
            if found != want and not (key == "split.count" and n_parts == 1 and found == 0):
                raise self._fail(
                    f"{key} is {found}, but by its name it is part {number + 1} of {n_parts}; the "
                    "parts of a split model must keep their names"
                )

    def _tensor_info(self) -> GgufTensor:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        if not name or "\0" in name:
            raise self._fail(f"a tensor has the name {name!r}: empty, or with a NUL")
        n_dims = self._number("I", f"tensor {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._fail(f"tensor {name} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        dims = [self._number("Q", f"tensor {name}") for _ in range(n_dims)]
        kind = self._number("I", f"tensor {name}")
        offset = self._number("Q", f"tensor {name}")
        if min(dims) < 1:
            raise self._fail(f"tensor {name} has the shape {dims}: a dimension is zero")
        type_name = self._type(name, kind)
        block = BLOCK_TYPES[type_name]
        if dims[0] % block.n_values:
            raise self._fail(
                f"tensor {name} has rows of {dims[0]} values; {type_name} needs a multiple of "
                f"{block.n_values}"
            )
        n_bytes = math.prod(dims) // block.n_values * block.n_bytes
        return GgufTensor(name, tuple(reversed(dims)), type_name, offset, n_bytes)

    def _type(self, name: str, kind: int) -> str:
        known = {member.value: member.name for member in GGMLQuantizationType}
        type_name = known.get(kind, "an unknown type")
        if type_name not in BLOCK_TYPES:
            raise self._fail(
                f"tensor {name} is {type_name} ({kind}), which is not supported; supported: "
                + ", ".join(BLOCK_TYPES)
            )
        return type_name

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fail("general.alignment is not an integer")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._fail(
                f"general.alignment is {value}; a power of two from 8 to {MAX_ALIGNMENT} is allowed"
            )
        return value

    def _placed(self, infos: list[GgufTensor]) -> dict[str, GgufTensor]:
        """Tensors with absolute offsets. Raises ModelError if they overlap or leave the file."""
        alignment = self._alignment()
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end, last = start, ""
        for info in infos:
            if info.name in tensors:
                raise self._fail(f"tensor {info.name} is there twice")
            if info.offset % alignment:
                raise self._fail(
                    f"tensor {info.name} starts at {info.offset}, not on a multiple of {alignment}"
                )
            offset = start + info.offset
            tensors[info.name] = GgufTensor(info.name, info.shape, info.type, offset, info.n_bytes)
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end and last:
                raise self._fail(f"tensors {last} and {tensor.name} overlap")
            end, last = tensor.offset + tensor.n_bytes, tensor.name
        if end > self._file.n_bytes:
            raise self._fail(
                f"truncated: tensor {last} ends at byte {end:,}, the file has {self._file.n_bytes:,} "
                f"({end - self._file.n_bytes:,} bytes are missing)"
            )
        return tensors
