"""Begin tokens, ids that do not exist, long runs, and the real tokenizers."""

import json
import threading
import time
import unicodedata
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.native_types import TokenBytes
from cflow.engine.client.card import read_card
from cflow.engine.text.tokenizer import Tokenizer
from harness.waiting import LIMIT_S
from oracles.real_models import RealModel

SPECIAL = ["<s>", "</s>"]


def byte_level() -> tuple[bytes, TokenBytes]:
    """Two special tokens, then every byte."""
    letters: dict[int, str] = bytes_to_unicode()
    tokens = [*SPECIAL, *letters.values()]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    table = [token.encode() for token in SPECIAL] + [bytes([byte]) for byte in letters]
    flags = bytes(i < len(SPECIAL) for i in range(len(table)))
    return tokenizer.to_str().encode(), TokenBytes(table, flags)


def make(**metadata: Any) -> Tokenizer:
    source, table = byte_level()
    return Tokenizer(source, table, {"bos_id": 0, "add_bos": True, "eos_ids": [1]} | metadata)


def test_a_begin_token_is_put_first_once() -> None:
    tokenizer = make()
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("hi", add_bos=False) == tokenizer.encode("hi")[1:]


@pytest.mark.parametrize("metadata", [{"add_bos": False}, {"bos_id": None}])
def test_a_model_without_a_begin_token_gets_none(metadata: dict[str, Any]) -> None:
    tokenizer = make(**metadata)
    assert len(tokenizer.encode("hi")) == 2
    assert tokenizer.encode("<s>hi")[0] == 0  # typed by the user


def test_ids_past_the_table_spell_nothing() -> None:
    tokenizer = make()
    assert tokenizer.token_bytes(tokenizer.n_tokens) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert not tokenizer.is_special(tokenizer.n_tokens)
    assert tokenizer.decode([*tokenizer.encode("é"), 99999]) == "é"


def test_decoding_leaves_special_tokens_out_unless_asked() -> None:
    tokenizer = make()
    ids = tokenizer.encode("hi</s>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hi</s>"


def test_truncation_and_padding_left_over_from_training_are_off() -> None:
    source, table = byte_level()
    changed = json.loads(source)
    changed["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    tokenizer = Tokenizer(json.dumps(changed).encode(), table, {})
    assert len(tokenizer.encode("a longer text")) == 13


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"bos_id": 999}, "bos_id is 999"),
        ({"bos_id": True}, "bos_id is True"),
        ({"eos_ids": 2}, "eos_ids is 2"),
        ({"eos_ids": [1, -1]}, "eos_ids is -1"),
        ({"add_bos": "yes"}, "add_bos is 'yes'"),
        ({"generation": [1]}, r"generation is \[1\]"),
        ({"generation": {"temperature": -1}}, "generation temperature is -1"),
        ({"generation": {"top_k": 1e12}}, r"top_k is 1000000000000\.0; .* from -1 to"),
        ({"generation": {"top_p": float("nan")}}, "top_p is nan"),
        ({"generation": {"repetition_penalty": "1"}}, "repetition_penalty is '1'"),
    ],
)
def test_metadata_that_makes_no_sense_is_named(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        make(**metadata)


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(EngineError, match="not Unicode") as caught:
        make().encode("a\ud800")
    assert caught.value.code == "invalid_request"


def test_a_damaged_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(b"{}", TokenBytes([b"a"], b"\0"), {})


def test_without_a_tokenizer_there_are_only_ids() -> None:
    tokenizer = Tokenizer(b"", TokenBytes([b"a"], b"\0"), {})
    assert tokenizer.decode([0, 0]) == "aa"
    with pytest.raises(ModelError, match="send token ids"):
        tokenizer.encode("a")


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def real_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    model = RealModel.fetch(request.param)
    return read_card(EngineConfig(model=str(model.cflow))).tokenizer


def test_smollm2_tokenises_as_published() -> None:
    model = RealModel.fetch("smollm2-135m")
    tokenizer = read_card(EngineConfig(model=str(model.cflow))).tokenizer
    ids = [19556, 905, 28, 451, 314, 253, 1028, 282, 216, 33, 34, 35, 17837, 30]
    assert tokenizer.encode("Hello world, this is a test of 123 tokens.") == ids


RUNS = ["A", ".", " ", "\n", "漢", "ab", "=-", "a\u0301", "7"]


@pytest.mark.parametrize("run", RUNS, ids=ascii)
def test_long_runs_keep_to_a_time_that_length_explains(real_tokenizer: Tokenizer, run: str) -> None:
    text = run * (131072 // len(run))
    started = time.process_time()
    ids = real_tokenizer.encode(text, add_bos=False)
    assert time.process_time() - started < LIMIT_S  # a quadratic tokenizer would take longer
    # Qwen's tokenizer composes accents.
    assert unicodedata.normalize("NFC", real_tokenizer.decode(ids)) == unicodedata.normalize(
        "NFC", text
    )


def test_other_threads_run_while_a_long_text_is_encoded(real_tokenizer: Tokenizer) -> None:
    thread = threading.Thread(target=real_tokenizer.encode, args=("x " * 500_000,))
    n_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        n_turns += 1
    assert n_turns > 10  # two if encode() held the interpreter's lock
