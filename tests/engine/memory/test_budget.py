"""What of the memory goes to weights, KV and experts, before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.reports import silent
from cflow.engine.measure import plan
from cflow.engine.measure.bare import open_bare
from cflow.engine.memory.budget import Budget, Share
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.memory.kv_blocks import BLOCK
from cflow.engine.memory.layer_memory import weight_bytes
from cflow.engine.native import Model, context_memory
from cflow.engine.worker.loading import load
from makefiles.shape_file import synth_model
from oracles.random_model import RandomModel

MIB = 1 << 20
SMALL = {"max_sequences": 1, "max_step_tokens": 1, "context": 32}
Shared = Callable[..., Share]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 experts of 76 kB or so in f32."""
    layer = {"n_experts": 32, "top_k": 2, "d_expert": 96}
    file = tmp_path_factory.mktemp("budget") / "m.cflow"
    return RandomModel([layer, layer]).write(file)


@pytest.fixture
def shared(path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """The share of a server on a machine with this much memory available."""

    def share(available: int, **settings: Any) -> Share:
        memory = machine.Memory(total=1 << 40, available=available, limited_by="test")
        monkeypatch.setattr(machine, "memory", lambda: memory)
        settings = {"threads": 1} | SMALL | settings
        return Budget(EngineConfig(model=str(path), **settings)).share()

    return share


def others(path: Path, share: Share) -> int:
    """Bytes of everything but experts."""
    model = Model(str(path), header_only=True)
    options: dict[str, Any] = {"threads": 1, "max_rows": 1, "max_sequences": 1}
    kv_and_scratch = context_memory(
        model,
        max_context=share.context["max_context"],
        n_kv_blocks=share.context["n_kv_blocks"],
        **options,
    )
    return path.stat().st_size - ExpertBank.of(model).n_bytes + sum(kv_and_scratch)


def test_experts_stay_in_memory_as_long_as_they_fit_beside_the_rest(
    shared: Shared, path: Path
) -> None:
    plenty = shared(1 << 30)
    assert plenty.expert_cache == 0
    bank = ExpertBank.of(Model(str(path), header_only=True)).n_bytes
    fits = (others(path, plenty) + bank) * 16 // 15 + 16
    assert shared(fits).expert_cache == 0
    less = shared(fits - 32)
    assert 0 < less.expert_cache < bank
    assert less.expert_cache == (fits - 32) - (fits - 32) // 16 - others(path, less)


def test_with_little_memory_the_smallest_cache_or_an_error_with_numbers(
    shared: Shared, path: Path
) -> None:
    record = ExpertBank.of(Model(str(path), header_only=True)).record_bytes
    rest = others(path, shared(1 << 30))
    smallest = shared((rest + 3 * record) * 16 // 15 + 16, expert_reads=2)
    assert smallest.expert_cache // record == 3
    with pytest.raises(EngineError, match=rf"bytes are left for experts.* {3 * record:,} are"):
        shared((rest + 2 * record) * 16 // 15, expert_reads=2)
    with pytest.raises(EngineError, match=r"the weights need [\d,]+ bytes, 4,096 are available"):
        shared(4096)


def test_kv_memory_that_does_not_fit_beside_the_weights_is_refused(
    shared: Shared, path: Path
) -> None:
    weights = path.stat().st_size
    need = shared(1 << 30, kv_memory=64 * MIB, context=None)
    assert need.context["n_kv_blocks"]
    with pytest.raises(EngineError, match=r"need [\d,]+, [\d,]+ are available \(test\)") as caught:
        shared(weights + 32 * MIB, kv_memory=64 * MIB, expert_cache="100%")
    assert caught.value.code == "out_of_memory"
    assert "lower expert_cache, kv_memory" in str(caught.value)


def test_buffers_are_those_of_the_threads_that_there_will_be(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = machine.Cores(threads=32, reason="", physical=32, nodes=1, quota=None)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    caches = [shared(5 * MIB, threads=threads).expert_cache for threads in (1, 32, None)]
    assert caches[0] > caches[1] == caches[2] > 0


def test_a_cache_larger_than_memory_is_what_to_lower(shared: Shared, path: Path) -> None:
    weights = path.stat().st_size
    with pytest.raises(EngineError, match=r"are available \(test\); lower expert_cache, or"):
        shared(weights - MIB, expert_cache="100%")
    with pytest.raises(EngineError, match=r"are available \(test\); leave layers on disk"):
        shared(4096)


def test_a_cache_that_was_asked_for_is_not_questioned(shared: Shared, path: Path) -> None:
    bank = ExpertBank.of(Model(str(path), header_only=True))
    assert shared(1 << 30, expert_cache="25%").expert_cache == bank.n_bytes // 4
    assert shared(1 << 30, expert_cache="100%").expert_cache == 0


def test_dequantised_experts_count_in_full(shared: Shared, path: Path) -> None:
    """With f32 none may stay on disk, so nothing less than all weights will do."""
    weights = weight_bytes(Model(str(path), header_only=True), as_f32=True)
    assert shared(weights + MIB, precision="f32").expert_cache == 0
    with pytest.raises(EngineError, match=rf"the weights need {weights:,} bytes"):
        shared(weights - 1, precision="f32")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert_cache": "50%", "expert_reads": 2, "kv": "q8", "context": 100},
        {"weights_memory": "45%", "expert_reads": 2, "kv_memory": 4 * MIB},
        {"defer_experts": 1, "max_sequences": 3, "speculation": "off"},
    ],
    ids=["defaults", "half of the experts", "some of the layers", "deferred"],
)
def test_server_plan_and_bench_share_memory_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """On a machine that does not hold all experts."""
    path = synth_model(
        tmp_path / "m.cflow", "qwen3moe", n_layers=12, d_model=512, heads=(12, 12, 64),
        vocab_size=300, n_experts=8, top_k=2, d_expert=256,
    )  # fmt: skip
    config = EngineConfig(model=str(path), threads=2, max_step_tokens=64, **settings)
    bank = ExpertBank.of(Model(str(path), header_only=True))
    memory = machine.Memory(1 << 40, path.stat().st_size, "test")
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    monkeypatch.setattr(plan, "probe_disk", lambda *_: 1e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    planned = plan.run(config)
    assert planned.problem is None
    ready = load(config, Model(str(path), header_only=True).digest, silent).ready
    opened = open_bare(
        config,
        silent,
        max_rows=config.max_step_tokens,
        max_sequences=config.max_logits,
        max_context=planned.context,
        n_kv_blocks=planned.kv_positions // BLOCK,
    )
    tier, layers = opened.model.tier, opened.model.layer_records
    assert ready.max_context == planned.context
    assert ready.n_kv_blocks * BLOCK == planned.kv_positions
    assert ready.kv_bytes == opened.kv_bytes == planned.kv_positions * planned.kv_bytes_per_token
    assert tier is not None
    n_slots = planned.expert_cache_bytes // bank.record_bytes
    assert ready.n_expert_slots == tier.n_slots == n_slots < bank.n_records
    kept = (ready.n_layers_kept, ready.n_layer_slots)
    assert kept == (planned.layers_kept, planned.layers_kept + planned.layers_at_once)
    assert kept == ((layers.n_kept, layers.n_slots) if layers else (0, 0))
    assert (kept != (0, 0)) == ("weights_memory" in settings)
