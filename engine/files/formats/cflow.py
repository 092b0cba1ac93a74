"""Writer of .cflow and .vflow files (docs/format.md): whole, or not at all.

The layout is computed from shapes alone; then weights stream through, a few MiB at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cflow.engine import native
from cflow.engine.base.errors import ModelError
from cflow.engine.base.reports import Progress
from cflow.engine.files.formats.magic import MAGIC
from cflow.engine.files.formats.tiles import Bytes, n_stripes, stripe_bytes, stripe_rows

PAGE = 4096
LINE = 64
RUN_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
MODEL_LEVEL: int = native.const.CFLOW_MODEL_LEVEL  # block of tensors that belong to no layer


@dataclass(frozen=True)
class Weight:
    """A tensor to write. stripes(first, n): stripes of a matrix as bytes (n, stripe bytes); a vector
    is one stripe of n_cols f32."""

    role: str  # of cflow_role, lower case without the prefix
    block: int
    encoding: str
    n_rows: int
    n_cols: int
    stripes: Callable[[int, int], Bytes]
    is_vector: bool = False

    @property
    def stripe_bytes(self) -> int:
        if self.is_vector:
            return 4 * self.n_cols
        return stripe_bytes(self.encoding, self.n_rows, self.n_cols)

    @property
    def n_stripes(self) -> int:
        return 1 if self.is_vector else n_stripes(self.n_rows)


Run = tuple[Weight, ...]  # weights interleaved by stripe (gate and up); most runs have one


@dataclass(frozen=True)
class Contents:
    """Everything that a file holds. header, layers: fields of cflow_header and cflow_layer.

    resident, experts: in file order. experts: by block with experts, then by expert, its runs; all
    experts of a block have the same shapes.
    """

    header: dict[str, Any]
    layers: list[dict[str, Any]]
    metadata: dict[str, Any]
    tokenizer: bytes
    token_bytes: bytes
    resident: list[Run]
    experts: dict[int, list[list[Run]]] = field(default_factory=dict)


def write(contents: Contents, path: Path, progress: Progress | None = None) -> None:
    """Write path through a temporary file beside it. A failure leaves nothing behind."""
    _Writer(contents, path, progress).run()


def write_header(contents: Contents, path: Path) -> None:
    """Write the sections before the banks only: a planner needs no weights."""
    _Writer(contents, path, None).run_header()


class _Writer:
    def __init__(self, contents: Contents, path: Path, progress: Progress | None) -> None:
        self._contents = contents
        self._path = path
        self._report = progress
        self._done = 0
        self._tensors: list[dict[str, Any]] = []
        metadata = json.dumps(contents.metadata, ensure_ascii=False, sort_keys=True)
        self._metadata = metadata.encode(errors="replace")  # file names may not be UTF-8
        self._resident_bytes = self._place(contents.resident)
        self._record_bytes = {
            block: self._place(experts[0]) for block, experts in contents.experts.items()
        }
        self._records = self._place_records()
        self._sections = self._place_sections()

    def _place(self, runs: Sequence[Run]) -> int:
        """Add tensor entries for the runs; return the bytes that they take in their bank or record."""
        at = 0
        for run in runs:
            stride = sum(weight.stripe_bytes for weight in run)
            offset = at
            for weight in run:
                self._tensors.append(_tensor(weight, offset, stride))
                offset += weight.stripe_bytes
            at = _up(at + stride * run[0].n_stripes, LINE)
        return at

    def _place_records(self) -> list[dict[str, Any]]:
        """Place records in file order; their table is ordered by block and expert."""
        records, offset = [], 0
        for block, experts in self._contents.experts.items():
            n_bytes = self._record_bytes[block]
            for expert in range(len(experts)):
                record = {"block": block, "expert": expert, "offset": offset, "bytes": n_bytes}
                records.append(record)
                offset += _up(n_bytes, PAGE)
        return records

    def _place_sections(self) -> dict[str, dict[str, int]]:
        """Offsets and sizes of the sections, in the order of cflow_section_id and of the file."""
        sizes = {
            "layers": native.sizeof("cflow_layer") * len(self._contents.layers),
            "tensors": native.sizeof("cflow_tensor") * len(self._tensors),
            "experts": native.sizeof("cflow_record") * len(self._records),
            "metadata": len(self._metadata),
            "tokenizer": len(self._contents.tokenizer),
            "token_bytes": len(self._contents.token_bytes),
            "run_crcs": 4 * -(-self._resident_bytes // RUN_BYTES),
            "resident": self._resident_bytes,
            "expert_bank": sum(_up(record["bytes"], PAGE) for record in self._records),
        }
        sections, at = {}, PAGE
        for name, n_bytes in sizes.items():
            sections[name] = {"offset": at, "bytes": n_bytes}
            at = _up(at + n_bytes, PAGE)
        self._file_bytes = at
        return sections

    def run(self) -> None:
        self._check_space()
        self._safely(self._write)

    def run_header(self) -> None:
        self._safely(
            lambda file: self._write_small(file, bytes(self._sections["run_crcs"]["bytes"]))
        )

    def _safely(self, write: Callable[[BinaryIO], None]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise ModelError(f"cannot write {self._path}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _check_space(self) -> None:
        if os.path.isdir(self._path):
            raise ModelError(f"{self._path} is a folder; name the file to write")
        if os.path.exists(self._path) and not os.path.isfile(
            self._path
        ):  # /dev/null must not be replaced
            raise ModelError(f"{self._path} is a device or a pipe; name the file to write")
        try:
            free = shutil.disk_usage(self._path.parent).free
        except OSError as error:
            raise ModelError(f"cannot write {self._path}: {error.strerror}") from error
        if free < self._file_bytes:
            raise ModelError(
                f"{self._path} needs {self._file_bytes:,} bytes; its disk has {free:,} free"
            )

    def _write(self, file: BinaryIO) -> None:
        file.truncate(self._file_bytes)
        run_crcs = self._write_resident(file)
        self._write_experts(file)
        self._write_small(file, run_crcs)

    def _write_small(self, file: BinaryIO, run_crcs: bytes) -> None:
        """Write everything but the banks, whose CRCs are known by now."""
        small = {
            "layers": _structs("cflow_layer", self._contents.layers),
            "tensors": _structs("cflow_tensor", self._tensors),
            "experts": _structs(
                "cflow_record", sorted(self._records, key=lambda r: (r["block"], r["expert"]))
            ),
            "metadata": self._metadata,
            "tokenizer": self._contents.tokenizer,
            "token_bytes": self._contents.token_bytes,
            "run_crcs": run_crcs,
        }
        for name, data in small.items():
            section = self._sections[name]
            section["crc"] = native.crc32c(data)
            file.seek(section["offset"])
            file.write(data)
        header = self._header()
        file.seek(0)
        file.write(header)

    def _header(self) -> bytes:
        fields = {
            **self._contents.header,
            "magic": MAGIC,
            "version": native.const.CFLOW_VERSION,
            "file_bytes": self._file_bytes,
            "n_layers": len(self._contents.layers),
            "n_tensors": len(self._tensors),
            "n_records": len(self._records),
            "sections": list(self._sections.values()),
        }
        body = native.pack("cflow_header", fields)[:-4]
        return body + native.crc32c(body).to_bytes(4, "little")

    def _write_resident(self, file: BinaryIO) -> bytes:
        """Write the resident bank; return the CRCs of its runs."""
        file.seek(self._sections["resident"]["offset"])
        crcs: list[int] = []
        crc, filled = 0, 0
        for chunk in _bank(self._contents.resident):
            file.write(chunk)
            self._progress(len(chunk))
            view = memoryview(chunk)
            while view:
                piece = view[: RUN_BYTES - filled]
                crc, filled = native.crc32c(piece, crc), filled + len(piece)
                view = view[len(piece) :]
                if filled == RUN_BYTES:
                    crcs.append(crc)
                    crc, filled = 0, 0
        if filled:
            crcs.append(crc)
        return np.array(crcs, "<u4").tobytes()

    def _write_experts(self, file: BinaryIO) -> None:
        file.seek(self._sections["expert_bank"]["offset"])
        records = iter(self._records)
        for experts in self._contents.experts.values():
            for runs in experts:
                record = next(records)
                data = b"".join(bytes(chunk) for chunk in _bank(runs))
                data = data.ljust(_up(len(data), PAGE), b"\0")
                record["crc"] = native.crc32c(data)
                file.write(data)
                self._progress(len(data))

    def _progress(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._report:
            total = self._sections["resident"]["bytes"] + self._sections["expert_bank"]["bytes"]
            self._report(self._done, total)


def _structs(name: str, rows: list[dict[str, Any]]) -> bytes:
    return b"".join(native.pack(name, row) for row in rows)


def _tensor(weight: Weight, offset: int, stride: int) -> dict[str, Any]:
    return {
        "role": native.const.Role[weight.role.upper()],
        "block": weight.block,
        "encoding": native.const.Encoding[weight.encoding.upper()],
        "n_rows": weight.n_rows,
        "n_cols": weight.n_cols,
        "stripe_rows": 0 if weight.is_vector else stripe_rows(weight.n_rows),
        "offset": offset,
        "stripe_stride": stride,
    }


def _bank(runs: Sequence[Run]) -> Iterator[memoryview]:
    """The bytes of a bank or record, run by run, each padded to 64 bytes."""
    for run in runs:
        stride = sum(weight.stripe_bytes for weight in run)
        total = run[0].n_stripes
        step = max(1, CHUNK_BYTES // stride)
        for first in range(0, total, step):
            n = min(step, total - first)
            parts = [weight.stripes(first, n) for weight in run]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
            yield np.ascontiguousarray(joined).reshape(-1).data
        if padding := -stride * total % LINE:
            yield memoryview(bytes(padding))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
