"""What of the memory goes to weights, KV and experts, before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base import machine
from cflow.engine.base.cgroup import CpuQuota
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.experts import ExpertBank, weight_bytes
from cflow.engine.native import Model, context_memory
from cflow.engine.worker.loading import Share, _thread_notes, share_memory
from oracles.random_model import RandomModel

MIB = 1 << 20
SMALL = {"max_sequences": 1, "max_step_tokens": 1, "context": 32}
Shared = Callable[..., Share]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 experts of 76 kB or so in f32."""
    layer = {"n_experts": 32, "top_k": 2, "d_expert": 96}
    file = tmp_path_factory.mktemp("loading") / "m.cflow"
    return RandomModel([layer, layer]).write(file)


@pytest.fixture
def shared(path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """share_memory on a machine with so many bytes to give."""

    def share(available: int, **settings: Any) -> Share:
        memory = machine.Memory(total=1 << 40, available=available, limited_by="test")
        monkeypatch.setattr(machine, "memory", lambda: memory)
        settings = {"threads": 1} | SMALL | settings
        return share_memory(EngineConfig(model=str(path), **settings))

    return share


def others(path: Path, share: Share) -> int:
    """Bytes of everything but experts."""
    model = Model(str(path), header_only=True)
    options = {"threads": 1, "max_rows": 1, "max_sequences": 1}
    kv_and_scratch = context_memory(
        model,
        max_context=share.capacity.max_context,
        n_kv_blocks=share.capacity.n_kv_blocks,
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
    assert need.capacity.n_kv_blocks
    with pytest.raises(EngineError, match=r"need [\d,]+, [\d,]+ are available \(test\)") as caught:
        shared(weights + 32 * MIB, kv_memory=64 * MIB, expert_cache="100%")
    assert caught.value.code == "out_of_memory"
    assert "lower kv_memory" in str(caught.value)


def test_buffers_are_those_of_the_threads_that_there_will_be(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = machine.Cores(threads=32, reason="", physical=32, nodes=1, quota=None)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    caches = [shared(5 * MIB, threads=threads).expert_cache for threads in (1, 32, None)]
    assert caches[0] > caches[1] == caches[2] > 0


def test_threads_that_cannot_run_well_are_noted() -> None:
    def notes(threads: int, **fields: Any) -> list[str]:
        cores = machine.Cores(**{"threads": 1, "reason": "", "physical": 8, "nodes": 1} | fields)
        return _thread_notes(threads, cores)

    quota = CpuQuota(1.5, "the file")
    assert notes(8, quota=None) == notes(1, quota=quota) == []
    assert notes(1, quota=CpuQuota(0.5, "")) == []  # there have to be some
    [spread] = notes(8, nodes=2, quota=None)
    assert spread.startswith("2 memory nodes: bind")
    [stopped] = notes(2, quota=quota)
    assert "2 threads and a CPU quota of 1.5 (the file)" in stopped


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
