"""The benchmark table: files for other engines, figures by hand, verdicts, and rows from end to end.
No test asserts a speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from bench import figures, page, shape_gguf, table
from bench.figures import Figure, Taken
from bench.rows import ROWS, Row, Source
from cflow.engine.files.convert import convert
from cflow.engine.files.synth import load_shape
from cflow.engine.measure.bare import decode, open_stream
from cflow.engine.native import Model
from makefiles.shape_file import synth_model

RUNS = {"min": 9.0, "median": 10.0, "max": 11.0}


def shape(folder: Path, architecture: str, d_model: int = 256, **layer: Any) -> str:
    path = folder / "small.cflow"
    heads = (d_model // 32, d_model // 64, 32)
    synth_model(path, architecture, n_layers=2, d_model=d_model, heads=heads, **layer)
    path.unlink()
    return str(folder / "small.toml")


@pytest.mark.parametrize("encoding", shape_gguf.ENCODINGS)
def test_files_for_other_engines(encoding: str, tmp_path: Path) -> None:
    """gguf's own reader finds all parameters in the encoding; the engine computes finite logits."""
    small = shape(tmp_path, "qwen2", qkv_bias=True, d_ff=512)
    shape_gguf.write(small, encoding, tmp_path / "x.gguf")
    tensors = {t.name: t for t in GGUFReader(tmp_path / "x.gguf").tensors}
    assert sum(int(t.n_elements) for t in tensors.values()) == load_shape(small).n_parameters()
    kinds = {name: t.tensor_type.name.lower() for name, t in tensors.items()}
    assert kinds["blk.1.attn_norm.weight"] == kinds["blk.1.attn_q.bias"] == "f32"
    plain = "q4_k" if encoding == "q4_k_m" else encoding
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.1.ffn_down.weight"] == plain
    assert kinds["blk.0.ffn_down.weight"] == ("q6_k" if encoding == "q4_k_m" else encoding)
    convert(str(tmp_path / "x.gguf"), tmp_path / "x.cflow")
    model = Model(str(tmp_path / "x.cflow"))
    assert model.encoding == plain
    context = open_stream(model, 4, threads=1)
    assert list(decode(context, [[3], [141], [59], [26]])) == [1, 2, 3, 4]


def test_tokens_choose_experts_of_their_own(tmp_path: Path) -> None:
    experts = {"n_experts": 16, "top_k": 2, "d_expert": 256, "renormalise": True}
    small = shape(tmp_path, "qwen3moe", qk_norm="head", **experts)
    shape_gguf.write(small, "q4_0", tmp_path / "x.gguf")
    convert(str(tmp_path / "x.gguf"), tmp_path / "x.cflow")
    model = Model(str(tmp_path / "x.cflow"), experts={"cache": 1 << 30})
    context = open_stream(model, 32, threads=1)
    for _ in decode(context, [[7 * i] for i in range(32)]):
        pass
    assert (model.expert_uses > 0).mean() > 0.5
    assert model.expert_uses.max() < 16


def test_what_a_step_takes_at_least(tmp_path: Path) -> None:
    """Two rows, by hand. A layer: attention 12,288 weights, router 512, an expert 6,144. Of 8 experts
    3.5 are chosen in the mean, 1.5 more than by one row."""
    small = shape(tmp_path, "qwen3moe", 64, qk_norm="head", n_experts=8, top_k=2, d_expert=32)
    found = {"bytes_per_token": 100_000, "probe_gb_s": 1.0}
    products = 2 * 2 * (12_288 + 512 + 2 * 6_144) + 256 * 64
    floor = figures.floor_s(Taken(found, small, gmac_s=1.0), rows=2, heads=1)
    assert floor == pytest.approx(products / 1e9)
    n_bytes = 100_000 + 2 * 1.5 * 6_144 * 18 / 32
    floor = figures.floor_s(Taken(found, small, gmac_s=2.0), rows=2, heads=1)
    assert floor == pytest.approx(n_bytes / 1e9)


def test_keys_and_values_count_as_bytes_that_are_read() -> None:
    found = {
        "bytes_per_token": 100,
        "kv_bytes_per_token": 50,
        "bandwidth_fraction": 0.6,
        "decode_tok_s": 10.0,
        "runs": {"decode_tok_s": RUNS},
    }
    figure = figures.decode(Taken(found, "", 1.0))
    assert figure.ratio == pytest.approx(0.9)
    assert figure.ceiling == pytest.approx(10 / 0.9)


def test_a_sweep_is_as_good_as_its_worst_step() -> None:
    rates = ((1, 10.0), (2, 19.0), (4, 17.1), (8, 40.0))
    batch = [{"streams": n, "tok_s": rate, "runs": RUNS} for n, rate in rates]
    found = {"batch": batch, "bytes_per_token": 1, "probe_gb_s": 1.0}
    figure = figures.sweep(Taken(found, "smollm2-135m", 1.0))
    assert figure.ratio == pytest.approx(0.9)
    assert [step[:2] for step in figure.steps] == list(rates)


def test_rounds_beside_the_bare_engine() -> None:
    rounds = [{"bare_s": 1.0, "through_s": s} for s in (1.25, 1.0, 2.0)]
    taken = Taken({"tokens": 100, "rounds": rounds}, "", 1.0)
    assert figures.through(taken).ratio == pytest.approx(0.8)
    assert figures.through(taken).runs == {"min": 50.0, "median": 80.0, "max": 100.0}
    assert figures.overhead(taken).runs == pytest.approx({"min": 0, "median": 2500, "max": 10_000})


ROW = Row("x", Source("smollm2-135m"), "", figures.decode, at_least=0.9)


@pytest.mark.parametrize(
    ("row", "figure", "is_met"),
    [
        (ROW, Figure("tok/s", RUNS, 11.0, 0.91), True),
        (ROW, Figure("tok/s", RUNS, 12.0, 0.83), False),
        (Row("x", ROW.source, "", figures.overhead, at_most=10), Figure("µs", RUNS, None, None), True),
        (Row("x", ROW.source, "", figures.overhead, at_most=9.9), Figure("µs", RUNS, None, None), False),
        (Row("x", ROW.source, "", figures.decode, 0.9, beside="y"), Figure("", RUNS, 1, 0.46), True),
        (Row("x", ROW.source, "", figures.decode, 0.9, beside="y"), Figure("", RUNS, 1, 0.44), False),
        (Row("x", ROW.source, "", figures.decode, 0.9, beside="z"), Figure("", RUNS, 1, 0.9), None),
        (Row("x", ROW.source, "", figures.decode), Figure("tok/s", RUNS, 11.0, 0.91), None),
    ],
    ids=["met", "missed", "bound", "over", "beside", "behind", "alone", "no_goal"],
)  # fmt: skip
def test_goals(row: Row, figure: Figure, is_met: bool | None) -> None:
    assert table.judge(row, figure, {"y": {"ratio": 0.5}})[1] is is_met


def test_every_row_can_be_run_alone() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        assert table.wanted([row.name]) == [row]
        assert not row.beside or row.beside in names


def test_rows_from_their_file_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run serves two rows of a model; its files are removed, and the figure of another row stays."""
    command = "python -m bench.beside {model} engine --tokens 8 --rounds 1"
    source = Source(shape(tmp_path, "qwen2", qkv_bias=True, d_ff=512), made="gguf")
    monkeypatch.setattr(Source, "name", "small")
    rows = (
        Row("one", source, command, figures.through, at_least=1000),
        Row("two", source, command, figures.overhead, at_most=1e9),
        Row("other", source, command, figures.through),
    )
    for module in (table, page):
        monkeypatch.setattr(module, "ROWS", rows)
    monkeypatch.setattr(table, "multiplied", lambda _threads: 100.0)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "benchmarks.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "benchmarks.md")
    other = {"why_not": "no time", "date": "2026-11-30"}
    before = {"machine": table.machine_text(), "rows": {"other": other}, "peers": {}}
    table.RESULTS.write_text(json.dumps(before))
    folder = tmp_path / "models"
    monkeypatch.setattr("sys.argv", ["table", "--folder", str(folder), "--only", "one", "two"])
    table.main()
    assert list(folder.iterdir()) == []
    found = json.loads(table.RESULTS.read_text())["rows"]
    assert list(found) == ["one", "two", "other"]
    assert (found["one"]["met"], found["two"]["met"]) == (False, True)
    assert found["other"] == other
    text = table.PAGE.read_text()
    assert "| one | " in text
    assert "| **no** |" in text
    assert "| other | not measured: no time |" in text


def test_the_committed_page_shows_the_committed_figures(tmp_path: Path) -> None:
    page.write(json.loads(table.RESULTS.read_text()), tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == table.PAGE.read_text()


def test_what_could_not_be_measured_is_said(tmp_path: Path) -> None:
    name = ROWS[0].name
    row = {"why_not": "19.0 GB of memory are needed", "date": "2026-11-30"}
    peers = {
        "threads": 2,
        "engines": {"cflow": "", "llama.cpp": "not measured: no compiler"},
        "rows": {"decode x": {"cflow": RUNS}},
    }
    page.write(
        {"machine": "m", "rows": {name: row}, "profiles": {}, "peers": peers}, tmp_path / "page.md"
    )
    text = (tmp_path / "page.md").read_text()
    assert f"| {name} | not measured: 19.0 GB of memory are needed |" in text
    assert "- llama.cpp: not measured: no compiler" in text
    assert page.verdict(row) == "not measured: 19.0 GB of memory are needed"
