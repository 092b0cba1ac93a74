"""Perplexity against transformers on the same windows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.files.convert import convert
from cflow.engine.measure import perplexity
from cflow.engine.native import Model
from oracles import tiny

TEXT = "".join(chr(32 + (i * i + 7 * i) % 95) for i in range(1090)) + 5 * "\r\n"
BOS = 1


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def path(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("perplexity")
    convert(str(tiny.save(oracle, folder / "hf")), folder / "tiny.cflow", quant="f32")
    return folder / "tiny.cflow"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(TEXT.encode())
    return tmp_path / "text"


def loss(oracle: PreTrainedModel, windows: list[list[int]]) -> float:
    """Mean of -log p over all tokens but each window's first."""
    total, n = 0.0, 0
    for window in windows:
        with torch.no_grad():
            ids = torch.tensor([window])
            total += float(oracle(ids, labels=ids).loss) * (len(window) - 1)
        n += len(window) - 1
    return total / n


def cut(size: int) -> list[list[int]]:
    ids = tiny.byte_tokenizer().encode(TEXT).ids
    assert len(ids) == len(TEXT)
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def set_metadata(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    kept: Any = Model.metadata
    monkeypatch.setattr(Model, "metadata", property(lambda self: kept.fget(self) | changes))


def config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), threads=1, **settings)


def test_windows_without_bos(
    path: Path, text_file: Path, oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_metadata(monkeypatch, add_bos=False, bos_id=BOS)
    result = perplexity.run(config(path, precision="f32"), text_file)
    expected = loss(oracle, cut(512))
    assert result.mean_nll == pytest.approx(expected, rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-3)
    assert (result.n_windows, result.n_scored) == (3, 1100 - 3)


def test_windows_begin_with_bos_where_the_tokenizer_says_so(
    path: Path, text_file: Path, oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_metadata(monkeypatch, add_bos=True, bos_id=BOS)
    result = perplexity.run(config(path, precision="f32"), text_file)
    expected = loss(oracle, [[BOS, *window] for window in cut(511)])
    assert result.mean_nll == pytest.approx(expected, rel=1e-4)
    assert (result.n_windows, result.n_scored) == (3, 1100)


def test_only_the_first_windows_are_scored(
    path: Path, text_file: Path, oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_metadata(monkeypatch, add_bos=False)
    seen: list[tuple[str, int, int]] = []
    result = perplexity.run(
        config(path), text_file, windows=1, progress=lambda *args: seen.append(args)
    )
    assert (result.n_windows, result.n_scored) == (1, 511)
    assert result.mean_nll == pytest.approx(loss(oracle, cut(512)[:1]), rel=0.02)  # int8
    assert seen[-1] == ("score", 1, 1)
    assert result.to_json()["perplexity"] == result.perplexity


def test_settings_that_change_the_logits_are_told(tmp_path: Path, text_file: Path) -> None:
    experts = tmp_path / "experts.cflow"
    convert(str(tiny.save(tiny.build("olmoe"), tmp_path / "hf")), experts)
    told = []
    for settings in ({}, {"kv": "q8", "defer_experts": 1}, {"precision": "f32"}):
        found = perplexity.run(config(experts, **settings), text_file, windows=1).to_json()
        told.append((found["precision"], found["kv"], found["defer_experts"]))
    assert told == [("int8", "f16", 0), ("int8", "q8", 1), ("f32", "f32", 0)]


def test_texts_that_cannot_be_scored_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CflowError, match=r"none.*No such file"):
        perplexity.run(config(path), tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(CflowError, match="latin is not UTF-8 at byte 3"):
        perplexity.run(config(path), tmp_path / "latin")
    (tmp_path / "short").write_text("a")
    with pytest.raises(CflowError, match="short: fewer than two tokens"):
        perplexity.run(config(path), tmp_path / "short")
