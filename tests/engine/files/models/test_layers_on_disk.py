"""Layers that come from disk: the same bits for any architecture, order and number that stays."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cflow.engine.files.convert import convert
from cflow.engine.lab.arms import ARMS
from cflow.engine.lab.export import export
from cflow.engine.native import Context, ExpertOptions, LayerRecords, Model, NativeError, Row
from makefiles.shape_file import synth_model
from oracles import pipelines, running, tiny

DENSE = ("llama", "qwen2")
STOCK = ("olmoe", "mixtral", "qwen2moe", "qwen3moe")
DELAYED = ("arch2_4_combined", "arch4_async_experts", "arch5")
PROMPT = [(7 * i * i + 3 * i + 1) % 250 for i in range(40)]


class Case(NamedTuple):
    path: Path
    want: NDArray[np.float32]  # with all layers in memory
    records: LayerRecords


def records_of(path: Path, experts: ExpertOptions | None = None) -> LayerRecords:
    model = Model(str(path), header_only=True, weights_memory=1 << 50, experts=experts)
    assert model.layer_records is not None
    return model.layer_records


def run(context: Context) -> NDArray[np.float32]:
    """The prompt as one chunk, then token by token."""
    chunk = running.step(context, running.rows(PROMPT[:32]))
    tokens = [
        running.step(context, running.rows(PROMPT[i : i + 1], first=i))
        for i in range(32, len(PROMPT))
    ]
    return np.concatenate([chunk, *tokens])


def case_of(path: Path) -> Case:
    with running.opened(path, threads=1) as context:
        want = run(context)
    return Case(path, want, records_of(path))


@pytest.fixture(scope="module", params=[*DENSE, *STOCK, *DELAYED])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in ARMS:
        export(pipelines.build(ARMS[request.param]), folder, tiny.byte_tokenizer())
    else:
        tiny.save(tiny.build(request.param), folder)
    return folder


@pytest.mark.parametrize("suffix", ["cflow", "vflow"])
def test_architectures(source: Path, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    convert(str(source), path, quant="q4_0")
    case = case_of(path)
    is_routed = any(layer.n_experts for layer in Model(str(path), header_only=True).layers)
    for readers in (1, 3):
        experts: ExpertOptions = {"cache": 1 << 28 if is_routed else 0, "expert_reads": readers}
        records = records_of(path, experts)
        for slots in {records.n_least, records.n_records}:
            memory = slots * records.slot_bytes
            with running.opened(path, experts=experts, weights_memory=memory) as context:
                assert run(context).tobytes() == case.want.tobytes()


# ---- models of some size ----

EXPERTS = {"n_experts": 4, "top_k": 2, "d_expert": 256}
DELAYS = {
    "renormalise": True,
    "activation_on_up": True,
    "dense_source": "x_in_previous",
    "expert_anchor": "x_in",
    "expert_delay": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "delayed": ("arch2_4_combined", EXPERTS | DELAYS),
    "guessing": ("qwen2moe", EXPERTS),
}


def deep(path: Path, architecture: str, **more: Any) -> Path:
    """Twelve layers of some MiB, so that most come and go."""
    sizes: dict[str, Any] = {"n_layers": 12, "d_model": 512, "vocab_size": 300, "d_ff": 1536}
    return synth_model(path, architecture, heads=(8, 8, 64), **sizes, **more)


@pytest.fixture(
    scope="module", params=["plain.cflow", "delayed.cflow", "delayed.vflow", "guessing.cflow"]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("shape") / request.param
    architecture, more = KINDS[path.stem]
    return case_of(deep(path, architecture, **more))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_budgets(case: Case, more: int, threads: int) -> None:
    memory = (case.records.n_least + more) * case.records.slot_bytes
    with running.opened(case.path, weights_memory=memory, threads=threads) as context:
        assert run(context).tobytes() == case.want.tobytes()
        assert run(context).tobytes() == case.want.tobytes()


def test_chunks(case: Case) -> None:
    memory = case.records.n_least * case.records.slot_bytes
    with running.opened(case.path, weights_memory=memory) as context:
        assert running.logits(context, PROMPT, 7).tobytes() == case.want.tobytes()


def test_a_step_wants_each_layer_that_does_not_stay_once(case: Case) -> None:
    records = case.records
    memory = (records.n_least + 3) * records.slot_bytes
    model = Model(str(case.path), weights_memory=memory)
    found = model.layer_records
    assert found is not None
    assert (found.n_kept, found.n_slots) == (3, records.n_least + 3)
    assert records.n_records == 12
    assert 0 < found.step_bytes < records.bytes
    context = Context(model, threads=2, max_rows=64, max_sequences=1, max_context=64, n_kv_blocks=2)
    context.bind(0, range(2))
    for i in range(6):
        assert context.step([Row(0, 1, i)]).status == [0]
    tier = model.layer_tier
    assert tier is not None
    n_uses = records.n_records - found.n_kept  # a step; more are under way for the next one
    n_demands = tier.hits + tier.misses - found.n_kept
    assert n_demands == 6 * n_uses + records.n_least
    assert tier.extra_reads == 0


def test_a_matrix_altered_under_us_fails_the_step(tmp_path: Path) -> None:
    path = deep(tmp_path / "m.cflow", "llama")
    case = case_of(path)
    memory = case.records.n_least * case.records.slot_bytes
    with running.opened(path, weights_memory=memory) as context:
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(whole) // 2)
            file.write(bytes(100))
        for _ in range(2):
            assert context.step([Row(0, 1, 0)]).status != [0]
            assert "its checksum is wrong" in context.row_error(0)
        with path.open("r+b") as file:
            file.write(whole)
        assert run(context).tobytes() == case.want.tobytes()


def test_the_least_is_said(tmp_path: Path) -> None:
    path = deep(tmp_path / "m.cflow", "llama")
    records = records_of(path)
    least = records.n_least * records.slot_bytes
    with pytest.raises(NativeError, match=rf"it must hold {records.n_least}: {least} bytes"):
        Model(str(path), weights_memory=least - 1)
    with pytest.raises(NativeError, match="dequantised weights must all be in memory"):
        Model(str(path), weights_memory=least, as_f32=True)
