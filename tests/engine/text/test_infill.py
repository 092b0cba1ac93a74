"""Fill-in-the-middle tokens: found by name, in every family's spelling."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.native_types import TokenBytes
from cflow.engine.client.card import read_card
from cflow.engine.text.infill import END_NAMES, NAMES, Infill, find_infill
from cflow.engine.text.tokenizer import Tokenizer
from oracles.real_models import RealModel

# As the model's own tokenizer.json has them.
QWEN = Infill(prefix=151659, suffix=151661, middle=151660, ends=(151662, 151664, 151663))


def real(name: str) -> Tokenizer:
    return read_card(EngineConfig(model=str(RealModel.fetch(name).cflow))).tokenizer


def test_of_real_models() -> None:
    assert find_infill(real("qwen2.5-coder-0.5b")) == QWEN
    assert find_infill(real("smollm2-135m")) is None


def made(*names: str) -> Tokenizer:
    """A tokenizer of words with one token for unknown ones, and these special tokens."""
    vocab = {"<unk>": 0, "x": 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    table = [b"<unk>", b"x", *(name.replace("\u2581", " ").encode() for name in names)]
    flags = bytes(len(table))
    return Tokenizer(tokenizer.to_str().encode(), TokenBytes(table, flags), {})


@pytest.mark.parametrize("names", NAMES)
def test_of_every_family(names: tuple[str, str, str]) -> None:
    infill = find_infill(made(*names, END_NAMES[-1]))
    assert infill == Infill(2, 3, 4, ends=(5,))
    assert infill.prompt([7, 8], [9]) == (2, 7, 8, 3, 9, 4)


@pytest.mark.parametrize("names", [(), NAMES[0][:2], (NAMES[0][0], *NAMES[1][1:])])
def test_all_three_must_be_there_and_unknown_words_are_none(names: tuple[str, ...]) -> None:
    assert find_infill(made(*names)) is None
