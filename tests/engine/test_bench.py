"""What the benchmark reports; how fast it is asserts nobody."""

from pathlib import Path
from typing import Any

import pytest

from cflow.engine import bench, native
from cflow.engine.errors import CflowError
from oracles.random_model import EXPERTS, RandomModel


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "tiny.cflow"
    return RandomModel([{}, dict(EXPERTS)], context=1024).write(file, "q8_0")


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one takes a GiB."""
    rates = iter([20e9, 25e9])
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: next(rates))


def test_the_report_holds_what_the_design_names(path: Path) -> None:
    result = bench.run(path, prompt=700, gen=5, batch=(1, 3), runs=3, threads=1, isa="scalar")
    report = result.to_json()
    assert report["model"] == "random"
    assert report["quant"] == "q8_0"
    assert (report["isa"], report["threads"]) == ("scalar", 1)
    assert report["bytes_per_token"] == native.Model(str(path)).plan.bytes_per_token
    assert report["probe_gb_s"] == 25
    assert report["read_gb_s"] == report["bytes_per_token"] * report["decode_tok_s"] / 1e9
    assert report["bandwidth_fraction"] == report["read_gb_s"] / 25
    assert report["resident_bytes"] > 0
    assert 0 <= report["huge_page_ratio"] <= 1
    for name in ("decode_tok_s", "prefill_tok_s"):
        check_runs(report[name], report["runs"][name])
    assert [item["streams"] for item in report["batch"]] == [1, 3]
    for item in report["batch"]:
        check_runs(item["tok_s"], item["runs"])
    assert report["batch"][0]["tok_s"] == report["decode_tok_s"]


def check_runs(rate: float, runs: dict[str, float]) -> None:
    assert 0 < runs["min"] <= runs["median"] == rate <= runs["max"]


def test_every_phase_reports_its_end(path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    bench.run(
        path,
        prompt=4,
        gen=3,
        batch=(2,),
        runs=2,
        threads=1,
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert set(seen) == {"load", "probe", "prefill", "decode 1", "decode 2"}
    for reports in seen.values():
        assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in seen["decode 2"]] == [1, 2, 3, 4, 5, 6]


def test_the_smallest_run(path: Path) -> None:
    assert bench.run(path, prompt=1, gen=1, batch=(), runs=1, threads=1).decode.min > 0


def test_the_debugging_precision(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(bench, "Model", lambda *a, **k: opened.append(k) or native.Model(*a, **k))
    monkeypatch.setattr(
        bench, "Context", lambda *a, **k: opened.append(k) or native.Context(*a, **k)
    )
    bench.run(path, prompt=4, gen=2, batch=(), runs=1, threads=1, precision="f32", kv="q8")
    assert (opened[0]["as_f32"], opened[1]["kv_type"]) == (True, "f32")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"prompt": 1025}, "prompt 1025: this model takes 1 to 1024 tokens"),
        ({"gen": 0}, "gen 0"),
        ({"batch": (1, 0)}, "batch 0"),
        ({"runs": 0}, "runs 0"),
    ],
)
def test_sizes_out_of_range_are_named(path: Path, sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(CflowError, match=text):
        bench.run(path, **sizes)
