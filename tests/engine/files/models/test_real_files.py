"""Real checkpoints: every tensor of the GGUF file arrives, and text becomes the known tokens."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from cflow.engine.files.models.gguf_model import NAMING
from oracles.gguf_model import read_quickly
from oracles.model_file import ModelFile
from oracles.real_models import RealModel

NAMES = ["smollm2-135m", "qwen2.5-coder-0.5b"]
TEXTS = [
    "I'll we've DON'T it's  two   spaces\n\n\ttabs and words",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "def f(x):\n    return x**2  # ok\n\n\n",
    "🙂👨‍👩‍👧 emoji",
    "   leading and trailing   ",
    "",
    " \n \n x",
    "a\r\nb",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> RealModel:
    return RealModel.fetch(request.param)


def tokenizer(file: ModelFile) -> Tokenizer:
    return Tokenizer.from_str(file._section(4).decode())


def test_every_tensor_arrives_exactly(real: RealModel) -> None:
    """Of the larger model the first of each role and type."""
    file = ModelFile(real.cflow)
    seen = set()
    with read_quickly():
        tensors = {tensor.name: tensor for tensor in GGUFReader(real.gguf).tensors}
    assert len(file._tensors) == len(tensors)
    for block, role in file._tensors:
        tensor = tensors[NAMING.plain[role].format(layer=block)]
        if real.name != NAMES[0] and (role, tensor.tensor_type) in seen:
            continue
        seen.add((role, tensor.tensor_type))
        want = dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.weight(block, role).astype(np.float32), want), (block, role)
        ModelFile.weight.cache_clear()


def test_text_becomes_the_tokens_of_transformers(real: RealModel, data: Path) -> None:
    """transformers reads the same GGUF with a pre-tokenizer of its own. It has no rule for SmolLM2's
    single digits, and leaves out Qwen's normalisation: such texts are left out here."""
    ours = tokenizer(ModelFile(real.cflow))
    with read_quickly():
        theirs = AutoTokenizer.from_pretrained(real.gguf.parent, gguf_file=real.gguf.name)
    wiki = (data / "wikitext2" / "wiki.test.raw").read_text()[:60_000].split("\n")
    for text in [*TEXTS, *wiki]:
        if any(c.isnumeric() for c in text) or unicodedata.normalize("NFC", text) != text:
            continue
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_smollm2_cuts_numbers_into_digits() -> None:
    file = ModelFile(RealModel.fetch("smollm2-135m").cflow)
    ids = tokenizer(file).encode("Hello world, this is a test of 123 tokens.").ids
    assert ids == [19556, 905, 28, 451, 314, 253, 1028, 282, 216, 33, 34, 35, 17837, 30]


def test_qwen_ends_and_padding() -> None:
    """generation_config.json of the original: 151645 and 151643; 151,665 tokens in 151,936 rows."""
    file = ModelFile(RealModel.fetch("qwen2.5-coder-0.5b").cflow)
    assert file.metadata["eos_ids"] == [151645, 151643]
    assert (file.header["n_tokens"], file.header["vocab_size"]) == (151665, 151936)
    assert tokenizer(file).encode("e\u0301").ids == tokenizer(file).encode("é").ids
