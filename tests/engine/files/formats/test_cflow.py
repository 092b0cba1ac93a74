"""The writer: the engine and an independent reader open what it writes, and failures leave nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cflow.engine import native
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.files import synth
from cflow.engine.files.convert import convert
from cflow.engine.files.formats import cflow as writer
from cflow.engine.files.formats.cflow import Contents, Weight, write
from makefiles.gguf_file import tiny_llama
from oracles.model_file import ModelFile

PAGE = 4096

SHAPE = """
architecture = "olmoe"
n_layers = 3
d_model = 96
vocab_size = 300
context = 64
tied = false
norm_eps = 1e-5
[layer]
n_heads = 3
n_kv_heads = 1
head_dim = 32
qk_norm = "full"
n_experts = 5
top_k = 2
d_expert = 40
{more}
[layer.rope]
kind = "half"
dim = 32
base = 1e4
"""


DELAYED = """
d_ff = 64
dense_source = "x_in_previous"
expert_anchor = "x_in"
expert_delay = 2
"""


@pytest.fixture(params=[("moe.cflow", ""), ("moe.vflow", DELAYED)], ids=["layer", "stage"])
def moe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A stock model in layer order, a delayed one in stage order."""
    name: str
    name, more = request.param
    (tmp_path / "shape.toml").write_text(SHAPE.format(more=more))
    synth.synth(str(tmp_path / "shape.toml"), tmp_path / name, seed=3)
    return tmp_path / name


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition (reflected polynomial 0x82F63B78)."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def test_checksums_and_places_are_those_of_the_format(moe: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the published check value
    data = moe.read_bytes()
    file = ModelFile(moe)
    assert file.header["file_bytes"] == len(data)
    assert crc32c(data[:4092]) == int.from_bytes(data[4092:4096], "little")
    ends = [PAGE]
    for index, (offset, n_bytes) in enumerate(file.sections[:9]):
        assert offset % PAGE == 0
        assert offset >= ends[-1]
        assert not any(data[offset + n_bytes : -(-(offset + n_bytes) // PAGE) * PAGE])
        crc = int.from_bytes(data[72 + 24 * index + 16 :][:4], "little")
        assert crc == (crc32c(data[offset : offset + n_bytes]) if index < 7 else 0)
        ends.append(offset + n_bytes)
    start, n_bytes = file.sections[7]
    runs = [
        data[at : min(at + (1 << 20), start + n_bytes)]
        for at in range(start, start + n_bytes, 1 << 20)
    ]
    want = np.array([crc32c(run) for run in runs], "<u4").tobytes()
    assert file._section(6) == want
    bank, bank_bytes = file.sections[8]
    assert bank + bank_bytes == len(data)
    for (_, _), record in file._experts.items():
        assert record["offset"] % PAGE == 0
        padded = -(-record["bytes"] // PAGE) * PAGE
        at = bank + record["offset"]
        assert record["crc"] == crc32c(data[at : at + padded])


def test_the_engine_opens_it_and_reads_the_same_weights(moe: Path) -> None:
    file = ModelFile(moe)
    with_weights = native.Model(str(moe))
    assert with_weights.header.n_records == 15
    for index, tensor in enumerate(with_weights.tensors):
        role = native.const.Role(tensor.role).name.lower()
        for expert in range(5 if role.startswith("expert_") else 1):
            want = file.weight(tensor.block, role, expert).reshape(tensor.n_rows, tensor.n_cols)
            got = with_weights.rows(index, expert, 0, tensor.n_rows)
            np.testing.assert_array_equal(got, want.astype(np.float32))
    with_weights.close()


def test_gate_and_up_interleave_by_stripe(moe: Path) -> None:
    file = ModelFile(moe)
    gate, up, down = (file._tensors[0, f"expert_{name}"] for name in ("gate", "up", "down"))
    stripe = 64 * 3 * 18  # 64 rows of 96 columns: 3 blocks of 18 bytes
    assert gate["stripe_rows"] == up["stripe_rows"] == 64
    assert (gate["offset"], up["offset"]) == (0, stripe)
    assert gate["stripe_stride"] == up["stripe_stride"] == 2 * stripe
    assert down["offset"] == 2 * stripe
    assert down["stripe_stride"] == 96 * 2 * 18


def contents(stripes: Callable[[int, int], np.ndarray]) -> Contents:
    weight = Weight("final_norm", writer.MODEL_LEVEL, "f32", 1, 32, stripes, True)
    return Contents({"d_model": 32}, [], {}, b"", b"", [(weight,)])


def test_a_failing_source_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    def fails(_first: int, _n: int) -> np.ndarray:
        raise ModelError("the disk is gone")

    out = tmp_path / "x.cflow"
    out.write_bytes(b"old")
    with pytest.raises(ModelError, match="the disk is gone"):
        write(contents(fails), out)
    assert os.listdir(tmp_path) == ["x.cflow"]
    assert out.read_bytes() == b"old"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(_first: int, _n: int) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(contents(interrupted), tmp_path / "x.cflow")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"needs [\d,]+ bytes; its disk has 1,000 free"):
        write(contents(lambda *_: pytest.fail("read a weight")), tmp_path / "x.cflow")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot write"):
        write(contents(lambda *_: np.zeros((1, 128), np.uint8)), tmp_path / "no" / "x.cflow")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "x.cflow"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="a pipe"):
        write(contents(lambda *_: np.zeros((1, 128), np.uint8)), pipe)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["x.cflow"]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_llama().build())
    seen: list[tuple[int, int]] = []
    out = tmp_path / "x.cflow"
    convert(str(tmp_path / "x.gguf"), out, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("header_only", [True, False])
def test_mutated_model_files_neither_crash_nor_hang(moe: Path, header_only: bool) -> None:
    """Bytes before the banks changed; every other time the checksums are mended, so that the checks
    behind them are reached."""
    rng = np.random.default_rng(8)
    good = moe.read_bytes()
    end = ModelFile(moe).sections[7][0]
    n_refused = 0
    path = moe.with_name("mutated.cflow")
    for turn in range(3_000 if header_only else 300):
        data = bytearray(good if not header_only else good[:end])
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(300 if rng.integers(2) else end))
            width = int(rng.choice([1, 4, 8]))
            data[at : at + width] = int(rng.choice([0, 1, 255, 2**31, 2**32 - 1])).to_bytes(
                8, "little"
            )[:width]
        if turn % 2:
            mend(data)
        path.write_bytes(data)
        try:
            native.Model(str(path), header_only=header_only).close()
        except EngineError:
            n_refused += 1
    assert n_refused > 100


def mend(data: bytearray) -> None:
    """Checksums of the small sections and of the header, as far as they are still inside."""
    for index in range(7):
        at = 72 + 24 * index
        offset, n_bytes = (int.from_bytes(data[at + 8 * i :][:8], "little") for i in range(2))
        if offset + n_bytes <= len(data):
            crc = native.crc32c(bytes(data[offset : offset + n_bytes]))
            data[at + 16 : at + 20] = crc.to_bytes(4, "little")
    data[4092:4096] = native.crc32c(bytes(data[:4092])).to_bytes(4, "little")
