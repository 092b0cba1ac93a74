"""Experts that come from disk: the same bits for any cache, and no logits from wrong bytes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cflow.engine.base.limits import EXPERT_READS
from cflow.engine.base.native_types import RowUsage
from cflow.engine.files.convert import convert
from cflow.engine.lab.arms import ARMS
from cflow.engine.lab.export import export
from cflow.engine.native import Context, ExpertOptions, Model, NativeError, Row, const
from oracles import pipelines, running, tiny
from oracles.model_file import ModelFile

Logits = NDArray[np.float32]

STOCK = ("olmoe", "mixtral", "qwen2moe", "qwen3moe")
DELAYED = ("arch2_4_combined", "arch4_async_experts", "arch5")
PROMPT = [(7 * i * i + 3 * i + 1) % 250 for i in range(70)]
N_DECODED = 16  # of the prompt, one by one


class Case(NamedTuple):
    path: Path
    want: Logits  # with all experts in memory
    n_records: int
    slot_bytes: int


def build(name: str, folder: Path) -> Path:
    source, path = folder / "hf", folder / "model.cflow"
    if name in ARMS:
        export(pipelines.build(ARMS[name]), source, tiny.byte_tokenizer())
    else:
        tiny.save(tiny.build(name), source)
    convert(str(source), path, quant="q4_0")
    return path


def run(context: Context) -> Logits:
    """The prompt as one chunk, then token by token."""
    n_prompt = len(PROMPT) - N_DECODED
    chunk = running.step(context, running.rows(PROMPT[:n_prompt]))
    tokens = [
        running.step(context, running.rows(PROMPT[i : i + 1], first=i))
        for i in range(n_prompt, len(PROMPT))
    ]
    return np.concatenate([chunk, *tokens])


@pytest.fixture(scope="module", params=[*STOCK, *DELAYED])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = build(request.param, tmp_path_factory.mktemp(request.param))
    with running.opened(path, threads=1) as context:
        want = run(context)
    return case_of(path, want)


@pytest.fixture
def olmoe(tmp_path: Path) -> Case:
    """A file of its own, to be spoilt."""
    path = build("olmoe", tmp_path)
    with running.opened(path) as context:
        want = run(context)
    return case_of(path, want)


def case_of(path: Path, want: Logits) -> Case:
    tier = Model(str(path), experts={"cache": 1 << 30}).tier
    assert tier is not None
    return Case(path, want, tier.n_records, tier.slot_bytes)


def cache_of(case: Case, share: float, readers: int = EXPERT_READS) -> int:
    """Bytes of that share of the records; 0: the least that is legal."""
    return max(int(share * case.n_records), readers + 1) * case.slot_bytes


@pytest.fixture
def model(olmoe: Case) -> Iterator[Model]:
    model = Model(str(olmoe.path), experts={"cache": cache_of(olmoe, 0)})
    yield model
    model.close()


# ---- the same bits ----


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("io", ["direct", "cached"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.0])
def test_budgets_and_io(case: Case, share: float, io: str, speculate: bool) -> None:
    experts: ExpertOptions = {
        "cache": cache_of(case, share),
        "io": io,
        "speculate": speculate,
    }
    with running.opened(case.path, experts=experts) as context:
        assert run(context).tobytes() == case.want.tobytes()
        assert run(context).tobytes() == case.want.tobytes()  # with a cache that is warm


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(case: Case, threads: int, readers: int) -> None:
    experts: ExpertOptions = {"cache": cache_of(case, 0, readers), "expert_reads": readers}
    with running.opened(case.path, threads=threads, experts=experts) as context:
        assert run(context).tobytes() == case.want.tobytes()


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks(case: Case, chunk: int) -> None:
    with running.opened(case.path, experts={"cache": cache_of(case, 0.1)}) as context:
        assert running.logits(context, PROMPT, chunk).tobytes() == case.want.tobytes()


@pytest.mark.parametrize("window", ["layer", "none"])
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_windows(case: Case, share: float, window: str) -> None:
    model = Model(
        str(case.path),
        experts={"cache": cache_of(case, share), "window": window, "speculate": False},
    )
    context = open_context(model)
    assert run(context).tobytes() == case.want.tobytes()
    tier = model.tier
    assert tier is not None
    assert tier.reads == tier.misses + tier.extra_reads
    usage = context.step(running.rows(PROMPT)[:64]).usage
    assert sum(row.expert_misses for row in usage) > 0


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("name", ["qwen2moe", "olmoe"])
def test_deferred_experts(name: str, share: float, tmp_path: Path) -> None:
    path = build(name, tmp_path)
    with running.opened(path, defer_experts=1, threads=1) as context:
        want = run(context)
    case = case_of(path, want)
    experts: ExpertOptions = {"cache": cache_of(case, share)}
    for threads in (1, 2, 5):
        with running.opened(path, defer_experts=1, experts=experts, threads=threads) as context:
            assert run(context).tobytes() == want.tobytes()


# ---- speculation ----


def test_stock_models_speculate_on_the_next_layers_experts(case: Case) -> None:
    """An op of speculation is in the stage of the selection before it; delayed experts need none."""
    experts: ExpertOptions = {"cache": cache_of(case, 0.5)}
    model = Model(str(case.path), experts=experts)
    stages = {op.name: op.stage for op in model.ops}
    routed = [i for i, layer in enumerate(model.layers) if layer.n_experts]
    speculated = [i for i in routed if f"L{i}.speculate" in stages]
    is_delayed = any(layer.expert_delay for layer in model.layers)
    assert speculated == ([] if is_delayed else [i for i in routed if i - 1 in routed])
    for i in speculated:
        assert stages[f"L{i}.speculate"] == stages[f"L{i - 1}.select"]
    plain = Model(str(case.path), experts={**experts, "speculate": False})
    assert not any("speculate" in op.name for op in plain.ops)
    assert plain.plan == Model(str(case.path)).plan


def test_every_speculation_is_useful_late_wasted_or_still_there(case: Case) -> None:
    model = Model(str(case.path), experts={"cache": cache_of(case, 0.5)})
    run(open_context(model))
    tier = model.tier
    assert tier is not None
    pending = tier.speculated - tier.useful - tier.late - tier.wasted
    assert 0 <= pending <= tier.n_slots
    assert (tier.speculated > 0) == any("speculate" in op.name for op in model.ops)
    if tier.speculated:
        assert tier.useful + tier.late > tier.wasted


# ---- accounts ----


def test_usage_of_a_step_adds_up_to_the_counters(case: Case) -> None:
    """Every miss is a padded record, charged to one row."""
    model = Model(str(case.path), experts={"cache": cache_of(case, 0.25)})
    context = open_context(model)
    usage: list[RowUsage] = []
    for i in range(0, len(PROMPT), 10):
        usage += context.step(running.rows(PROMPT[i : i + 10], first=i)).usage
    tier = model.tier
    assert tier is not None
    assert len(usage) == len(PROMPT)
    assert sum(row.expert_hits for row in usage) == tier.hits
    assert sum(row.expert_misses for row in usage) == tier.misses > 0
    assert sum(row.disk_bytes for row in usage) == tier.misses * case.slot_bytes
    assert tier.disk_bytes == tier.reads * case.slot_bytes
    assert sum(tier.latencies) == tier.reads
    assert int(model.expert_uses.sum()) == tier.hits + tier.misses


def test_a_warm_start_reads_what_was_used_most(olmoe: Case) -> None:
    with running.opened(olmoe.path, experts={"cache": cache_of(olmoe, 1)}) as context:
        run(context)
    uses = np.arange(olmoe.n_records, dtype=np.uint64)
    model = Model(str(olmoe.path), experts={"cache": cache_of(olmoe, 0.5)})
    reports: list[tuple[int, int]] = []
    model.warm(uses, lambda done, total: reports.append((done, total)))
    tier = model.tier
    assert tier is not None
    assert tier.n_resident == tier.n_slots
    assert tier.warm_bytes == tier.n_slots * olmoe.slot_bytes
    assert reports[-1] == (tier.warm_bytes, tier.warm_bytes)
    np.testing.assert_array_equal(model.expert_uses, uses)


def test_without_a_cache_there_is_nothing_to_tell(olmoe: Case) -> None:
    model = Model(str(olmoe.path))
    assert model.tier is None
    assert not model.expert_uses.any()
    assert open_context(model).step(running.rows(PROMPT[:3])).usage == []
    model.warm(model.expert_uses)


def test_memory_is_what_stays_and_the_slots(olmoe: Case) -> None:
    whole = Model(str(olmoe.path)).memory.resident_bytes
    cache = 64 << 20
    bank = Model(str(olmoe.path), experts={"cache": cache}).memory
    huge_page = 2 << 20
    slots = olmoe.n_records * olmoe.slot_bytes  # all of them: fewer than fit
    assert bank.resident_bytes <= whole + huge_page
    assert bank.resident_bytes >= slots
    assert bank.huge_bytes <= bank.resident_bytes


# ---- faults ----


def open_context(model: Model) -> Context:
    context = Context(
        model, threads=2, max_rows=64, max_sequences=64, max_context=128, n_kv_blocks=64,
        keep_values=True,
    )  # fmt: skip
    for sequence in range(16):
        context.bind(sequence, range(4 * sequence, 4 * sequence + 4))
    return context


def strangers() -> list[Row]:
    """Sixteen sequences of one token each."""
    return [Row(i, PROMPT[i], 0, const.CFLOW_ROW_LOGITS) for i in range(16)]


def chosen(context: Context, layer: int) -> list[set[int]]:
    return [set(map(int, context.value(f"L{layer}.routed", row))) for row in range(16)]


def spoil(path: Path, offset: int) -> None:
    """Inverts a byte there."""
    with path.open("r+b") as file:
        file.seek(offset)
        (was,) = file.read(1)
        file.seek(offset)
        file.write(bytes([was ^ 0xFF]))


@pytest.fixture
def clean(olmoe: Case) -> tuple[list[Logits], list[set[int]]]:
    """Logits of the strangers, and whom they choose in layer 1."""
    context = open_context(Model(str(olmoe.path)))
    context.step(strangers())
    return [context.logits(row) for row in range(16)], chosen(context, 1)


def test_bytes_altered_under_us_fail_who_needs_them(
    olmoe: Case, model: Model, clean: tuple[list[Logits], list[set[int]]]
) -> None:
    want, routed = clean
    context = open_context(model)
    expert = next(iter(routed[0]))
    at = ModelFile(olmoe.path).record_offset(1, expert) + 100
    spoil(olmoe.path, at)
    status = context.step(strangers()).status
    for row in range(16):
        needs_it = expert in routed[row]
        assert status[row] == (const.Status.EFORMAT if needs_it else const.Status.OK)
        if needs_it:
            assert f"layer 1, expert {expert}: its checksum is wrong" in context.row_error(row)
            with pytest.raises(NativeError, match="kept no logits"):
                context.logits(row)
        else:
            assert context.row_error(row) == ""
            assert context.logits(row).tobytes() == want[row].tobytes()
    tier = model.tier
    assert tier is not None
    assert tier.failed_altered == 1
    spoil(olmoe.path, at)
    assert run(context).tobytes() == olmoe.want.tobytes()


def test_a_file_cut_under_us_fails_who_needs_the_rest(olmoe: Case, model: Model) -> None:
    context = open_context(model)
    whole = olmoe.path.read_bytes()
    os.truncate(olmoe.path, ModelFile(olmoe.path).record_offset(1, 0))
    status = context.step(strangers()).status
    assert status == [const.Status.EFORMAT] * 16
    assert "layer 1, expert" in context.row_error(0)
    assert "the file ends inside it" in context.row_error(0)
    with olmoe.path.open("r+b") as file:
        file.write(whole)
    assert run(context).tobytes() == olmoe.want.tobytes()


def test_a_file_replaced_or_removed_goes_on(olmoe: Case, model: Model) -> None:
    context = open_context(model)
    other = olmoe.path.with_name("other")
    other.write_bytes(bytes(olmoe.path.stat().st_size))
    other.replace(olmoe.path)
    assert run(context).tobytes() == olmoe.want.tobytes()
    olmoe.path.unlink()
    assert run(context).tobytes() == olmoe.want.tobytes()


@pytest.mark.parametrize(
    ("experts", "options", "text"),
    [
        ({"cache": 1}, {}, "an expert cache of 1 bytes holds 0 records"),
        ({"cache": 1 << 30}, {"as_f32": True}, "dequantised experts must all be in memory"),
        ({"cache": 1 << 30, "timeout_s": 0.0}, {}, "times out after 0 s"),
    ],
)
def test_what_cannot_work_is_refused(
    olmoe: Case, experts: ExpertOptions, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(NativeError, match=text):
        Model(str(olmoe.path), experts=experts, **options)


def test_a_dense_model_has_no_expert_cache(tmp_path: Path) -> None:
    convert(str(tiny.save(tiny.build("llama"), tmp_path / "hf")), tmp_path / "m.cflow")
    with pytest.raises(NativeError, match="the model has no experts"):
        Model(str(tmp_path / "m.cflow"), experts={"cache": 1 << 30})
