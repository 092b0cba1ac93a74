"""A trained model as a Hugging Face folder, which `cflow convert` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from safetensors.torch import save_file
from tokenizers import Tokenizer

from cflow.engine.files.models.pipeline_model import CLASS, MODEL_TYPE
from cflow.engine.lab.architectures import Pipeline
from cflow.engine.lab.errors import LabError


def export(model: Pipeline, folder: Path, tokenizer: Tokenizer, end: str | None = None) -> None:
    """Writes folder. end: the token that ends a text. LabError if no .cflow file can hold the arm."""
    if model.arm.streams != "one":
        raise LabError(
            f"a model with {model.arm.streams} streams has no .cflow form; it runs in PyTorch only"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(model) | ({} if end is None else {"eos_token_id": tokenizer.token_to_id(end)})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(model: Pipeline) -> dict[str, Any]:
    """config.json; keys are the fields of Arm and Shape."""
    arm = asdict(model.arm)
    del arm["streams"]
    return {"model_type": MODEL_TYPE, "architectures": [CLASS]} | asdict(model.shape) | arm
