"""SentencePiece tokenizers, from tokenizer.model and from GGUF, against the sentencepiece library."""

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import open_source
from cflow.engine.files.models.vocabulary import Vocabulary
from makefiles.conversion import encoder, gguf, keys
from makefiles.gguf_file import tiny_llama
from makefiles.safetensors_file import tiny_folder, tiny_tensors
from oracles.random_texts import texts

VOCAB = 360
LLAMA = {"model_type": "bpe", "remove_extra_whitespaces": False}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "▁▁▁", "<t>"]}
XLMR = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "byte_fallback": False}


@cache
def trained(options: str) -> bytes:
    """A tokenizer.model of the repository's prose."""
    text = (Path(__file__).parents[4] / "docs/engine.md").read_text()
    out = io.BytesIO()
    settings = {"byte_fallback": True, "normalization_rule_name": "identity"} | json.loads(options)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=out,
        vocab_size=VOCAB,
        character_coverage=0.99,
        minloglevel=2,
        **settings,
    )
    return out.getvalue()


def folder(path: Path, model: bytes, **config: Any) -> Path:
    tensors = dict(tiny_tensors())
    tensors["model.embed_tokens.weight"] = np.zeros((VOCAB + 8, 64), np.float32)
    made = tiny_folder(path / "m", tensors, vocab_size=VOCAB + 8)
    (made / "tokenizer.model").write_bytes(model)
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | config))
    return made


def gguf_file(path: Path, model: bytes) -> Path:
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    is_unigram = proto.trainer_spec.model_type == 1
    charsmap = ("tokenizer.ggml.precompiled_charsmap", "[b", signed(proto.normalizer_spec))
    return gguf(
        path,
        keys(
            tiny_llama(vocab=len(proto.pieces), n_layers=1),
            ("tokenizer.ggml.model", "s", "t5" if is_unigram else "llama"),
            ("tokenizer.ggml.tokens", "[s", [piece.piece for piece in proto.pieces]),
            ("tokenizer.ggml.token_type", "[i", [piece.type for piece in proto.pieces]),
            ("tokenizer.ggml.scores", "[f", [piece.score for piece in proto.pieces]),
            ("tokenizer.ggml.add_space_prefix", "?", proto.normalizer_spec.add_dummy_prefix),
            ("tokenizer.ggml.remove_extra_whitespaces", "?", is_unigram),
            ("tokenizer.ggml.unknown_token_id", "I", proto.trainer_spec.unk_id),
            *([charsmap] if is_unigram else []),
        ),
    )


def signed(spec: Any) -> list[int]:
    return [int(byte) for byte in np.frombuffer(spec.precompiled_charsmap, np.int8)]


def opened(path: Path) -> Vocabulary:
    source = open_source(path)
    source.close()
    return source.vocabulary


@pytest.mark.parametrize("options", [LLAMA, GEMMA, XLMR], ids=["llama", "gemma", "xlmr"])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_random_texts_encode_as_in_sentencepiece(
    options: dict[str, Any], form: str, tmp_path: Path
) -> None:
    model = trained(json.dumps(options))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    made = gguf_file if form == "gguf" else folder
    ours = encoder(opened(made(tmp_path, model)))
    for text in [*texts(500, 3), "", " ", "a  b   c    d", "<s> </s><unk><0x41>"]:
        ids = ours.encode(text, add_bos=False, trusted=())
        assert ids == theirs.encode(text), text


def test_the_table_has_the_bytes_that_a_token_decodes_to(tmp_path: Path) -> None:
    model = trained(json.dumps(GEMMA))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = opened(folder(tmp_path, model))
    assert [text for text, special in found.tokens if special] == [b"<unk>", b"<s>", b"</s>"]
    for text in texts(100, 4):
        ids = theirs.encode(text)
        assert b"".join(found.tokens[id][0] for id in ids).decode() == text


def test_a_tokenizer_json_gives_the_same_vocabulary(tmp_path: Path) -> None:
    path = folder(tmp_path, trained(json.dumps(LLAMA)))
    made = opened(path)
    (path / "tokenizer.json").write_bytes(made.tokenizer_json)
    again = opened(path)
    assert (again.tokens, again.tokenizer_json) == (made.tokens, made.tokenizer_json)
    assert (made.bos_id, made.add_bos) == (1, True)


def test_a_folder_adds_tokens(tmp_path: Path) -> None:
    entries = {
        str(VOCAB): {"content": "<|end|>", "special": True, "rstrip": True},
        str(VOCAB + 3): {"content": "<think>", "special": False},
    }
    path = folder(tmp_path, trained(json.dumps(LLAMA)), added_tokens_decoder=entries)
    found = opened(path)
    assert found.tokens[VOCAB:] == [(b"<|end|>", 1), (b"", 1), (b"", 1), (b"<think>", 0)]
    ours = encoder(found)
    the, of = (ours.encode(text, add_bos=False) for text in ("the", "of"))
    ids = ours.encode("the<|end|> \n the<think>of", add_bos=False)
    assert ids == [*the, VOCAB, *the, VOCAB + 3, *of]


@pytest.mark.parametrize(("legacy", "n_spaces"), [(True, 2), (False, 1)])
def test_a_space_goes_before_each_text_or_the_first(
    legacy: bool, n_spaces: int, tmp_path: Path
) -> None:
    ours = encoder(opened(folder(tmp_path, trained(json.dumps(LLAMA)), legacy=legacy)))
    assert ours.decode(ours.encode("x</s>y")).count(" ") == n_spaces
    assert ours.decode(ours.encode("x", begins=False)) == "x"


def test_a_control_token_that_a_user_writes_is_text(tmp_path: Path) -> None:
    ours = encoder(opened(folder(tmp_path, trained(json.dumps(LLAMA)))))
    text, own = "<s>the </s> of</s>", [(0, 3), (14, 18)]
    ids = ours.encode(text, trusted=own)
    assert (ids[0], ids[-1]) == (1, 2)
    assert {1, 2}.isdisjoint(ids[1:-1])
    assert ids[1:-1] == ours.encode("the </s> of", add_bos=False, trusted=())


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    path, model = folder(tmp_path, trained(json.dumps(XLMR))), trained(json.dumps(XLMR))
    chance = np.random.default_rng(5)
    n_refused = 0
    for _ in range(150):
        data = bytearray(model[: chance.integers(len(model))] if chance.random() < 0.3 else model)
        for at in chance.integers(0, len(data), 3) if data else ():
            data[at] = chance.integers(256)
        (path / "tokenizer.model").write_bytes(data)
        try:
            encoder(opened(path)).encode("the text, the \uff41\uff42 x\u0301")
        except ModelError:
            n_refused += 1
    assert 20 < n_refused < 150


def test_rules_of_normalisation_that_leave_their_table_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, trained(json.dumps(XLMR)))
    made = json.loads(opened(path).tokenizer_json)
    (rules,) = (step for step in made["normalizer"]["normalizers"] if step["type"] == "Precompiled")
    data = np.frombuffer(base64.b64decode(rules["precompiled_charsmap"]), np.uint8).copy()
    data[5:7] = 255  # the offset of the root
    rules["precompiled_charsmap"] = base64.b64encode(data.tobytes()).decode()
    (path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ModelError, match="precompiled_charsmap is damaged"):
        opened(path)
