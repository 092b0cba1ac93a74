"""The Python face of the native engine: structs, errors, lives of handles, marshalling."""

import dataclasses
import gc
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import pytest

from cflow.engine import native
from cflow.engine._native import ffi
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.messages import DiskUsage
from cflow.engine.native import Context, Model, NativeError, Pick, Row, const
from oracles.random_model import EXPERTS, VOCAB_SIZE, RandomModel
from oracles.running import opened, rows, step

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "max_rows": 8,
    "max_sequences": 2,
    "max_context": 64,
    "n_kv_blocks": 4,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return RandomModel([{}, dict(EXPERTS)]).write(folder / "tiny.cflow")


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    model = Model(str(path))
    yield model
    model.close()


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    context = Context(model, **OPTIONS)
    context.bind(0, [0, 1])
    context.bind(1, [2, 3])
    yield context
    context.close()


# ---- structs and constants ----


def test_enums_carry_the_names_of_the_header() -> None:
    assert [e.name for e in const.RopeKind] == ["NONE", "HALF", "INTERLEAVED"]
    assert const.Role.EXPERT_DOWN == 26
    assert const.Encoding["Q6_K"] == 8
    assert "ENCODINGS" not in const.Encoding.__members__
    assert "N_ENCODINGS" not in const.Encoding.__members__
    assert const.Status.ECANCELLED == -6
    assert const.CFLOW_ROW_LOGITS == 1
    assert const.CFLOW_MODEL_LEVEL == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("kind", "struct", "left_out"),
    [
        (native.Header, "cflow_header", {"magic", "sections", "crc"}),
        (native.Layer, "cflow_layer", set()),
        (native.Tensor, "cflow_tensor", set()),
        (native.PlanInfo, "cflow_plan_info", set()),
        (native.OpInfo, "cflow_op_info", set()),
        (native.Memory, "cflow_memory", set()),
        (native.TierStats, "cflow_tier_stats", set()),
        (native.Pick, "cflow_pick", {"n_history", "n_bias"}),
    ],
)
def test_dataclasses_mirror_the_structs(kind: type, struct: str, left_out: set[str]) -> None:
    in_c = {name for name, _ in ffi.typeof(struct).fields} - left_out - {"reserved"}
    assert {field.name for field in dataclasses.fields(kind)} == in_c


def test_a_row_has_the_order_of_the_struct() -> None:
    in_c = [name for name, _ in ffi.typeof("cflow_row").fields]
    assert [*Row._fields, "reserved"] == in_c
    in_c = [name for name, _ in ffi.typeof("cflow_row_usage").fields]
    assert [*native.RowUsage._fields] == [name for name in in_c if name != "reserved"]
    assert native.RowUsage._fields == DiskUsage.__struct_fields__


@pytest.mark.parametrize(
    ("packer", "struct"),
    [(native._ROW, "cflow_row"), (native._PICK, "cflow_pick"), (native._USAGE, "cflow_row_usage")],
)
def test_what_is_packed_by_hand_lies_as_in_c(packer: Struct, struct: str) -> None:
    """Each field of C, but pointers and what is reserved, holds the value of its turn."""
    fields = [
        (name, field.type.cname)
        for name, field in ffi.typeof(struct).fields
        if name != "reserved" and field.type.kind != "pointer"
    ]
    n = len(packer.unpack(bytes(packer.size)))
    assert (packer.size, n) == (native.sizeof(struct), len(fields))
    in_c = ffi.from_buffer(f"{struct} *", packer.pack(*range(1, n + 1)))
    assert [getattr(in_c, name) for name, _ in fields] == list(range(1, n + 1))


def test_pack_fills_with_zeros_and_refuses_unknown_fields() -> None:
    record = native.pack("cflow_record", {"block": 1, "offset": 1 << 40})
    assert record == (1).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little") + bytes(16)
    assert len(native.pack("cflow_header", {})) == native.sizeof("cflow_header") == 4096
    with pytest.raises(KeyError, match="nope"):
        native.pack("cflow_layer", {"nope": 1})


def test_crc32c_of_bytes_arrays_and_pieces() -> None:
    """RFC 3720, B.4."""
    assert native.crc32c(b"123456789") == 0xE3069283
    assert native.crc32c(bytes(32)) == 0x8A9136AA
    rising = np.arange(32, dtype=np.uint8)
    assert native.crc32c(rising) == 0x46DD794E
    assert native.crc32c(rising.data[20:], native.crc32c(rising[:20])) == 0x46DD794E


# ---- models ----


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.cflow") as caught:
        Model(str(tmp_path / "no.cflow"))
    assert caught.value.code == "model_error"


def test_a_damaged_file_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.cflow").write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"cut\.cflow.*truncated"):
        Model(str(tmp_path / "cut.cflow"))


def test_progress_runs_in_the_caller_and_ends_at_the_total(path: Path) -> None:
    reports: list[tuple[int, int]] = []
    Model(str(path), progress=lambda done, total: reports.append((done, total)))
    done, total = reports[-1]
    assert done == total > 0


def test_an_exception_in_progress_ends_the_loading(path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(str(path), progress=interrupt)


def test_header_only_reads_no_weights_and_cannot_run(path: Path) -> None:
    model = Model(str(path), header_only=True)
    assert model.memory.resident_bytes == 0
    assert (model.header.n_layers, model.header.vocab_size) == (2, VOCAB_SIZE)
    assert (model.layers[0].n_experts, model.layers[1].n_experts) == (0, EXPERTS["n_experts"])
    with pytest.raises(NativeError):
        Context(model, **OPTIONS)


def test_a_digest_is_that_of_all_weights(model: Model, path: Path, tmp_path: Path) -> None:
    assert Model(str(path), header_only=True).digest == model.digest
    others = [
        RandomModel([{}, dict(EXPERTS)], seed=1).write(tmp_path / "weights.cflow"),
        RandomModel([{}, dict(EXPERTS)], context=256).write(tmp_path / "context.cflow"),
    ]
    digests = {Model(str(other), header_only=True).digest for other in others}
    assert len(digests | {model.digest}) == 3


def test_metadata_and_token_bytes(model: Model) -> None:
    assert model.metadata["name"] == "random"
    assert model.section(const.SectionId.TOKENIZER) == b""
    table = model.token_bytes
    assert len(table) == VOCAB_SIZE
    assert [table[i] for i in (0, 65, VOCAB_SIZE - 1)] == [b"\0", b"A", bytes([VOCAB_SIZE - 1])]
    assert not table.is_special(65)


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff", b"[" * 100_000], ids=range(4))
def test_metadata_that_is_no_object_is_refused(
    model: Model, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "section", lambda self, section: text)
    with pytest.raises(ModelError, match="metadata"):
        _ = model.metadata


def test_plan_and_ops_agree(model: Model) -> None:
    plan, ops = model.plan, model.ops
    assert len(ops) == plan.n_ops
    assert max(op.stage for op in ops) == plan.n_stages - 1
    names = [op.name for op in ops]
    assert len(set(names)) == len(names)
    assert {"L0.gate_up", "L1.route"} <= set(names)


def test_rows_are_dequantised_within_the_tensor(model: Model) -> None:
    tensors = model.tensors
    index = next(i for i, t in enumerate(tensors) if t.role == const.Role.EMBEDDING)
    whole = model.rows(index, 0, 0, VOCAB_SIZE)
    assert whole.shape == (VOCAB_SIZE, 64)
    assert whole.dtype == np.float32
    assert 0.5 < whole.std() < 2
    np.testing.assert_array_equal(model.rows(index, 0, 5, 3), whole[5:8])
    with pytest.raises(NativeError):
        model.rows(index, 0, VOCAB_SIZE - 1, 2)
    with pytest.raises(NativeError):
        model.rows(len(tensors), 0, 0, 1)


# ---- contexts ----


def test_a_context_keeps_its_model_open(path: Path) -> None:
    model = Model(str(path))
    context = Context(model, **OPTIONS)
    context.bind(0, [0, 1])
    model.close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert context.step(rows([1, 2])).status == [0, 0]
    context.close()


def test_a_closed_handle_is_refused_not_dereferenced(context: Context) -> None:
    context.close()
    with pytest.raises(TypeError):
        context.step(rows([1]))


def test_memory_is_told_before_it_is_taken(model: Model) -> None:
    kv_bytes, scratch_bytes = native.context_memory(model, **OPTIONS)
    assert kv_bytes >= model.plan.kv_bytes_per_token * const.CFLOW_KV_BLOCK * 4
    assert scratch_bytes > 0
    more, _ = native.context_memory(model, **OPTIONS | {"n_kv_blocks": 8})
    assert more == 2 * kv_bytes


def test_an_instruction_set_that_is_missing_is_an_error(model: Model) -> None:
    with pytest.raises(NativeError, match="neon") as caught:
        Context(model, **OPTIONS, isa="neon")
    assert caught.value.status == const.Status.EINVAL
    assert isinstance(caught.value, EngineError)
    context = Context(model, **OPTIONS, isa="scalar")
    assert context.isa == "scalar"


def test_wrong_calls_are_errors(context: Context) -> None:
    with pytest.raises(NativeError, match="9 rows in a step, at most 8"):
        context.step(rows([1] * 9))
    with pytest.raises(NativeError):
        context.bind(2, [0])
    with pytest.raises(NativeError):
        context.bind(0, [4])
    with pytest.raises(NativeError):
        context.copy_block(0, 4)
    with pytest.raises(NativeError):
        context.step([Row(0, VOCAB_SIZE, 0)])
    context.step([Row(0, 1, 0), Row(0, 2, 1, const.CFLOW_ROW_LOGITS)])
    with pytest.raises(NativeError, match="row 0 kept no logits"):
        context.logits(0)
    with pytest.raises(NativeError, match="row 0"):
        context.sample([Pick(0)])
    with pytest.raises(NativeError, match="3 picks, at most 2"):
        context.sample([Pick(1)] * 3)


def test_counters_rise(context: Context, model: Model) -> None:
    assert (context.stage_count, context.read_bytes) == (0, 0)
    context.step(rows([1]))
    assert context.stage_count >= model.plan.n_stages  # the head's stages count as well
    assert context.read_bytes > 0


def test_stage_times_add_up_to_the_steps(context: Context, model: Model) -> None:
    began = time.perf_counter_ns()
    for position in range(3):
        context.step(rows([1], position))
    took = time.perf_counter_ns() - began
    times = context.stage_times
    assert len(times) == model.plan.n_stages + 2
    assert all(one.ns > 0 for one in times[:-2])
    assert 0 < sum(one.ns for one in times) <= took


def test_a_thread_without_work_counts_as_idle(path: Path) -> None:
    """Stages of one unit leave the second thread nothing, once it is awake."""
    with opened(path, n_threads=2) as context:
        for position in range(60_000):
            context.step(rows([1], position % 32))
            if any(one.idle_ns for one in context.stage_times):
                return
    raise AssertionError("no thread ever waited")


def test_logits_are_a_copy(context: Context) -> None:
    first = step(context, rows([1]))[0]
    kept = first.copy()
    step(context, rows([2], 1))
    np.testing.assert_array_equal(first, kept)


def test_values_come_by_name(path: Path) -> None:
    with opened(path, keep_values=True) as context:
        step(context, rows([3, 4]))
        assert context.value("L0.x_in", 0).shape == (64,)
        routed = context.value("L1.routed", 1)
        assert routed.shape == (EXPERTS["top_k"],)
        with pytest.raises(NativeError, match=r"L9\.q"):
            context.value("L9.q", 0)


def test_a_probe_with_more_threads_than_cores_is_no_faster() -> None:
    """Bounded by the processor time that its passes took, whoever else runs."""
    n_bytes, passes = 64 << 20, 20
    native.probe_bandwidth(n_bytes, 64, 1)  # what comes with the first one is not the passes'
    before = time.process_time()
    rate = native.probe_bandwidth(n_bytes, 64, passes)
    a_pass_s = (time.process_time() - before) / passes
    assert n_bytes / rate > a_pass_s / len(os.sched_getaffinity(0)) / 3
