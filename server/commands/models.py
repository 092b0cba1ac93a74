"""The MODEL argument of commands: a reference, found, fetched or converted as needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cflow.engine.base.errors import FetchError
from cflow.server.commands.progress import byte_progress, console
from cflow.server.config import DEFAULT_MODEL

MODEL = Annotated[str, typer.Argument(help="Catalogue name, file, folder, or hf:org/repo.")]


def resolve(model: str) -> Path:
    """The model file of a reference, with a progress bar; may download and convert."""
    from cflow.engine.files import hub

    with byte_progress() as report:
        return hub.resolve(model, progress=report)


def resolve_default() -> tuple[str, Path]:
    """The default model's name and file; the bundled model's where that one cannot be fetched."""
    from cflow.engine.files import hub

    try:
        return DEFAULT_MODEL, resolve(DEFAULT_MODEL)
    except FetchError as error:
        console.print(f"cflow: {error}", markup=False)
        console.print(
            f"cflow: serving {hub.BUNDLED} in its place, a model of 5 M parameters that tells "
            "children's stories"
        )
        return hub.BUNDLED, resolve(hub.BUNDLED)
