"""What a server says about the model and the machine while it loads."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cflow.engine.base import machine
from cflow.engine.base.cgroup import CpuQuota
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import DiskStats
from cflow.engine.base.reports import silent
from cflow.engine.files.convert import convert
from cflow.engine.native import Model
from cflow.engine.worker.loading import Loaded, _DiskWatch, _thread_notes, load
from makefiles.safetensors_file import tiny_folder, tiny_tensors


def test_threads_that_cannot_run_well_are_noted() -> None:
    def notes(threads: int, **fields: Any) -> list[str]:
        usual: dict[str, Any] = {"threads": 1, "reason": "", "physical": 8, "nodes": 1}
        cores = machine.Cores(**(usual | fields))
        return _thread_notes(threads, cores)

    quota = CpuQuota(1.5, "the file")
    assert notes(8, quota=None) == notes(1, quota=quota) == []
    assert notes(1, quota=CpuQuota(0.5, "")) == []  # there have to be some
    [spread] = notes(8, nodes=2, quota=None)
    assert spread.startswith("2 memory nodes: bind")
    [stopped] = notes(2, quota=quota)
    assert "2 threads and a CPU quota of 1.5 (the file)" in stopped


def loaded(folder: Path, kv: str = "f16") -> Loaded:
    out = folder.with_suffix(".cflow")
    convert(str(folder), out)
    digest = Model(str(out), header_only=True).digest
    return load(EngineConfig(model=str(out), kv=kv), digest, silent)


def test_f66_keys_beyond_f16_fail_at_load_and_name_the_way_out(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = np.full_like(tensors[name], 7e4)
    folder = tiny_folder(tmp_path / "m", tensors)
    with pytest.raises(EngineError, match=r"m\.cflow.*not finite.*--kv bf16") as error:
        loaded(folder)
    assert error.value.code == "numeric"
    loaded(folder, kv="bf16")


def test_f66_an_overflow_of_a_few_tokens_is_found_too(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name][:] = 0
    tensors[name][:, 0] = 1e5  # values are 1e5 times the first number of a token
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][32:, 0] = 1  # half of the vocabulary
    with pytest.raises(EngineError, match="not finite"):
        loaded(tiny_folder(tmp_path / "m", tensors))


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (
            "{% if %}",
            "the model's chat template has a syntax error.*line 1: Expected an expression",
        ),
        ("{{ messages[0].content | no_such_filter }}", "syntax error.*no_such_filter"),
        ("{{ messages[0].content }}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_f67_a_template_with_a_syntax_error_is_noted(
    template: str, note: str | None, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    notes = [text for text in loaded(folder).ready.notes if "syntax error" in text]
    assert len(notes) == (note is not None)
    if note:
        assert re.search(note, notes[0])


def test_f70_direct_reads_that_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    zeros = dict.fromkeys(DiskStats.__struct_fields__, 0)
    tier = SimpleNamespace(**zeros, direct_io=1)
    buffered = SimpleNamespace(**zeros, direct_io=0)  # from the start, as a note of Ready says
    model: Any = SimpleNamespace(path="m.cflow", tier=tier, layer_tier=buffered)
    watch = _DiskWatch(model)
    assert set(watch()) == {"experts", "layers"}
    assert caplog.messages == []
    tier.direct_io = 0
    watch()
    watch()
    [text] = caplog.messages
    assert text.startswith("m.cflow: the file system refused a direct read; experts are read")
