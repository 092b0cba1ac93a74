"""Tokens, their bytes, the ids that end an answer, and how text is cut."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import open_source
from cflow.engine.files.models.vocabulary import byte_characters
from makefiles.conversion import converted, gguf, keys, vocabulary
from makefiles.gguf_file import tiny_llama
from makefiles.safetensors_file import tiny_folder, tiny_tensors


def bpe(path: Path, extra: list[str]) -> Tokenizer:
    """A byte-level tokenizer with special tokens, saved into a folder."""
    vocab = {char: byte for char, byte in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(extra)
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def wide(vocab_size: int) -> dict[str, np.ndarray]:
    tensors = dict(tiny_tensors())
    tensors["model.embed_tokens.weight"] = np.zeros((vocab_size, 64), np.float32)
    return tensors


def with_tokenizer(tmp_path: Path, vocab_size: int = 264, **config: Any) -> Path:
    path = tiny_folder(tmp_path / "m", wide(vocab_size), vocab_size=vocab_size, **config)
    bpe(path, ["<s>", "</s>", "<|im_end|>"])  # 256, 257, 258
    return path


def test_f29_every_end_is_found_and_the_named_one_comes_first(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path, eos_token_id=7)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|im_end|>"},
                "bos_token": "<s>",
                "pad_token": None,
                "add_bos_token": True,
                "chat_template": [
                    {"name": "tool", "template": "T"},
                    {"name": "default", "template": "D"},
                ],
            }
        )
    )
    metadata = converted(path).metadata
    assert metadata["eos_ids"] == [258, 7, 9]
    assert (metadata["bos_id"], metadata["add_bos"], metadata["pad_id"]) == (256, True, None)
    assert metadata["chat_template"] == "D"
    assert metadata["generation"] == {"temperature": 0.6, "top_k": 20.0}


def test_rows_past_the_tokenizer_are_no_tokens(tmp_path: Path) -> None:
    file = converted(with_tokenizer(tmp_path))
    assert (file.header["vocab_size"], file.header["n_tokens"]) == (264, 259)
    table = file._section(5)
    n = int.from_bytes(table[:4], "little")
    ends = np.frombuffer(table, "<u4", n, 4)
    flags, text = table[4 + 4 * n : 4 + 5 * n], table[4 + 5 * n :]
    assert n == 259
    tokens = [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert tokens == [*(bytes([b]) for b in range(256)), b"<s>", b"</s>", b"<|im_end|>"]
    assert flags == bytes(256) + bytes([1, 1, 1])


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="259 tokens, the embedding only 258 rows"):
        converted(with_tokenizer(tmp_path, 258))


def test_an_absurd_token_id_is_refused_before_a_table_is_made(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path)
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["model"]["vocab"]["absurd"] = 4_000_000_000
    (path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="4,000,000,001 tokens, the embedding only 264 rows"):
        converted(path)


def test_an_end_that_is_no_token_is_left_out(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [257, 260]}')
    assert converted(path).metadata["eos_ids"] == [257]


@pytest.mark.parametrize(
    ("templates", "chosen"),
    [
        ([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": ["default"], "template": "D"}, 5], None),
    ],
)
def test_f16_of_several_templates_the_default_counts(
    templates: list[Any], chosen: str | None, tmp_path: Path
) -> None:
    path = with_tokenizer(tmp_path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert converted(path).metadata["chat_template"] == chosen


def test_f16_a_template_for_tools_is_kept_beside_the_default(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert converted(path).metadata["tool_template"] == "T"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/tool_use.jinja").write_text("T2")
    (path / "chat_template.jinja").write_text("D2")
    metadata = converted(path).metadata
    assert (metadata["chat_template"], metadata["tool_template"]) == ("D2", "T2")
    (path / "additional_chat_templates/tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="template tool_use is not UTF-8"):
        converted(path)


def test_f16_a_gguf_template_for_tools_is_kept(tmp_path: Path) -> None:
    builder = keys(
        vocabulary(tiny_llama(vocab=8)),
        ("tokenizer.chat_template", "s", "D"),
        ("tokenizer.chat_template.tool_use", "s", "T"),
    )
    metadata = converted(gguf(tmp_path, builder)).metadata
    assert (metadata["chat_template"], metadata["tool_template"]) == ("D", "T")


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "m")
    (path / "vocab.json").write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"vocab\.json but neither tokenizer\.json nor"):
        converted(path)
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path / "tokenizer.json"))
    with pytest.raises(ModelError, match="this is WordLevel"):
        converted(path)


def test_a_gguf_vocabulary_becomes_a_tokenizer(tmp_path: Path) -> None:
    file = converted(gguf(tmp_path, vocabulary(tiny_llama(vocab=8))))
    tokenizer = Tokenizer.from_str(file._section(4).decode())
    assert tokenizer.encode("ab ba<|im_end|><t>ab").ids == [2, 3, 1, 0, 4, 6, 2]
    assert file.header["n_tokens"] == 7
    assert file.metadata["eos_ids"] == [5, 4]  # the named one first
    flags = file._section(5)[4 + 4 * 7 :][:7]
    assert flags == bytes([0, 0, 0, 0, 1, 1, 0])


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pre is 'klingon'.*supported: .*qwen2"):
        converted(gguf(tmp_path, vocabulary(tiny_llama(vocab=8), "klingon")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("token_type", [1, 1], "does not hold 8"),
        ("token_type", [1, 1, 1, 1, 3, 3, 4, 9], "unknown type"),
        ("merges", ["ab"], "not two tokens"),
        ("merges", ["a x"], "do not fit"),
        ("eos_token_id", 8, "eos_token_id is 8"),
    ],
)
def test_a_broken_gguf_vocabulary_is_refused(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    kind = {"tokens": "[s", "merges": "[s", "token_type": "[i", "eos_token_id": "I"}[name]
    builder = keys(vocabulary(tiny_llama(vocab=8)), (f"tokenizer.ggml.{name}", kind, content))
    with pytest.raises(ModelError, match=message):
        converted(gguf(tmp_path, builder))


CUTS = [
    (
        "gpt-2",
        "I'll pay 1234 (ok)\n\n x",
        ["I", "'ll", " pay", " 1234", " (", "ok", ")", "\n\n", " x"],
    ),
    ("smollm", "in 123 a", ["in", " ", "1", "2", "3", " a"]),
    ("qwen2", "I'LL pay 123\n\n x", ["I", "'LL", " pay", " ", "1", "2", "3", "\n\n", " x"]),
    ("llama-bpe", "x=12345;\n y", ["x", "=", "123", "45", ";\n", " y"]),
    ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
]


@pytest.mark.parametrize(("pre", "text", "want"), CUTS)
def test_text_is_cut_as_the_models_were_trained(pre: str, text: str, want: list[str]) -> None:
    from cflow.engine.files.models.pretokenizers import PRE_TOKENIZERS
    from cflow.engine.files.models.vocabulary import byte_level_bpe

    tokenizer = byte_level_bpe(byte_characters(), [], list(PRE_TOKENIZERS[pre].patterns), [])
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in pieces] == want


def test_gpt2_bpe_equals_the_published_algorithm(data: Path, tmp_path: Path) -> None:
    """encoder.json and vocab.bpe through GGUF, against transformers' GPT-2 tokenizer."""
    from transformers import GPT2Tokenizer

    encoder = json.loads((data / "gpt2-bpe" / "encoder.json").read_text())
    merges = (data / "gpt2-bpe" / "vocab.bpe").read_text().split("\n")[1:-1]
    tokens = sorted(encoder, key=encoder.get)
    kinds = [3 if token == "<|endoftext|>" else 1 for token in tokens]
    builder = keys(
        tiny_llama(vocab=len(tokens), n_layers=1),
        ("tokenizer.ggml.model", "s", "gpt2"),
        ("tokenizer.ggml.pre", "s", "gpt-2"),
        ("tokenizer.ggml.tokens", "[s", tokens),
        ("tokenizer.ggml.token_type", "[i", kinds),
        ("tokenizer.ggml.merges", "[s", merges),
    )
    source = open_source(gguf(tmp_path, builder))
    source.close()
    ours = Tokenizer.from_str(source.vocabulary.tokenizer_json.decode())
    pairs: Any = [tuple(m.split(" ")) for m in merges]
    theirs = GPT2Tokenizer(vocab=encoder, merges=pairs)
    text = (data / "wikitext2" / "wiki.test.raw").read_text()[:50_000]
    for line in [*text.split("\n"), "日本語 🙂👍🏽 naïve\t\ttabs  \n\n  x", "a\u0301 \u200b"]:
        assert ours.encode(line).ids == theirs.encode(line), line
        assert ours.decode(ours.encode(line).ids) == line
    assert unicodedata.normalize("NFC", "a\u0301") == "á"
    assert source.vocabulary.eos_ids == [encoder["<|endoftext|>"]]


def spelled(tmp_path: Path, model: str, texts: list[str], kinds: list[int], *more: Any) -> Any:
    """The vocabulary of a GGUF file with these tokens."""
    builder = keys(
        tiny_llama(vocab=len(texts), n_layers=1),
        ("tokenizer.ggml.model", "s", model),
        ("tokenizer.ggml.tokens", "[s", texts),
        ("tokenizer.ggml.token_type", "[i", kinds),
        *more,
    )
    source = open_source(gguf(tmp_path, builder))
    source.close()
    return source.vocabulary


def test_gemma_4_takes_a_bos_whatever_its_file_says(tmp_path: Path) -> None:
    texts = ["<bos>", "<eos>", "a", "b", "ab", "\u2581", "<turn|>", "<|tool_response>", "<0xC3>"]
    found = spelled(
        *(tmp_path, "gemma4", texts, [3, 3, 1, 1, 1, 1, 3, 4, 6]),
        ("tokenizer.ggml.merges", "[s", ["a b"]),
        ("tokenizer.ggml.bos_token_id", "I", 0),
        ("tokenizer.ggml.eos_token_id", "I", 1),
        ("tokenizer.ggml.add_bos_token", "?", False),
    )
    assert (found.bos_id, found.add_bos, found.eos_ids) == (0, True, [1, 6, 7])
    assert found.tokens[5:] == [(b" ", 0), (b"<turn|>", 1), (b"<|tool_response>", 0), (b"\xc3", 0)]
    ours = Tokenizer.from_buffer(found.tokenizer_json)
    assert ours.encode("ab a<turn|>").ids == [4, 5, 2, 6]


def test_end_of_a_part_does_not_end_an_answer_with_calls(tmp_path: Path) -> None:
    texts, kinds = ["a", "<|end|>", "<|return|>", "<|call|>"], [1, 3, 3, 3]
    more: list[Any] = [
        ("tokenizer.ggml.pre", "s", "gpt-4o"),
        ("tokenizer.ggml.merges", "[s", []),
    ]
    assert spelled(tmp_path, "gpt2", texts, kinds, *more).eos_ids == [2, 3]
    texts[3] = "<|other|>"
    assert spelled(tmp_path, "gpt2", texts, kinds, *more).eos_ids == [1, 2]


def test_kimi_k2_needs_no_merges(tmp_path: Path) -> None:
    texts = ["a", "b", "c", "bc", "ab", "abc", "[EOT]"]
    kinds = [1, 1, 1, 1, 1, 1, 3]
    found = spelled(tmp_path, "gpt2", texts, kinds, ("tokenizer.ggml.pre", "s", "kimi-k2"))
    ours = Tokenizer.from_buffer(found.tokenizer_json)
    # The pair that forms the lowest id is merged first, as in tiktoken.
    assert [ours.encode(text).ids for text in ("ab", "abc", "abb", "abbc")] == [
        *([4], [5], [4, 1], [4, 3]),
    ]
    assert found.eos_ids == [6]
    with pytest.raises(ModelError, match="merges is not a list"):
        spelled(tmp_path, "gpt2", texts, kinds, ("tokenizer.ggml.pre", "s", "qwen2"))


@pytest.mark.parametrize(
    ("model", "kinds", "more", "message"),
    [
        ("llama", [1, 6], [], "token 1 is a byte, but its text is 'b'"),
        ("llama", [1, 1], [("scores", "[f", [0.0])], "does not hold 2"),
        ("llama", [1, 1], [("scores", "[f", [0.0, float("nan")])], "not finite"),
        ("llama", [1, 1], [("unknown_token_id", "I", 2)], "unknown_token_id is 2"),
        ("t5", [1, 1], [("precompiled_charsmap", "[b", [1, 0, 0, 0, 0])], "charsmap is damaged"),
        ("t5", [1, 1], [("precompiled_charsmap", "s", "x")], "not a list of bytes"),
        ("t5", [1, 1], [], "no unknown token"),
        ("bert", [1, 1], [], "no unknown token"),
        ("rwkv", [1, 1], [], "is 'rwkv', which is not supported; gpt2, llama, gemma4, t5, bert"),
    ],
)
def test_a_broken_vocabulary_of_pieces_is_refused(
    model: str, kinds: list[int], more: list[Any], message: str, tmp_path: Path
) -> None:
    changed = [(f"tokenizer.ggml.{name}", *value) for name, *value in more]
    with pytest.raises(ModelError, match=message):
        spelled(tmp_path, model, ["a", "b"], kinds, *changed)


def test_a_token_of_absurd_length_is_never_formed(tmp_path: Path) -> None:
    # All splits of it would be 2 TB of text.
    found = spelled(tmp_path, "llama", ["<unk>", "a", "aa", "a" * 2_000_000], [2, 1, 1, 1])
    assert Tokenizer.from_buffer(found.tokenizer_json).encode("aaa").tokens[-2:] == ["aa", "a"]
