"""Hugging Face folders: good ones, and one fault at a time."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.quantise import values
from cflow.engine.files.formats.safetensors import SafetensorsFolder, Shard
from makefiles.safetensors_file import (
    CONFIG,
    entry,
    pack,
    shard,
    shard_folder,
    tiny_folder,
    tiny_tensors,
)

GOOD = entry("F32", [2, 2], 0, 16)
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "is empty"),
    "half a length": (b"\0\0\0", "truncated"),
    "header past the file": (b"\xff\0\0\0\0\0\0\0{}", "truncated: 253 bytes"),
    "header of 2^64 - 1": (b"\xff" * 8 + b"{}", "claims 18,446,744,073,709,551,615"),
    "not JSON": (shard(b"{"), "not JSON"),
    "not UTF-8": (shard(b"\xff\xfe{}"), "not JSON"),
    "JSON list": (shard(b"[]"), "not a JSON object"),
    "deep JSON": (shard(b"[" * 100_000), "not JSON"),
    "key twice": (shard(b'{"a": 1, "a": 2}'), "twice"),
    "no offsets": (shard({"a": {"dtype": "F32", "shape": [1]}}), "tensor a lacks"),
    "entry a number": (shard({"a": 5}), "tensor a lacks"),
    "three offsets": (shard({"a": GOOD | {"data_offsets": [0, 1, 2]}}), "tensor a lacks"),
    "negative offset": (shard({"a": entry("F32", [1], -4, 0)}), "not counts"),
    "float shape": (shard({"a": entry("F32", [2.0], 0, 8)}), "not counts"),  # type: ignore[list-item]
    "bool shape": (shard({"a": entry("F32", [True], 0, 4)}), "not counts"),
    "zero dimension": (shard({"a": entry("F32", [0], 0, 0)}), r"shape \[0\]"),
    "size and shape differ": (shard({"a": entry("F32", [2, 2], 0, 15)}, bytes(16)), "15 bytes"),
    "shape wraps": (shard({"a": entry("F32", [1 << 32, 1 << 32], 0, 0)}), "0 bytes"),
    "data cut": (shard({"a": GOOD}, bytes(15)), r"\(1 bytes are missing\)"),
    "offset past 2^64": (shard({"a": entry("F32", [1], 1 << 70, (1 << 70) + 4)}), "a hole of"),
    "overlap": (shard({"a": GOOD, "b": entry("F32", [2, 2], 8, 24)}, bytes(24)), "overlap"),
    "ends before it begins": (shard({"a": entry("I8", [4], 8, 4)}, bytes(8)), "ends before"),
    "dtype a number": (shard({"a": GOOD | {"dtype": 3}}, bytes(16)), "no proper name or dtype"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_shard_is_named(fault: str, tmp_path: Path) -> None:
    data, message = FAULTS[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        Shard(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_library_writes_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {"a": torch.randn(5, 7).to(dtype), "b": torch.randn(2, 3, 4).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = Shard(tmp_path / "model.safetensors")
    assert {name: t.shape for name, t in found.tensors.items()} == {"a": (5, 7), "b": (2, 3, 4)}
    np.testing.assert_array_equal(
        values(found.matrix("a").read(1, 3)), tensors["a"][1:4].float().numpy()
    )
    np.testing.assert_array_equal(
        values(found.matrix("b").read(0, 6)), tensors["b"].float().numpy().reshape(6, 4)
    )
    found.close()


def test_other_dtypes_are_refused_when_used(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack({"a": np.zeros((2, 2), np.int8)}))
    found = Shard(path)
    with pytest.raises(ModelError, match=r"tensor a is I8.*F32, F16, BF16"):
        found.matrix("a")
    found.close()


def test_shards_make_one_model(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    (path / "stray.safetensors").write_bytes(b"rubbish")
    with SafetensorsFolder(path) as folder:
        assert folder.tensors.keys() == tiny_tensors().keys()
        for name, want in tiny_tensors().items():
            matrix = folder.matrix(name)
            got = matrix.read(0, matrix.n_rows).codes.reshape(want.shape)
            np.testing.assert_array_equal(got, want)


def edit_index(path: Path, edit: Any) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    edit(content["weight_map"])
    index.write_text(json.dumps(content))


SECOND = "model-00002-of-00002.safetensors"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    (path / SECOND).unlink()
    with pytest.raises(ModelError, match=f"missing shards: {SECOND}"):
        SafetensorsFolder(path)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "sub/x", "..", ".", "", "a\0b"]
)
def test_names_that_leave_the_folder_are_refused_unopened(name: str, tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    (tmp_path / "out.safetensors").write_bytes(pack(tiny_tensors()))
    edit_index(path, lambda m: m.update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match="not a plain file name"):
        SafetensorsFolder(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    outside = tmp_path / "outside.safetensors"
    os.replace(path / SECOND, outside)
    (path / SECOND).symlink_to(outside)
    with pytest.raises(ModelError, match="leads out of the folder"):
        SafetensorsFolder(path)


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "models--x" / "snapshots" / "abc")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for name in os.listdir(path):
        os.replace(path / name, blobs / f"hash-{name}")
        (path / name).symlink_to(f"../../blobs/hash-{name}")
    with SafetensorsFolder(path) as folder:
        assert folder.tensors.keys() == tiny_tensors().keys()


def test_a_tensor_in_another_shard_than_promised_is_named(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    edit_index(path, lambda m: m.update({"model.norm.weight": SECOND}))
    with pytest.raises(ModelError, match=r"holds tensor model\.norm\.weight"):
        SafetensorsFolder(path)


def test_a_promised_tensor_that_is_nowhere_is_named(tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    edit_index(path, lambda m: m.update({"ghost": SECOND}))
    with pytest.raises(ModelError, match="tensor ghost is not in"):
        SafetensorsFolder(path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": 5}', "nonsense"])
def test_an_index_without_a_map_is_refused(index: str, tmp_path: Path) -> None:
    path = shard_folder(tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"weight_map|not JSON"):
        SafetensorsFolder(path)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)


def test_two_thousand_mutated_headers_are_refused_or_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    path = tiny_folder(tmp_path / "m")
    file = path / "model.safetensors"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    n_refused = 0
    for _ in range(2_000):
        data = bytearray(good)
        for at in rng.integers(header, size=2):
            data[at] = rng.integers(256) if rng.integers(2) else b'[]{}":,0129'[rng.integers(11)]
        file.write_bytes(data)
        try:
            SafetensorsFolder(path).close()
        except ModelError:
            n_refused += 1
    assert n_refused > 500
