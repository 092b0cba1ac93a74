"""How many experts stay in memory, and what is kept of their uses."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.memory.budget import room_for_experts
from cflow.engine.memory.expert_uses import read_uses, uses_path, write_uses
from cflow.engine.memory.experts import (
    ExpertBank,
    Experts,
    choose_cache,
    expert_options,
)
from cflow.engine.memory.layer_memory import weight_bytes
from cflow.engine.native import Model, const, crc32c
from oracles.random_model import EXPERTS, RandomModel

MIB = 1 << 20
BANK = ExpertBank(tuple(range(0, 100 * MIB, MIB)), MIB, 100 * MIB)
DENSE = ExpertBank((), 0, 0)


def choose(room: int = 0, bank: ExpertBank = BANK, **settings: Any) -> int:
    return choose_cache(EngineConfig(model="m", **settings), bank, room)


def test_all_experts_stay_in_memory_that_has_room_for_them() -> None:
    assert choose(100 * MIB) == 0
    assert choose(100 * MIB - 1) == 100 * MIB - 1
    assert choose(-5, DENSE) == 0


def test_bytes_and_shares_count_whatever_there_is_room_for() -> None:
    assert choose(expert_cache=50 * MIB) == 50 * MIB
    assert choose(1 << 40, expert_cache="25%") == 25 * MIB
    assert choose(expert_cache="100%") == choose(expert_cache=1 << 40) == 0


def test_the_smallest_cache_holds_a_record_for_each_read_and_one_more() -> None:
    assert choose(3 * MIB, expert_reads=2) == 3 * MIB
    with pytest.raises(EngineError, match=r"3,145,727 bytes are left .* 3,145,728 are") as caught:
        choose(3 * MIB - 1, expert_reads=2)
    assert caught.value.code == "out_of_memory"
    found = r"expert_cache is 4,194,304 bytes.*: 5 experts of 1,048,576"
    with pytest.raises(EngineError, match=found) as caught:
        choose(expert_cache="4%", expert_reads=4)
    assert caught.value.code == "invalid_request"


def test_a_cache_that_means_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="no experts; leave it out"):
        choose(bank=DENSE, expert_cache="25%")
    with pytest.raises(EngineError, match="f32 keeps all in memory"):
        choose(expert_cache="25%", precision="f32")
    assert choose(0, precision="f32") == 0


def test_a_rate_must_not_look_like_a_stuck_worker() -> None:
    slow: dict[str, Any] = {"expert_cache": "25%", "expert_read_rate": MIB}
    assert choose(**slow) == 25 * MIB
    with pytest.raises(EngineError, match=r"one expert of 1,048,576 bytes takes 1 s, and 1\.5 s"):
        choose(**slow, stuck_s=1.5)


def test_a_read_fails_before_the_worker_counts_as_stuck() -> None:
    assert expert_options(EngineConfig(model="m"), 7) == {
        "cache": 7, "io": "direct", "expert_reads": 3, "timeout_s": 10.0, "bytes_per_s": 0.0,
    }  # fmt: skip
    config = EngineConfig(model="m", stuck_s=8, expert_read_rate=MIB, expert_io="cached")
    assert expert_options(config, 7) == {
        "cache": 7, "io": "cached", "expert_reads": 3, "timeout_s": 4.0, "bytes_per_s": MIB,
    }  # fmt: skip


def test_a_sixteenth_of_the_memory_stays_free() -> None:
    assert room_for_experts(1600, 1000) == 500


def swap_banks(path: Path) -> None:
    """Puts the experts before the resident bank, as the section table allows."""
    data = bytearray(path.read_bytes())
    resident, experts = (72 + 24 * section for section in (7, 8))  # their entries of the table
    (start, middle) = (int.from_bytes(data[at : at + 8], "little") for at in (resident, experts))
    data[start:] = data[middle:] + data[start:middle]
    data[experts : experts + 8] = start.to_bytes(8, "little")
    data[resident : resident + 8] = (start + len(data) - middle).to_bytes(8, "little")
    data[4092:4096] = crc32c(bytes(data[:4092])).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["m.cflow", "m.vflow", "experts_first.cflow"])
def test_the_bank_of_a_file(name: str, tmp_path: Path) -> None:
    """The records lie where their checksums find them, wherever their section is."""
    path = RandomModel([{}, dict(EXPERTS), dict(EXPERTS)]).write(tmp_path / name)
    if name.startswith("experts_first"):
        swap_banks(path)
    model = Model(str(path), header_only=True)
    bank = ExpertBank.of(model)
    assert bank.n_records == 12
    assert bank.n_bytes == 12 * bank.record_bytes
    assert bank.record_bytes % 4096 == 0
    data = path.read_bytes()
    records = np.frombuffer(model.section(const.SectionId.EXPERTS), "<u4").reshape(12, 8)
    for offset, record in zip(bank.offsets, records, strict=True):
        content = data[offset : offset + bank.record_bytes]
        assert crc32c(content) == record[6]
    assert weight_bytes(model, as_f32=False) == len(data)


# ---- what is kept ----


def test_uses_come_back(tmp_path: Path) -> None:
    uses = np.array([0, 1 << 40, 7], np.uint64)
    path = tmp_path / "x.uses"
    write_uses(path, uses)
    kept = read_uses(path, 3)
    assert kept is not None
    assert kept.tolist() == uses.tolist()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-1], "belongs to another model"),
        (lambda data: data + b"x", "belongs to another model"),
        (lambda data: b"", "belongs to another model"),
        (lambda data: b"C" + data[1:], "belongs to another model"),
        (lambda data: data[:14] + bytes([data[14] ^ 1]) + data[15:], "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Any, reason: str
) -> None:
    path = tmp_path / "x.uses"
    write_uses(path, np.arange(4, dtype=np.uint64))
    path.write_bytes(spoil(path.read_bytes()))
    assert read_uses(path, 4) is None
    assert reason in caplog.text
    assert len(caplog.records) == 1


def test_a_fifo_does_not_hold_up_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.uses"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.write(end, bytes(4096))  # whoever does read it is not kept waiting here
    assert read_uses(path, 4) is None
    assert "x.uses is not a regular file" in caplog.text
    os.close(end)


def test_another_number_of_records_is_another_model(tmp_path: Path) -> None:
    write_uses(tmp_path / "x", np.arange(4, dtype=np.uint64))
    assert read_uses(tmp_path / "x", 5) is None
    assert read_uses(tmp_path / "none", 5) is None


def test_the_file_is_named_after_the_models_content(tmp_path: Path) -> None:
    first, other = (
        RandomModel([dict(EXPERTS)], seed=seed).write(tmp_path / f"{seed}.cflow") for seed in (0, 1)
    )
    moved = tmp_path / "moved.cflow"
    moved.write_bytes(first.read_bytes())
    names = [uses_path(path, tmp_path).name for path in (first, moved, other)]
    assert names[0] == names[1] != names[2]


def test_without_a_folder_to_keep_them_experts_are_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow")
    slots = 3 * ExpertBank.of(Model(str(path), header_only=True)).record_bytes
    experts = Experts(Model(str(path), experts={"cache": slots, "expert_reads": 2}))
    experts.warm(lambda *_: None)
    experts.save(at_once=True)
    assert "its uses will not be saved: cannot make the cache folder" in caplog.text
    assert len(caplog.records) == 1


def test_uses_that_cannot_be_kept_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = RandomModel([dict(EXPERTS)]).write(tmp_path / "m.cflow")
    slots = 3 * ExpertBank.of(Model(str(path), header_only=True)).record_bytes
    experts = Experts(Model(str(path), experts={"cache": slots, "expert_reads": 2}))
    (folder,) = (tmp_path / "cache").iterdir()
    for n_told in (1, 2):  # again once it has gone well in between
        folder.rename(tmp_path / "gone")
        for _ in range(3):
            experts.save(at_once=True)
        assert caplog.text.count("cannot write") == len(caplog.records) == n_told
        (tmp_path / "gone").rename(folder)
        experts.save(at_once=True)
    assert len(list(folder.iterdir())) == 1
