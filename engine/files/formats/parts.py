"""GGUF models in several files, by their names: m-00001-of-00003.gguf."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import TypeVar

from cflow.engine.base.errors import ModelError

SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MANY = 5  # names in an error


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of, in order. Raises ModelError for missing
    ones."""
    match = SPLIT_NAME.search(path.name)
    if match is None:
        return [path]
    number, n_parts = int(match[1]), int(match[2])
    if not 1 <= number <= n_parts:
        raise ModelError(f"{path}: part {number} of {n_parts} cannot be; its name is wrong")
    stem = path.name[: match.start()]
    parts = [path.with_name(f"{stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of the {n_parts} parts of a split model: "
            f"{_some(missing)}; put all parts into one folder"
        )
    return parts


AnyPath = TypeVar("AnyPath", bound=PurePath)


def first_part(path: AnyPath) -> AnyPath:
    """The first part of a split model, or the path itself."""
    return path.with_name(SPLIT_NAME.sub(r"-00001-of-\2.gguf", path.name))


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder without config.json, its first part if it is split; None: there is
    none. Raises ModelError if there are several."""
    if (folder / "config.json").exists():
        return None
    paths = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    models = sorted({first_part(path) for path in paths})
    if len(models) > 1:
        names = _some([path.name for path in models])
        raise ModelError(f"{folder} holds {len(models)} GGUF models; name one of them: {names}")
    return models[0] if models else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return ", ".join(names[:MANY]) + more
