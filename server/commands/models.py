"""The MODEL argument of commands: a reference, found, fetched or converted as needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cflow.server.progress import byte_progress

MODEL = Annotated[str, typer.Argument(help="Catalogue name, file, folder, or hf:org/repo.")]


def resolve(model: str) -> Path:
    """The model file of a reference, with a progress bar; may download and convert."""
    from cflow.engine import hub

    with byte_progress() as report:
        return hub.resolve(model, progress=report)
