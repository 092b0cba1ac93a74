"""A dense FFN split into always-active experts equals the dense model."""

from pathlib import Path

from cflow.engine.files.convert import convert
from oracles import dense_split, running, tiny
from oracles.model_file import ModelFile
from oracles.real_models import RealModel

PROMPT = [(i * i + 5 * i + 2) % tiny.VOCAB_SIZE for i in range(70)]


def check(model: ModelFile, folder: Path, n_layers: int) -> None:
    dense = dense_split.write(model, folder / "dense.cflow", n_layers)
    split = dense_split.write(model, folder / "split.cflow", n_layers, n_experts=8)
    with running.opened(dense, as_f32=True) as context:
        want = running.logits(context, PROMPT)
    with running.opened(split, as_f32=True) as context:
        got = running.logits(context, PROMPT)
    assert running.relative_error(got, want).max() < 1e-5


def test_of_a_tiny_model(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("qwen2"), tmp_path / "hf")
    convert(str(source), tmp_path / "model.cflow", quant="f32")
    check(ModelFile(tmp_path / "model.cflow"), tmp_path, n_layers=3)


def test_of_real_weights(tmp_path: Path) -> None:
    check(ModelFile(RealModel.fetch("smollm2-135m").cflow), tmp_path, n_layers=4)
