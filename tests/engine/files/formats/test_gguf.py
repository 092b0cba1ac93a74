"""The GGUF reader against good files, and against one fault at a time."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from cflow.engine.base.errors import ModelError
from cflow.engine.files.formats.gguf import GgufFile
from makefiles.gguf_file import GgufBuilder, Tensor, text, tiny_llama, value

Edit = Callable[[GgufBuilder], None]


def write(path: Path, edit: Edit | None = None) -> Path:
    builder = tiny_llama()
    if edit:
        edit(builder)
    path.write_bytes(builder.build())
    return path


def set_key(name: str, kind: str, content: object) -> Edit:
    return lambda b: b.keys.append((name, kind, content))


def set_raw(name: str | bytes, raw: bytes) -> Edit:
    return lambda b: b.keys.append((name, raw))


def set_tensor(index: int, **fields: object) -> Edit:
    def edit(builder: GgufBuilder) -> None:
        for name, content in fields.items():
            setattr(builder.tensors[index], name, content)

    return edit


def set_builder(**fields: object) -> Edit:
    def edit(builder: GgufBuilder) -> None:
        for name, content in fields.items():
            setattr(builder, name, content)

    return edit


def add(*tensors: Tensor) -> Edit:
    return lambda b: b.tensors.extend(tensors)


HUGE = 1 << 32
FAULTS: dict[str, tuple[Edit, str]] = {
    "magic": (set_builder(magic=b"GGML"), "not a GGUF file"),
    "version 1": (set_builder(version=1), "version 1"),
    "version 4": (set_builder(version=4), "version 4"),
    "big-endian": (set_builder(version=3 << 24), "big-endian"),
    "tensor count past the file": (set_builder(n_tensors=1 << 62), "truncated"),
    "key count past the file": (set_builder(n_keys=1 << 63), "truncated"),
    "one key too many": (set_builder(n_keys=11), "key|tensor|truncated"),
    "dims wrap 64 bits": (add(Tensor("w", [HUGE, HUGE], 0, b"")), "truncated: tensor w"),
    "offset wraps 64 bits": (add(Tensor("w", [8], 0, b"", (1 << 64) - 32)), "truncated: tensor w"),
    "offset past the end": (add(Tensor("w", [8], 0, b"", 1 << 40)), "truncated: tensor w"),
    "offset unaligned": (add(Tensor("w", [8], 0, b"", 8)), "not on a multiple of 32"),
    "overlap": (add(Tensor("w", [8], 0, b"", 0)), "overlap"),
    "zero dimension": (add(Tensor("w", [0], 0, b"")), "dimension is zero"),
    "no dimensions": (add(Tensor("w", [], 0, b"")), "0 dimensions"),
    "five dimensions": (add(Tensor("w", [1] * 5, 0, b"")), "5 dimensions"),
    "seventy dimensions": (set_tensor(0, dims=[1] * 70), "70 dimensions"),
    "tensor twice": (add(Tensor("output_norm.weight", [8])), "output_norm.weight is there twice"),
    "empty tensor name": (add(Tensor("", [8])), "name ''"),
    "NUL in a tensor name": (add(Tensor("a\0b", [8])), "NUL"),
    "long tensor name": (add(Tensor("x" * 300, [8])), "300 bytes long"),
    "tensor name not UTF-8": (add(Tensor(b"\xff\xfe", [8])), "not UTF-8"),
    "row no whole blocks": (add(Tensor("w", [33, 2], 2, bytes(64))), "multiple of 32"),
    "key twice": (set_key("general.name", "s", "again"), "general.name' is there twice"),
    "empty key": (set_key("", "I", 1), "name ''"),
    "NUL in a key": (set_key("a\0", "I", 1), "NUL"),
    "key not UTF-8": (set_raw(b"\xff", value("I", 1)), "not UTF-8"),
    "string not UTF-8": (set_key("k", "s", b"\xc3\x28"), "key k is not UTF-8"),
    "unknown value type": (set_raw("k", struct.pack("<I", 13)), "unknown value type 13"),
    "bool of 2": (set_raw("k", struct.pack("<IB", 7, 2)), "bool with the value 2"),
    "nested array": (set_raw("k", struct.pack("<IIQ", 9, 9, 1)), "holds arrays"),
    "array of unknown type": (set_raw("k", struct.pack("<IIQ", 9, 99, 1)), "unknown type 99"),
    "array count wraps": (set_raw("k", struct.pack("<IIQ", 9, 12, (1 << 61) + 1)), "too many"),
    "string array past the file": (set_raw("k", struct.pack("<IIQ", 9, 8, 1 << 20)), "truncated"),
    "string length wraps": (set_raw("k", struct.pack("<IQ", 8, (1 << 64) - 1)), "bytes long"),
    "string past the file": (set_raw("k", struct.pack("<IQ", 8, 1 << 25)), "truncated"),
    "alignment 0": (set_key("general.alignment", "I", 0), "general.alignment is 0"),
    "alignment 4": (set_key("general.alignment", "I", 4), "general.alignment is 4"),
    "alignment 48": (set_key("general.alignment", "I", 48), "general.alignment is 48"),
    "alignment 2^31": (
        set_key("general.alignment", "I", 1 << 31),
        "general.alignment is 2147483648",
    ),
    "alignment a string": (set_key("general.alignment", "s", "32"), "not an integer"),
    "alignment a bool": (set_raw("general.alignment", struct.pack("<IB", 7, 1)), "not an integer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_costs_nothing(fault: str, tmp_path: Path) -> None:
    edit, message = FAULTS[fault]
    path = write(tmp_path / "x.gguf", edit)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as error:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    builder = tiny_llama()
    builder.keys += [
        ("a.bool", "?", True),
        ("a.negative", "q", -5),
        ("a.strings", "[s", ["ä", ""]),
        ("a.floats", "[f", [1.5, 2.5]),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(builder.build())
    with GgufFile(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["a.bool"] is True
        assert file.metadata["a.negative"] == -5
        assert file.metadata["a.strings"] == ["ä", ""]
        assert np.array_equal(file.metadata["a.floats"], [1.5, 2.5])
        assert list(file.tensors) == [tensor.name for tensor in builder.tensors]
        q = next(tensor for tensor in builder.tensors if tensor.name == "blk.1.attn_k.weight")
        assert file.tensors["blk.1.attn_k.weight"].shape == (32, 64)
        want = np.frombuffer(q.bytes(), np.float32).reshape(32, 64)
        np.testing.assert_array_equal(
            file.matrix("blk.1.attn_k.weight").read(3, 5).codes, want[3:8]
        )


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    builder = tiny_llama()
    builder.version, builder.alignment = 2, 4096
    builder.keys.append(("general.alignment", "I", 4096))
    path = tmp_path / "x.gguf"
    path.write_bytes(builder.build())
    with GgufFile(path) as file:
        last = builder.tensors[-1]
        want = np.frombuffer(last.bytes(), np.float32).reshape(64, 96)
        np.testing.assert_array_equal(file.matrix(str(last.name)).read(0, 64).codes, want)


REFUSED = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "NVFP4", "Q1_0"}


@pytest.mark.parametrize("kind", [k for k in GGMLQuantizationType if k.name in REFUSED])
def test_other_types_are_refused_by_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", add(Tensor("blk.0.x", [256], int(kind), b"")))
    with pytest.raises(ModelError, match=rf"tensor blk\.0\.x is {kind.name} \({int(kind)}\).*Q4_K"):
        GgufFile(path)


def test_an_unknown_type_number_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", add(Tensor("w", [256], 4096, b"")))
    with pytest.raises(ModelError, match=r"unknown type \(4096\)"):
        GgufFile(path)


@pytest.mark.parametrize("cut", [-1, -1000, 5000, 900, 30, 20, 7, 3, 0])
def test_a_truncated_file_says_how_much_is_missing(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:cut] if cut else b"")
    with pytest.raises(ModelError, match=r"truncated.*\d bytes"):
        GgufFile(path)


def test_the_last_missing_byte_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"\(1 bytes are missing\)"):
        GgufFile(path)


def test_a_file_that_shrinks_later_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    with GgufFile(path) as file:
        with open(path, "r+b") as handle:
            handle.truncate(5000)
        with pytest.raises(ModelError, match="while it was read"):
            file.matrix("blk.1.ffn_down.weight").read(0, 64)


Split = list[GgufBuilder]


def split(n: int = 3) -> Split:
    """The tiny llama in n parts, the first of which holds all keys."""
    whole = tiny_llama()
    parts = [GgufBuilder(tensors=whole.tensors[i::n]) for i in range(n)]
    parts[0].keys = [*whole.keys]
    for i, part in enumerate(parts):
        part.keys += [
            ("split.no", "H", i),
            ("split.count", "H", n),
            ("split.tensors.count", "i", len(whole.tensors)),
        ]
    return parts


def written(parts: Split, folder: Path) -> list[Path]:
    n = len(parts)
    paths = [folder / f"m-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.build())
    return paths


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_model_is_the_whole_one_by_any_part(named: int, tmp_path: Path) -> None:
    paths = written(split(), tmp_path)
    with GgufFile(write(tmp_path / "x.gguf")) as whole, GgufFile(paths[named]) as parts:
        assert parts.parts == paths
        assert parts.metadata.items() >= whole.metadata.items()
        assert parts.tensors.keys() == whole.tensors.keys()
        for name in whole.tensors:
            np.testing.assert_array_equal(parts.matrix(name).floats(), whole.matrix(name).floats())


def test_the_first_part_may_hold_keys_only(tmp_path: Path) -> None:
    parts = split(2)
    parts[1].tensors += parts[0].tensors
    parts[0].tensors = []
    with GgufFile(written(parts, tmp_path)[0]) as file:
        assert len(file.tensors) == len(tiny_llama().tensors)


def renumbered(parts: Split) -> None:
    parts[1].keys = [("split.no", "H", 2), *parts[1].keys[1:]]


def recounted(parts: Split) -> None:
    parts[2].keys[1] = ("split.count", "H", 4)


def repeated(parts: Split) -> None:
    parts[2].tensors.append(parts[0].tensors[0])


def shortened(parts: Split) -> None:
    parts[1].tensors.pop()


def emptied(parts: Split) -> None:
    for part in parts:
        part.tensors, part.keys[-1] = [], ("split.tensors.count", "i", 0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (renumbered, r"m-00002-of-00003\.gguf: split\.no is 2.*part 2 of 3"),
        (recounted, r"m-00003-of-00003\.gguf: split\.count is 4.*part 3 of 3"),
        (repeated, r"m-00003.*tensor token_embd\.weight is in m-00001-of-00003\.gguf too"),
        (shortened, r"split\.tensors\.count is \d+, but the parts hold \d+"),
        (emptied, "holds no tensors"),
    ],
)
def test_parts_that_do_not_belong_together(
    edit: Callable[[Split], None], message: str, tmp_path: Path
) -> None:
    parts = split()
    edit(parts)
    with pytest.raises(ModelError, match=message):
        GgufFile(written(parts, tmp_path)[0])


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = written(split(), tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of the 3 parts.*m-00003-of-00003\.gguf"):
        GgufFile(paths[0])


@pytest.mark.parametrize("number", ["00000", "00004"])
def test_a_part_beyond_the_last_one_is_refused(number: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its name is wrong"):
        GgufFile(tmp_path / f"m-{number}-of-00003.gguf")


def test_a_renamed_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", set_key("split.count", "H", 3))
    with pytest.raises(ModelError, match=r"split\.count is 3, but by its name it is part 1 of 1"):
        GgufFile(path)


def test_no_file_and_a_folder_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot open"):
        GgufFile(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError):
        GgufFile(tmp_path)


def test_mutations_neither_crash_nor_hang(tmp_path: Path) -> None:
    """Headers with bytes changed, cut, doubled or exchanged for extreme numbers."""
    rng = np.random.default_rng(5)
    builder = tiny_llama(n_layers=1, d_model=32, vocab=8)
    builder.keys += [("t", "[s", ["a", "bc"]), ("n", "[i", [1, 2, 3])]
    good = builder.build()
    header = good.index(text("blk.0.ffn_down.weight")) + 80
    extremes = [0, 1, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
    path = tmp_path / "x.gguf"
    n_refused = 0
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(header))
            match rng.integers(4):
                case 0:
                    data[at] = rng.integers(256)
                case 1:
                    data[at : at + 8] = struct.pack("<Q", extremes[rng.integers(len(extremes))])
                case 2:
                    del data[at : at + int(rng.integers(1, 64))]
                case 3:
                    data[at:at] = data[at : at + int(rng.integers(1, 64))]
        path.write_bytes(data)
        try:
            GgufFile(path).close()
        except ModelError:
            n_refused += 1
    assert 1_500 < n_refused < 3_000
