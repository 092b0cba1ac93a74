"""Conversion of a GGUF file or a Hugging Face folder to a .cflow or .vflow file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cflow.engine.base.errors import ModelError
from cflow.engine.base.metadata import parse_metadata
from cflow.engine.base.reports import Progress
from cflow.engine.files.formats.cflow import Contents, Weight, write
from cflow.engine.files.formats.gguf import GgufFile
from cflow.engine.files.formats.magic import MAGIC
from cflow.engine.files.formats.matrix import Matrix
from cflow.engine.files.formats.order import ordered
from cflow.engine.files.formats.parts import gguf_in
from cflow.engine.files.formats.safetensors import SafetensorsFolder
from cflow.engine.files.formats.tiles import Bytes, pack, stripe_rows
from cflow.engine.files.models import (
    banks,
    gguf_model,
    gguf_vocabulary,
    hf_model,
    hf_vocabulary,
    pipeline_model,
    pooling,
)
from cflow.engine.files.models.fields import Fields
from cflow.engine.files.models.pooling import Pooling
from cflow.engine.files.models.spec import ModelSpec
from cflow.engine.files.models.vocabulary import Vocabulary
from cflow.engine.files.models.weights import Weights
from cflow.engine.files.target import check_quant, order_of

F32_ROLES = ("router", "shared_scale")  # matrices that are never quantised
HASH_CHUNK = 8 << 20


@dataclass(frozen=True)
class Source:
    """An opened source. files: those with weights, over which the source hash is computed."""

    spec: ModelSpec
    weights: Weights
    vocabulary: Vocabulary
    pooling: Pooling
    licence: str | None
    path: Path
    files: list[Path]
    close: Callable[[], None]
    notes: tuple[str, ...] = ()


def convert(
    source: str,
    out: Path,
    *,
    quant: str = "keep",
    order: str | None = None,
    pre: str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Write `out`, whole or not at all. source: a .gguf file or a folder with config.json.

    quant: "keep" stores each tensor in the encoding that holds it exactly (Q5_K: up to f16 rounding
    of scale and minimum); an encoding quantises every matrix but routers and shared-expert gates.
    order: "layer" or "stage"; None: by the suffix of `out`. pre: the pre-tokenizer of a GGUF file;
    None: the file's own. say: is told what a user should know about how the source was read.
    """
    check_quant(quant)
    order = order_of(out, order)
    if os.path.exists(out) and os.path.exists(source) and os.path.samefile(source, out):
        raise ModelError(f"{out} is the source itself; name another file for the result")
    found = open_source(Path(source), pre)
    try:
        for note in (*found.notes, *found.vocabulary.notes):
            say(note)
        write(ordered(_contents(found, quant), order), out, progress)
    finally:
        found.close()


def open_source(path: Path, pre: str | None = None) -> Source:
    """Open a source by reading its headers only."""
    if os.path.isdir(path):
        gguf = gguf_in(path)
        return _open_folder(path) if gguf is None else _open_gguf(gguf, pre)
    if not os.path.isfile(path):
        raise ModelError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} holds weights only; name its folder, {path.parent}, which must also hold "
            "config.json and tokenizer.json"
        )
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            raise ModelError(
                f"{path} is already in cflow's format; convert the GGUF file or Hugging Face folder "
                "that it was made from"
            )
    return _open_gguf(path, pre)


def _open_gguf(path: Path, pre: str | None) -> Source:
    file = GgufFile(path)
    try:
        spec = gguf_model.spec(file)
        licence = file.metadata.get("general.license")
        return Source(
            spec=spec,
            weights=gguf_model.weights(file),
            vocabulary=gguf_vocabulary.vocabulary(file, spec.vocab_size, pre),
            pooling=pooling.of_gguf(file, spec.architecture),
            licence=licence if isinstance(licence, str) else None,
            path=path,
            files=file.parts,
            close=file.close,
        )
    except BaseException:
        file.close()
        raise


def _open_folder(path: Path) -> Source:
    folder = SafetensorsFolder(path)
    try:
        is_pipeline = folder.config.get("model_type") == pipeline_model.MODEL_TYPE
        descriptor = pipeline_model if is_pipeline else hf_model
        spec = descriptor.spec(folder)
        return Source(
            spec=spec,
            weights=descriptor.weights(folder),
            vocabulary=hf_vocabulary.vocabulary(folder, spec.vocab_size),
            pooling=pooling.of_folder(folder),
            licence=Fields(folder.config, str(path / "config.json")).text("licence", "") or None,
            path=path,
            files=folder.files(),
            close=folder.close,
            notes=() if is_pipeline else hf_model.notes(folder, spec),
        )
    except BaseException:
        folder.close()
        raise


def _contents(source: Source, quant: str) -> Contents:
    spec = source.spec
    spec.check()
    vocabulary = source.vocabulary.within(spec.vocab_size, str(source.path))
    origin = _Origin(source.weights, quant)
    resident, experts = banks.resident(spec, origin), banks.expert_records(spec, origin)
    source.weights.refuse_leftovers()
    parse_metadata(
        vocabulary.metadata(), len(vocabulary.tokens)
    )  # so that the written file can be served
    return Contents(
        header=spec.header(len(vocabulary.tokens)),
        layers=spec.layer_records(),
        metadata=_metadata(source, quant) | vocabulary.metadata(),
        tokenizer=vocabulary.tokenizer_json,
        token_bytes=vocabulary.section(),
        resident=resident,
        experts=experts,
    )


def _metadata(source: Source, quant: str) -> dict[str, Any]:
    return {
        "name": source.spec.name,
        "architecture": source.spec.architecture,
        "licence": source.licence,
        "source": source.path.resolve().name,
        "source_sha256": files_sha256(source.files),
        "quantisation": quant,
        "parameters": source.spec.n_parameters(),
    } | source.pooling.metadata()


def files_sha256(paths: list[Path]) -> str:
    """SHA-256 of one file, or of several concatenated."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Origin:
    """Provides the tensors of a source as weights to write."""

    weights: Weights
    quant: str

    def weight(self, role: str, block: int, shape: tuple[int, ...]) -> Weight:
        matrix = self.weights.find(role, block, shape)
        if len(shape) == 1:
            return _vector(role, block, matrix)
        keep = matrix.encoding if self.quant == "keep" else self.quant
        return _tiled(role, block, matrix, "f32" if role in F32_ROLES else keep)

    def experts(
        self, role: str, block: int, n_experts: int, shape: tuple[int, ...]
    ) -> list[Weight]:
        matrices = self.weights.find_experts(role, block, n_experts, (shape[0], shape[1]))
        kinds = {matrix.encoding for matrix in matrices}
        keep = kinds.pop() if len(kinds) == 1 else "f32"
        encoding = keep if self.quant == "keep" else self.quant
        return [_tiled(role, block, matrix, encoding) for matrix in matrices]


def _tiled(role: str, block: int, matrix: Matrix, encoding: str) -> Weight:
    rows = stripe_rows(matrix.n_rows)

    def stripes(first: int, n: int) -> Bytes:
        start = first * rows
        planes = matrix.rows(start, min(n * rows, matrix.n_rows - start), encoding)
        return pack(planes, rows)

    return Weight(role, block, encoding, matrix.n_rows, matrix.n_cols, stripes)


def _vector(role: str, block: int, matrix: Matrix) -> Weight:
    def stripes(_first: int, _n: int) -> Bytes:
        return matrix.floats().astype("<f4").view(np.uint8)

    return Weight(role, block, "f32", 1, matrix.n_cols, stripes, is_vector=True)
