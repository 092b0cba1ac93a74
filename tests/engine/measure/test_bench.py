"""What the benchmark reports; how fast it is asserts nobody."""

import re
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError, EngineError
from cflow.engine.base.machine import Memory
from cflow.engine.files import hub
from cflow.engine.measure import bare, bench
from cflow.engine.measure.bench import Decoded, TierUse
from cflow.engine.memory import budget
from cflow.engine.memory.experts import ExpertBank
from makefiles.shape_file import synth_model
from oracles.random_model import EXPERTS, RandomModel


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "tiny.cflow"
    return RandomModel([{}, dict(EXPERTS)], context=1024).write(file, "q8_0")


def config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), threads=1, **settings)


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one takes a GiB."""
    rates = cycle([20e9, 24e9])
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: next(rates))


def test_the_report_holds_what_the_design_names(path: Path) -> None:
    result = bench.run(config(path, isa="scalar"), prompt=700, gen=5, batch=(1, 3), runs=3)
    report = result.to_json()
    assert report["model"] == "random"
    assert report["quant"] == "q8_0"
    assert (report["isa"], report["threads"]) == ("scalar", 1)
    assert report["bytes_per_token"] == native.Model(str(path)).plan.bytes_per_token
    assert report["probes_gb_s"] == [20, 24, 20, 24]
    assert report["probe_gb_s"] == 22
    assert report["read_gb_s"] == report["bytes_per_token"] * report["decode_tok_s"] / 1e9
    assert report["bandwidth_fraction"] == pytest.approx(report["read_gb_s"] / 22)
    assert (report["depth"], report["kv_bytes_per_token"]) == (0, 0)
    assert report["resident_bytes"] > 0
    assert 0 <= report["huge_page_ratio"] <= 1
    for name in ("decode_tok_s", "prefill_tok_s", "bandwidth_fraction"):
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
        config(path),
        prompt=4,
        gen=3,
        batch=(2,),
        runs=2,
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert set(seen) == {"load", "probe", "prefill", "decode 1", "decode 2"}
    for reports in seen.values():
        assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in seen["decode 2"]] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_compared_with_the_probes_beside_it() -> None:
    """By hand: memory that becomes slower, and with it the second run."""
    found = Decoded(rates=(10.0, 6.0, 5.0), probes=(40.0, 40.0, 20.0, 20.0)).fraction(2_000_000_000)
    assert (found.min, found.median, found.max) == pytest.approx((0.4, 0.5, 0.5))


@pytest.mark.parametrize(("kv", "position_bytes"), [("f16", 2), ("f32", 4)])
def test_tokens_before_those_that_are_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, position_bytes: int
) -> None:
    """Their keys and values are in every block that is read, and counted."""
    fed: list[tuple[int, int]] = []
    filled: set[int] = set()
    bound: set[int] = set()
    step, bind = native.Context.step, native.Context.bind
    copy = native.Context.copy_block

    def watched_step(self: native.Context, rows: list[native.Row]) -> native.StepResult:
        fed.extend((row.sequence, row.position) for row in rows)
        return step(self, rows)

    def watched_bind(self: native.Context, sequence: int, blocks: range) -> None:
        bound.update(blocks)
        bind(self, sequence, blocks)

    def watched_copy(self: native.Context, source: int, target: int) -> None:
        filled.add(target)
        copy(self, source, target)

    monkeypatch.setattr(native.Context, "step", watched_step)
    monkeypatch.setattr(native.Context, "bind", watched_bind)
    monkeypatch.setattr(native.Context, "copy_block", watched_copy)
    result = bench.run(config(path, kv=kv), prompt=20, gen=3, batch=(2,), depth=100, runs=1)
    prefill = [(0, position) for position in range(100, 120)]
    two = [(sequence, position) for position in range(100, 103) for sequence in range(2)]
    assert fed[-29:] == [*prefill, *((0, position) for position in range(100, 103)), *two]
    assert [position for _, position in fed[4:-29]] == list(range(32))
    assert bound == filled | {0}
    layers = native.Model(str(path)).layers
    values = sum(2 * layer.n_kv_heads * layer.head_dim for layer in layers)
    assert result.to_json()["kv_bytes_per_token"] == 100 * values * position_bytes


def test_the_default_prompt_fits_a_short_context() -> None:
    """The bundled model's is 256."""
    for depth, prompt in ((0, 256), (200, 56)):
        result = bench.run(config(hub.BUNDLED_FILE), gen=1, batch=(), depth=depth, runs=1)
        assert result.prompt == prompt


def test_the_smallest_run(path: Path) -> None:
    assert bench.run(config(path), prompt=1, gen=1, batch=(), runs=1).decode.min > 0


def test_the_debugging_precision(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def noting(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            opened.append(options)
            return make(*args, **options)

        return made

    monkeypatch.setattr(budget, "Model", noting(native.Model))
    monkeypatch.setattr(bare, "Context", noting(native.Context))
    bench.run(config(path, precision="f32", kv="q8"), prompt=4, gen=2, batch=(), runs=1)
    _header, model, context = opened
    assert (model["as_f32"], context["kv_type"]) == (True, "f32")


@pytest.mark.parametrize(
    ("layers", "settings", "advice"),
    [
        ([{}], {}, "leave layers"),
        ([{}, dict(EXPERTS)], {"expert_cache": "70%", "expert_reads": 1}, "lower expert_cache"),
    ],
    ids=["dense", "experts"],
)
def test_what_memory_does_not_hold_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: list[dict[str, Any]],
    settings: dict[str, Any],
    advice: str,
) -> None:
    """To the byte, and before the weights are read."""
    asked = config(RandomModel(layers).write(tmp_path / "m.cflow", "q8_0"), **settings)

    def run(available: int) -> None:
        memory = Memory(total=1 << 40, available=available, limited_by="test")
        monkeypatch.setattr(machine, "memory", lambda: memory)
        bench.run(asked, prompt=4, gen=2, batch=(), runs=1)

    def refused(available: int) -> int:
        with pytest.raises(
            EngineError, match=rf"{available:,} are available \(test\); {advice}"
        ) as e:
            run(available)
        found = re.search(r" need ([\d,]+), ", str(e.value))
        assert found is not None
        return int(found[1].replace(",", ""))

    need = refused(1 << 20)
    assert refused(need - 1) == need
    run(need)


def test_experts_from_disk_are_accounted_for(path: Path) -> None:
    """1 layer of 6 experts, 2 a token, of which 3 fit: every want is a hit or a miss, every miss a
    record read."""
    cached = config(path, expert_cache="50%", expert_reads=2)
    result = bench.run(cached, prompt=40, gen=5, batch=(1, 2), runs=3)
    report = result.to_json()
    assert (report["expert_slots"], report["expert_records"]) == (3, 6)
    assert report["expert_hits"] + report["expert_misses"] == 3 * 5 * 2
    record_bytes = ExpertBank.of(native.Model(str(path), header_only=True)).record_bytes
    assert report["disk_bytes"] == report["expert_misses"] * record_bytes
    assert report["disk_probe_gb_s"] > 0
    per_token = report["disk_bytes"] / (3 * 5)
    floor = report["disk_probe_gb_s"] * 1e9 / per_token
    assert report["disk_floor_tok_s"] == pytest.approx(floor)
    assert report["prefill_expert_hits"] + report["prefill_expert_misses"] == 3 * 6
    assert report["prefill_expert_misses"] >= 3  # more experts than fit are wanted
    assert "disk_bytes" not in bench.run(config(path), prompt=1, gen=1, batch=(), runs=1).to_json()


def test_the_disk_is_measured_between_the_runs_that_it_is_compared_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster by 1 GB/s each time: 1, 2, 3 beside prefill, 4, 5, 6 beside decode, no more for batches."""
    rates = count(1)
    monkeypatch.setattr(bench, "probe_disk", lambda *_: 1e9 * next(rates))
    cached = config(path, expert_cache="50%", expert_reads=2)
    report = bench.run(cached, prompt=40, gen=5, batch=(1, 2), runs=2).to_json()
    assert (report["prefill_disk_probe_gb_s"], report["disk_probe_gb_s"]) == (2, 5)
    floor = 2e9 * 2 * 40 / report["prefill_disk_bytes"]
    assert report["prefill_disk_floor_tok_s"] == pytest.approx(floor)
    assert next(rates) == 7


@pytest.mark.parametrize(
    ("use", "want"),
    [
        (TierUse(tokens=10, hits=5, misses=15, reads=15, disk_bytes=60_000, stall_s=0), 1e6 / 6),
        (TierUse(tokens=10, hits=5, misses=15, reads=20, disk_bytes=80_000, stall_s=0), 1e6 / 6),
        (TierUse(tokens=10, hits=5, misses=15, reads=5, disk_bytes=20_000, stall_s=0), 1e6 / 6),
        (TierUse(tokens=10, hits=20, misses=0, reads=5, disk_bytes=20_000, stall_s=0), None),
        (TierUse(tokens=10, hits=18, misses=2, reads=0, disk_bytes=0, stall_s=0), None),
    ],
    ids=["misses", "wrong_guesses", "some_read_before", "no_misses", "all_read_before"],
)
def test_the_floor_of_the_disk(use: TierUse, want: float | None) -> None:
    """Records of 4,000 bytes; 1 GB/s."""
    assert use.floor_tok_s(1.0) == (None if want is None else pytest.approx(want))


@pytest.mark.parametrize("share", [25, 50])
def test_a_random_model_hits_as_much_as_its_cache_holds(share: int, tmp_path: Path) -> None:
    """The worst case, every expert as likely as any other: a cache of a quarter hits a quarter."""
    path = synth_model(
        tmp_path / "small.cflow", "qwen3moe", n_layers=16, d_model=128, heads=(4, 2, 32),
        n_experts=32, top_k=4, d_expert=32, renormalise=True,
    )  # fmt: skip
    cached = config(path, expert_cache=f"{share}%")
    report = bench.run(cached, prompt=64, gen=150, batch=(), runs=2).to_json()
    wanted = report["expert_hits"] + report["expert_misses"]
    assert wanted == 16 * 4 * 150 * 2
    assert report["expert_hits"] / wanted == pytest.approx(share / 100, abs=0.06)


def test_no_run_finds_what_the_one_before_it_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[list[int]] = []
    step = native.Context.step

    def watched(self: native.Context, rows: list[native.Row]) -> native.StepResult:
        fed.append([row.token for row in rows])
        return step(self, rows)

    monkeypatch.setattr(native.Context, "step", watched)

    def tokens() -> list[list[int]]:
        fed.clear()
        bench.run(config(path), prompt=40, gen=40, batch=(), runs=2)
        decoded = [token for rows in fed if len(rows) == 1 for token in rows]
        assert len(decoded) == bench.WARM_UP_STEPS + 80
        return [*(rows for rows in fed if len(rows) > 1), decoded[-80:-40], decoded[-40:]]

    first = tokens()
    assert len({tuple(run) for run in first}) == 4
    assert tokens() == first


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"prompt": 1025}, "prompt 1025: this model takes 1 to 1024 tokens"),
        ({"gen": 0}, "gen 0"),
        ({"batch": (1, 0)}, "batch 0"),
        ({"runs": 0}, "runs 0"),
        ({"depth": -1}, "depth -1: this model takes 0 to 1023"),
        ({"depth": 1024}, "depth 1024"),
        ({"depth": 1000, "gen": 25}, "gen 25: this model takes 1 to 24 tokens behind 1000"),
    ],
)
def test_sizes_out_of_range_are_named(path: Path, sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(CflowError, match=text):
        bench.run(config(path), **({"prompt": 4, "gen": 4} | sizes))
