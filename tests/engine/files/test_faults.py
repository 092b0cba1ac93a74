"""Files that downloads, hubs and other programs leave: what is said about them."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from cflow.engine.base.errors import ModelError
from cflow.engine.files import inspect
from cflow.engine.files.convert import convert, open_source
from cflow.engine.files.formats.safetensors import Shard
from cflow.engine.native import Model
from makefiles.conversion import gguf, keys, vocabulary
from makefiles.gguf_file import tiny_llama
from makefiles.safetensors_file import entry, shard, tiny_folder, tiny_tensors

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
STAND_INS = {
    "pointer": (POINTER, "Git LFS pointer.*git lfs pull"),
    "page": (b"\n<!DOCTYPE html><html><head>", "HTML page.*Download it again"),
    "bare page": (b"<html lang=en>", "HTML page"),
    "nothing": (b"", r"is empty \(0 bytes\); download it again"),
}


def test_f03_a_vocabulary_without_weights_is_named(tmp_path: Path) -> None:
    builder = tiny_llama()
    builder.tensors.clear()
    path = tmp_path / "vocab.gguf"
    path.write_bytes(builder.build())
    with pytest.raises(ModelError, match="a vocabulary without weights"):
        open_source(path)


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", ["model.gguf", "folder/model.safetensors", "folder/config.json"])
def test_f62_what_a_failed_download_left_is_named(kind: str, name: str, tmp_path: Path) -> None:
    data, message = STAND_INS[kind]
    folder = tiny_folder(tmp_path / "folder")
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        open_source(path if path.suffix == ".gguf" else folder)
    assert str(path) in str(error.value)


NONE = entry("F32", [1], 0, 4)
AFTER_HOLE = entry("F32", [1], 8, 12)
STRANGE = {
    "hole": (shard({"a": NONE, "b": AFTER_HOLE}, bytes(12)), "hole of 4 bytes before tensor b"),
    "hole first": (shard({"b": entry("F32", [1], 4, 8)}, bytes(8)), "hole of 4 bytes"),
    "trailing bytes": (shard({"a": NONE}, bytes(7)), "3 bytes follow the last tensor"),
    "number": (shard({"__metadata__": {"k": 1}, "a": NONE}, bytes(4)), "'k': 1.*not a string"),
    "list": (shard({"__metadata__": [], "a": NONE}, bytes(4)), "not an object of strings"),
}


@pytest.mark.parametrize("fault", STRANGE)
def test_f62_shards_are_refused_as_the_library_does(fault: str, tmp_path: Path) -> None:
    data, message = STRANGE[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
    with pytest.raises(ModelError, match=message):
        Shard(path)


def test_f63_a_single_safetensors_file_names_its_folder(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    with pytest.raises(ModelError, match=f"name its folder, {folder}"):
        open_source(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["m-00001-of-00002.gguf"], r"lacks 1 of the 2 parts.*m-00002-of-00002\.gguf"),
        (["m.Q4_0.gguf", "m.Q8_0.gguf"], r"name one of them: m\.Q4_0\.gguf, m\.Q8_0\.gguf"),
    ],
)
def test_f63_a_folder_of_gguf_files_names_the_way(
    names: list[str], message: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(tiny_llama().build())
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(tiny_llama().build())
    (tmp_path / "mmproj-m.gguf").write_bytes(b"images")
    with closing(open_source(tmp_path)) as source:
        assert source.path == tmp_path / "m.gguf"


@pytest.mark.parametrize("change", [-4096, 4096])
def test_f68_inspect_and_loading_refuse_with_the_same_words(change: int, tmp_path: Path) -> None:
    out = tmp_path / "m.cflow"
    convert(str(tiny_folder(tmp_path / "m")), out)
    data = out.read_bytes()
    out.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(ModelError) as looked:
        inspect.run(out)
    with pytest.raises(ModelError) as loaded:
        Model(str(out))
    assert str(looked.value) == str(loaded.value)
    assert str(len(data) + change) in str(looked.value)


@pytest.mark.parametrize("differs", [True, False])
def test_f61_a_head_with_its_own_values_is_used_although_the_config_ties_it(
    differs: bool, tmp_path: Path
) -> None:
    tensors = tiny_tensors()
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += differs
    folder = tiny_folder(tmp_path / "m", tensors | {"lm_head.weight": head})
    notes: list[str] = []
    convert(str(folder), tmp_path / "m.cflow", say=notes.append)
    assert Model(str(tmp_path / "m.cflow")).header.tied == (not differs)
    assert ["lm_head.weight has other values" in note for note in notes] == [True] * differs


def test_f64_of_two_ids_with_one_text_the_last_encodes_and_both_decode(tmp_path: Path) -> None:
    texts = ["a", "b", "ab", "x", "<|im_end|>", "</s>", "<t>", "ab"]
    builder = keys(
        vocabulary(tiny_llama()),
        ("tokenizer.ggml.tokens", "[s", texts),
        ("tokenizer.ggml.token_type", "[i", [1, 1, 1, 1, 3, 3, 4, 1]),
    )
    source = open_source(gguf(tmp_path, builder))
    found = source.vocabulary
    source.close()
    assert Tokenizer.from_str(found.tokenizer_json.decode()).encode("ab").ids == [7]
    assert [found.tokens[token] for token in (2, 7)] == [(b"ab", 0), (b"ab", 0)]
    assert "'ab' (2 and 7)" in found.notes[0]


def test_f65_a_missing_pre_tokenizer_is_guessed_or_asked_for(tmp_path: Path) -> None:
    builder = vocabulary(tiny_llama())
    builder.keys = [key for key in builder.keys if key[0] != "tokenizer.ggml.pre"]
    path = gguf(tmp_path, builder)
    with pytest.raises(ModelError, match=r"--pre NAME, one of .*llama-bpe"):
        open_source(path)
    named = open_source(path, pre="gpt-2")
    assert named.vocabulary.notes == ()
    named.close()
    texts = ["a", "b", "ab", "x", "<|im_end|>", "</s>", "<t>", "<|begin_of_text|>"]
    known = gguf(tmp_path, keys(builder, ("tokenizer.ggml.tokens", "[s", texts)))
    guessed = open_source(known)
    assert "suggest 'llama-bpe'" in guessed.vocabulary.notes[0]
    guessed.close()


def test_f70_a_tensor_that_holds_nan_names_its_file(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"][3] = np.nan
    folder = tiny_folder(tmp_path / "m", tensors)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.norm\.weight.*NaN"):
        convert(str(folder), tmp_path / "m.cflow")
