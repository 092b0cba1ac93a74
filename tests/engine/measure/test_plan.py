"""Plans of the pipeline-native shapes against values derived by hand: docs/delays.md."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.cgroup import CpuQuota
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.machine import Cores, Memory
from cflow.engine.files import shapes, synth
from cflow.engine.measure import plan
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Model
from oracles.random_model import EXPERTS, RandomModel

MIB_HALF_BYTE = 16 / 18 / (1 << 20)  # q4_0 stores 18 bytes for 32 weights, scale included
Open = Callable[..., Model]

SMALL: dict[str, float] = {
    "attention": 0.5,
    "dense": 1.5,
    "experts": 0.75,
}  # MiB a layer at half a byte a weight
LARGE: dict[str, float] = {"attention": 128, "dense": 384, "experts": 96}
OPS = {
    "attention": ("qkv", "o"),
    "dense": ("gate_up", "down"),
    "experts": ("expert_gate_up", "expert_down"),
}
# Streams of a layer; longest path through the graph, closed form.
SHAPES: dict[str, tuple[dict[str, float], float, float]] = {
    "sequential_d512": (SMALL, 12.00, 9.00),
    "parallel_d512": (SMALL, 9.00, 9.00),
    "arch2_4_combined_d512": (SMALL, 5.25, 4.50),
    "arch2_4_sync_d512": (SMALL, 5.25, 4.50),
    "arch4_async_experts_d512": (SMALL, 12.00, 9.00),
    "arch5_d512": (SMALL, 12.00, 9.00),
    "arch2_4_8k_4l": (LARGE, 896, 768),
    "arch2_4_8k_16l": (LARGE, 3200, 3072),
}


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A shape as a model without weights; n_layers: other than its own."""

    def open_shape(name: str, n_layers: int | None = None) -> Model:
        text = (shapes.SHAPES / f"{name}.toml").read_text()
        if n_layers is not None:
            text = re.sub(r"^n_layers = \d+$", f"n_layers = {n_layers}", text, flags=re.M)
        shape, header = tmp_path / f"{name}.toml", tmp_path / f"{name}.cflow"
        shape.write_text(text)
        synth.synth_header(str(shape), header)
        return Model(str(header), header_only=True)

    return open_shape


def planned(path: Path, **settings: Any) -> plan.Plan:
    return plan.run(EngineConfig(model=str(path), **settings))


def longest_path(model: Model) -> float:
    return model.plan.critical_path_bytes * MIB_HALF_BYTE


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_streams_what_the_paper_derives(name: str, opened: Open) -> None:
    streams, model = SHAPES[name][0], opened(name)
    bytes_of = {op.name: op.bytes for op in model.ops}
    for layer in range(model.header.n_layers):
        for part, ops in OPS.items():
            got = sum(bytes_of[f"L{layer}.{op}"] for op in ops) * MIB_HALF_BYTE
            assert got == pytest.approx(streams[part]), f"layer {layer}, {part}"


@pytest.mark.parametrize("name", SHAPES)
def test_critical_paths(name: str, opened: Open) -> None:
    _, path, closed_form = SHAPES[name]
    info = opened(name).plan
    assert info.critical_path_bytes * MIB_HALF_BYTE == pytest.approx(path)
    assert info.critical_path_closed_form_bytes * MIB_HALF_BYTE == pytest.approx(closed_form)


@pytest.mark.parametrize("name", ["arch2_4_combined_d512", "arch2_4_sync_d512"])
@pytest.mark.parametrize("n_layers", [1, 2, 3, 6, 7, 48])
def test_a_delayed_dense_ffn_costs_half_and_once_more(
    name: str, n_layers: int, opened: Open
) -> None:
    assert longest_path(opened(name, n_layers)) == pytest.approx(0.75 * (n_layers + 1))


@pytest.mark.parametrize(("n_layers", "want"), [(4, 192 * 4 + 128), (15, 192 * 16)])
def test_an_even_depth_ends_with_what_follows_the_last_delayed_ffn(
    n_layers: int, want: float, opened: Open
) -> None:
    """Attention here, 128 MiB: more than the 96 of the last experts."""
    assert longest_path(opened("arch2_4_8k_16l", n_layers)) == pytest.approx(want)


def test_delays_change_no_byte_of_a_token(opened: Open) -> None:
    """By hand: 16.5 MiB of layers and a head of 50,272 x 512 at 18 bytes for 32 weights, and six
    routers of 32 x 512 f32; row counts padded to 32."""
    want = (33 << 19) * 18 // 16 + 50272 * 512 * 18 // 32 + 6 * 32 * 512 * 4
    for name, (streams, _, _) in SHAPES.items():
        if streams is SMALL:
            assert opened(name).plan.bytes_per_token == want, name


def test_history_does_not_grow_with_depth(opened: Open) -> None:
    six, deep = (opened("arch2_4_combined_d512", n).plan.n_values for n in (6, 48))
    assert six == deep


def test_weights_used_three_times_are_stored_once(opened: Open) -> None:
    six, two = opened("sequential_d512").header, opened("arch5_d512").header
    assert (two.n_layers, two.n_blocks) == (6, 2)
    assert two.file_bytes < six.file_bytes


def test_plan_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    found = plan.run_shape(EngineConfig(model="arch2_4_combined_d512"))
    assert found.n_stages == found.n_barriers == len(found.stages) == 37  # six a layer, and one
    assert found.critical_path_bytes < found.layer_bytes < found.bytes_per_token
    together = next(stage.ops for stage in found.stages if "L2.qkv" in stage.ops)
    assert {"L2.select", "L3.gate_up"} < set(together)  # layer 3's dense FFN reads x_in[2]


def test_plan_of_more_experts_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 layers of 6 experts, 2 a token; the cache holds 4 of the 12, so a token misses 8 / 3 records."""
    path = RandomModel([{}, dict(EXPERTS), dict(EXPERTS)]).write(tmp_path / "m.cflow", "q8_0")
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    monkeypatch.setattr(plan, "probe_disk", lambda *_: 1e6)
    bank = ExpertBank.of(Model(str(path), header_only=True))
    everything = planned(path)
    assert (everything.expert_cache_bytes, everything.resident_bytes) == (
        bank.n_bytes,
        path.stat().st_size,
    )
    assert (everything.disk_bytes_per_token, everything.disk_gb_s) == (0, None)
    found = planned(path, expert_cache=4 * bank.record_bytes)
    assert found.expert_cache_bytes == 4 * bank.record_bytes
    assert found.resident_bytes == path.stat().st_size - 8 * bank.record_bytes
    missed_bytes = 8 / 3 * bank.record_bytes
    assert found.disk_bytes_per_token == pytest.approx(missed_bytes)
    assert found.predicted_decode_tok_s == pytest.approx(1e6 / missed_bytes)
    assert found.problem is None


def test_a_plan_is_of_the_settings_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RandomModel([{}, dict(EXPERTS)], context=1024).write(tmp_path / "m.cflow", "q8_0")
    asked: list[Any] = []

    def probed(value: Any, rate: float) -> float:
        asked.append(value)
        return rate

    monkeypatch.setattr(native, "probe_bandwidth", lambda _, n, *__: probed(n, 10e9))
    monkeypatch.setattr(plan, "probe_disk", lambda *args: probed(args[-1], 1e6))
    share = {"expert_cache": "50%", "expert_reads": 2}
    found = planned(path, threads=3, kv="f32", kv_memory=1 << 16, **share)
    assert asked == [2, 3]
    assert (found.threads, found.threads_reason) == (3, "as set")
    model = Model(str(path), header_only=True)
    position_bytes = sum(2 * 4 * layer.n_kv_heads * layer.head_dim for layer in model.layers)
    assert (found.kv, found.kv_bytes_per_token) == ("f32", position_bytes)
    assert found.kv_positions == (1 << 16) // position_bytes // 32 * 32
    assert 0 < found.kv_positions == found.context < 1024
    assert found.notes[0].startswith(f"context lowered from 1024 to {found.context}")
    half = planned(path, context=64, **share)
    assert (half.context, half.kv_positions, half.notes) == (64, 4 * 64, ())
    assert half.kv_bytes_per_token == position_bytes // 2


@pytest.mark.parametrize(("cpus", "threads", "share"), [(0.5, 1, 0.5), (3.5, 3, 1), (1.5, 2, 0.75)])
def test_threads_beyond_the_quota_run_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: float, threads: int, share: float
) -> None:
    path = RandomModel([{}]).write(tmp_path / "m.cflow", "q8_0")
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    quota = CpuQuota(cpus, "test")
    cores = Cores(threads=1, reason="", physical=4, nodes=1, quota=quota)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    found = planned(path, threads=threads)
    assert found.predicted_decode_tok_s == share * 10e9 / found.bytes_per_token


def test_a_limit_of_reads_is_the_speed_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow", "q8_0")
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    monkeypatch.setattr(plan, "probe_disk", lambda *_: 3e6)
    rates = [
        planned(path, expert_cache="90%", expert_read_rate=rate).disk_gb_s
        for rate in (None, 2_000_000, 4_000_000)
    ]
    assert rates == [0.003, 0.002, 0.003]


def test_budgets_that_no_server_takes_have_no_plan(tmp_path: Path) -> None:
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow", "q8_0")
    with pytest.raises(EngineError, match="expert_cache is 1 bytes, but at least"):
        planned(path, expert_cache=1)
    with pytest.raises(EngineError, match="weights_memory is 1 bytes, but at least"):
        planned(path, weights_memory=1)


def test_the_probe_of_memory_leaves_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow", "q8_0")
    probed: list[int] = []

    def probe(n_bytes: int, *_: object) -> float:
        probed.append(n_bytes)
        return 10e9

    monkeypatch.setattr(native, "probe_bandwidth", probe)
    for available in (700 << 20, 1 << 40):
        monkeypatch.setattr(machine, "memory", partial(Memory, 1 << 41, available, "test"))
        planned(path)
    assert probed[0] == 350 << 20
    assert probed[1] >= 1 << 30


def test_plan_of_what_does_not_fit_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow", "q8_0")
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    little = Memory(total=1 << 16, available=1 << 12, limited_by="test")
    monkeypatch.setattr(machine, "memory", lambda: little)
    problem = planned(path).problem
    assert problem is not None
    assert problem.startswith("the weights need ")
    assert " bytes, 4,096 are available" in problem
