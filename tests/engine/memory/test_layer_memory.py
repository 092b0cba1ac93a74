"""How much of the memory layers get, before anything is loaded."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cflow.engine import native
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.measure import bench, plan
from cflow.engine.memory.experts import ExpertBank, asked_cache, expert_options
from cflow.engine.memory.layer_memory import FixedWeights, fix_weights, pieces
from cflow.engine.native import LayerRecords, Model
from makefiles.shape_file import synth_model
from oracles.model_file import ModelFile

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    sizes: dict[str, Any] = {"n_layers": 16, "d_model": 512, "vocab_size": 300, "d_ff": 1536}
    return synth_model(folder / "m.cflow", "llama", heads=(8, 8, 64), **sizes)


@pytest.fixture(scope="module")
def records(path: Path) -> LayerRecords:
    """As a server's defaults have them."""
    experts = expert_options(EngineConfig(model=str(path)), 0)
    model = Model(str(path), header_only=True, weights_memory=1 << 50, experts=experts)
    found = model.layer_records
    assert found is not None
    return found


def fixed(path: Path, **settings: Any) -> tuple[FixedWeights, int]:
    """And what a step then reads."""
    config = EngineConfig(model=str(path), **settings)
    model = Model(str(path), header_only=True)
    bank = ExpertBank.of(model)
    weights = fix_weights(config, model, bank)
    return weights, weights.layers.step_bytes if weights.layers else 0


def test_without_a_word_all_layers_stay(path: Path, records: LayerRecords) -> None:
    everything = (FixedWeights(path.stat().st_size), 0)
    assert fixed(path) == everything
    assert fixed(path, weights_memory="100%") == everything
    assert fixed(path, weights_memory=records.n_records * records.slot_bytes) == everything


def test_places_that_take_more_than_all_layers_are_not_made(
    path: Path, records: LayerRecords
) -> None:
    """They are of whole MiB, layers are not: ten of sixteen would take more than all layers."""
    layers = 16 * (4 * 512 * 512 + 3 * 512 * 1536) // 32 * 18
    assert 9 * records.slot_bytes < layers < 10 * records.slot_bytes
    everything = fixed(path)
    assert fixed(path, weights_memory=10 * records.slot_bytes) == everything
    some, n_read = fixed(path, weights_memory=9 * records.slot_bytes)
    assert some.n_bytes < everything[0].n_bytes
    assert n_read > 0


def test_a_budget_is_what_layers_take_beside_embedding_head_and_vectors(
    path: Path, records: LayerRecords
) -> None:
    """q4_0: 18 bytes for 32 weights. 300 rows are padded to 320. Two norms a layer, and the last."""
    apart = 2 * 320 * 512 * 18 // 32 + 33 * 512 * 4
    weights, n_read = fixed(path, weights_memory="50%")
    assert weights.budget == records.n_records * records.slot_bytes // 2
    assert weights.n_bytes == apart + 8 * records.slot_bytes
    kept = 8 - records.n_least
    assert 0 < n_read <= (16 - kept) * records.slot_bytes
    assert weights.layers is not None
    assert (weights.layers.n_kept, weights.layers.n_slots) == (kept, 8)
    experts = expert_options(EngineConfig(model=str(path)), 0)
    loaded = Model(str(path), weights_memory=weights.budget, experts=experts)
    assert loaded.layer_records is not None
    assert loaded.layer_records.step_bytes == n_read
    assert loaded.memory.resident_bytes <= weights.n_bytes + 3 * MIB + 2 * 2 * MIB  # whole runs


def test_a_share_is_not_rounded_below_itself() -> None:
    """0.29 x 100 is 28.999999999999996."""
    bank = ExpertBank(offsets=tuple(range(100)), record_bytes=4096, n_bytes=100 * 4096)
    assert asked_cache("29%", bank) == 29 * 4096


def test_pieces_to_measure_the_disk_with_are_of_the_bank_of_the_layers(
    path: Path, records: LayerRecords
) -> None:
    start, n_bytes = ModelFile(path).sections[7]
    bank = pieces(Model(str(path), header_only=True), records.slot_bytes)
    assert bank.offsets[0] == start
    assert all(b - a == records.slot_bytes for a, b in pairwise(bank.offsets))
    left = start + n_bytes - bank.offsets[-1] - bank.record_bytes
    assert -4096 < left < records.slot_bytes
    assert bank.n_bytes == len(bank.offsets) * records.slot_bytes


def test_too_little_is_an_error_with_the_numbers(path: Path, records: LayerRecords) -> None:
    least = records.n_least * records.slot_bytes
    with pytest.raises(EngineError, match=rf"weights_memory is .* at least {least:,} are needed"):
        fixed(path, weights_memory=least - 1)
    with pytest.raises(EngineError, match="f32 keeps all in memory"):
        fixed(path, weights_memory=least, precision="f32")
    with pytest.raises(EngineError, match=r"one layer of .* bytes takes"):
        fixed(path, weights_memory=least, expert_read_rate=MIB, stuck_s=2.0)


def test_a_plan_reckons_with_the_disk(
    path: Path, records: LayerRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 10e9)
    monkeypatch.setattr(plan, "probe_disk", lambda *_: 1e6)
    found = plan.run(EngineConfig(model=str(path), weights_memory="50%"))
    weights, n_read = fixed(path, weights_memory="50%")
    assert (found.resident_bytes, found.layer_memory_bytes) == (weights.n_bytes, weights.budget)
    assert found.layer_disk_bytes == found.disk_bytes_per_token == n_read
    assert (found.layers_kept, found.layers_at_once) == (8 - records.n_least, records.n_least)
    assert found.predicted_decode_tok_s == pytest.approx(1e6 / n_read)
    with pytest.raises(EngineError, match=r"weights_memory is .* at least"):
        plan.run(EngineConfig(model=str(path), weights_memory=records.slot_bytes))


def test_a_bench_counts_what_it_reads(path: Path, records: LayerRecords) -> None:
    """Each token wants each layer that does not stay once."""
    config = EngineConfig(model=str(path), threads=2, weights_memory="50%")
    report = bench.run(config, prompt=20, gen=5, batch=(1,), runs=2).to_json()
    kept = 8 - records.n_least
    assert (report["layer_records"], report["layers_kept"]) == (16, kept)
    assert report["layer_reads"] == 2 * 5 * (16 - kept)
    assert report["layer_disk_bytes"] > 0
    missed = report["layer_reads"] * records.bytes / records.n_records / 10  # a token, on average
    floor = report["layer_disk_probe_gb_s"] * 1e9 / missed
    assert report["layer_disk_floor_tok_s"] == pytest.approx(floor, rel=0.2)
    everything = bench.run(EngineConfig(model=str(path)), prompt=1, gen=1, batch=(), runs=1)
    assert not any("layer" in name for name in everything.to_json())
