"""A real checkpoint small enough to compare text: llama2.c's stories260K."""

import json
from pathlib import Path

from cflow.engine.files.convert import convert
from oracles import llama2c, running, tiny


def test_greedy_ids_equal_the_golden_ones(data: Path, tmp_path: Path) -> None:
    folder = data / "stories260K"
    golden = json.loads((folder / "golden_greedy.json").read_text())
    model = llama2c.load(folder / "stories260K.bin")
    convert(str(tiny.save(model, tmp_path / "hf")), tmp_path / "model.cflow", quant="f32")
    want = golden["greedy_tokens"]
    with running.opened(tmp_path / "model.cflow", as_f32=True) as context:
        assert running.greedy(context, golden["prompt_tokens"], len(want)) == want
