"""A trained run becomes the model that cflow brings."""

import json
from pathlib import Path

import pytest

from cflow.engine.lab.arms import ARMS
from cflow.engine.lab.bundle import bundle
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.export import export
from oracles import pipelines, tiny
from oracles.model_file import ModelFile


def test_provenance_is_in_the_file(tmp_path: Path) -> None:
    model = pipelines.build(ARMS["arch2_4_combined"])
    export(model, tmp_path / "run" / "model", tiny.byte_tokenizer())
    before = (tmp_path / "run" / "model" / "config.json").read_text()
    bundle(tmp_path / "run", tmp_path / "x.cflow")
    metadata = ModelFile(tmp_path / "x.cflow").metadata
    assert metadata["name"] == "tinystories"
    assert "CDLA-Sharing-1.0" in metadata["licence"]
    assert metadata["quantisation"] == "q8_0"
    assert (tmp_path / "run" / "model" / "config.json").read_text() == before
    assert "licence" not in json.loads(before)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="holds no trained model"):
        bundle(tmp_path, tmp_path / "x.cflow")
    assert not (tmp_path / "x.cflow").exists()
