"""Profiles of decode: every stage and byte counts once; tiles and the table by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import stages
from cflow.engine.base import machine
from cflow.engine.files.synth import synth
from cflow.engine.native import Model
from makefiles.shape_file import synth_model

EXPERTS = {"n_experts": 16, "top_k": 2, "d_expert": 256, "renormalise": True}
DENSE = {"qkv_bias": True, "d_ff": 512}


def model_of(folder: Path, architecture: str, layer: dict[str, Any]) -> Path:
    path = folder / "small.cflow"
    return synth_model(path, architecture, n_layers=2, d_model=256, heads=(8, 4, 32), **layer)


def test_every_stage_and_byte_has_a_kind(tmp_path: Path) -> None:
    synth("arch2_4_sync_d512", tmp_path / "delayed.cflow")
    files = [
        model_of(tmp_path, "qwen2", DENSE),
        tmp_path / "delayed.cflow",
    ]
    for path in files:
        model = Model(str(path), header_only=True)
        kinds = stages.kinds_of(model, "avx2")
        counted = sorted(stage for kind in kinds.values() for stage in kind.stages)
        assert counted == list(range(model.plan.n_stages + 2))
        assert sum(kind.bytes for kind in kinds.values()) == model.plan.bytes_per_token
        assert not kinds[stages.REST].bytes


def test_tiles_by_hand(tmp_path: Path) -> None:
    """Of 128 x 256 weights: 2 layers of Q, O (256 x 256), K, V (128 x 256), and experts."""
    path = model_of(tmp_path, "qwen3moe", EXPERTS | {"qk_norm": "head"})
    kinds = stages.kinds_of(Model(str(path), header_only=True), "avx2")
    assert kinds["attention projections"].tiles == 2 * (2 + 2 + 1 + 1)
    assert kinds["experts"].tiles == 2 * 2 * 3 * 2
    assert kinds["experts"].bytes == kinds["experts"].tiles * 18432
    assert kinds["head"].tiles == 2
    assert not kinds["router"].tiles


def test_a_profile_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "beyond_caches", lambda available: 1 << 20)
    path = model_of(tmp_path, "qwen2", DENSE)
    found = asdict(stages.profile(path, threads=2, rounds=1))
    assert 0 < sum(part["ms"] for part in found["parts"]) <= found["ms"]
    shown = [dict(zip(stages.COLUMNS, row, strict=True)) for row in stages.rows(found)]
    assert [row["stages"] for row in shown][-2:] == ["head", "all"]
    assert all(row["cycles a tile"] for row in shown[:-1] if row["MB"])
