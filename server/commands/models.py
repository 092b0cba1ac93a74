"""The MODEL argument of commands: find, fetch or convert the model that a reference names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import FetchError
from cflow.server.commands.options import read_engine
from cflow.server.commands.progress import byte_progress, say
from cflow.server.config import DEFAULT_MODEL

SOURCES = (
    "a name of the catalogue (smollm2-135m), a .gguf file, a Hugging Face folder, or hf:org/repo "
    "(hf:org/repo:Q4_K_M for a GGUF file, hf:org/repo@revision)"
)
KINDS = f"tinystories, a .cflow or .vflow file, {SOURCES}"
MODEL = Annotated[str, typer.Argument(help=f"The model: {KINDS}.")]


def resolve(model: str) -> Path:
    """The .cflow or .vflow file of a reference. May download and convert, with a progress bar."""
    from cflow.engine.files import hub

    with byte_progress() as report:
        return hub.resolve(model, progress=report)


def engine_for(model: str, flags: dict[str, Any]) -> EngineConfig:
    """The engine's settings for a model. Wrong settings are reported before a long download."""
    config = read_engine(flags)
    return replace(config, model=str(resolve(model)))


@contextmanager
def found(model: str) -> Iterator[Path]:
    """The file or folder that a reference names, unconverted. May download, with a progress bar."""
    from cflow.engine.files import hub

    with byte_progress() as report, hub.found(model, progress=report) as path:
        yield path


def resolve_default() -> tuple[str, Path]:
    """The default model's name and file, or the bundled model's if that one cannot be fetched."""
    from cflow.engine.files import hub

    try:
        return DEFAULT_MODEL, resolve(DEFAULT_MODEL)
    except FetchError as error:
        say(str(error))
        say(
            f"serving {hub.BUNDLED} instead, a model of 5 M parameters that tells children's stories"
        )
        return hub.BUNDLED, resolve(hub.BUNDLED)
