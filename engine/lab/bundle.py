"""The model that is bundled with cflow, made from a trained run."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from cflow.engine.files.convert import convert
from cflow.engine.lab.errors import LabError

LICENCE = "Apache-2.0; trained on TinyStories text, CDLA-Sharing-1.0"


def bundle(run: Path, out: Path) -> None:
    """Writes `out`, the model `tinystories` in q8_0, from the folder of a finished run."""
    if not (run / "model" / "config.json").exists():
        raise LabError(f"{run} holds no trained model; `cflow lab train` leaves one in RUN/model")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tinystories"
        shutil.copytree(run / "model", folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"licence": LICENCE}))
        convert(str(folder), out, quant="q8_0")
