"""Conversion: every value arrives, and a refusal names its cause and leaves nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from cflow.engine.base.errors import ModelError
from cflow.engine.files.convert import convert
from cflow.engine.native import Model
from makefiles.conversion import converted, gguf, keys, tensor, vocabulary
from makefiles.gguf_file import GgufBuilder, Tensor, tiny_llama
from makefiles.safetensors_file import tiny_folder, tiny_tensors

LEVEL = 0xFFFFFFFF


def quantised_llama(type_name: str) -> tuple[GgufBuilder, dict[str, np.ndarray]]:
    """A llama whose matrices are random blocks of a GGML type, and gguf-py's reading of them."""
    kind = GGMLQuantizationType[type_name]
    builder = tiny_llama(d_model=256, n_layers=1)
    rng = np.random.default_rng(2)
    block, size = GGML_QUANT_SIZES[kind]
    want: dict[str, NDArray[Any]] = {}
    for t in builder.tensors:
        if len(t.dims) == 2 and t.dims[0] % block == 0:
            raw = rng.integers(0, 256, (t.dims[1], t.dims[0] // block, size), np.uint8)
            for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(
                type_name, (0,)
            ):
                scales = rng.standard_normal((*raw.shape[:2], 1)).astype(np.float16)
                raw[..., at : at + 2] = scales.view(np.uint8)
            t.type, t.data = int(kind), raw.tobytes()
            want[str(t.name)] = dequantize(raw.reshape(t.dims[1], -1), kind)
    return builder, want


@pytest.mark.parametrize(
    ("type_name", "encoding"),
    [
        ("Q4_0", "q4_0"),
        ("Q4_1", "q4_1"),
        ("Q5_0", "q8_0"),
        ("Q8_0", "q8_0"),
        ("Q4_K", "q4_k"),
        ("Q5_K", "q8_1"),
        ("Q6_K", "q6_k"),
    ],
)
def test_keep_holds_every_type(type_name: str, encoding: str, tmp_path: Path) -> None:
    builder, want = quantised_llama(type_name)
    file = converted(gguf(tmp_path, builder))
    for name, role in {"attn_q": "q", "attn_k": "k", "ffn_up": "up"}.items():
        assert file.encoding(0, role) == encoding
        got = file.weight(0, role).astype(np.float32)
        reference = want[f"blk.0.{name}.weight"]
        if type_name == "Q5_K":
            np.testing.assert_allclose(got, reference, atol=1e-3 * np.abs(reference).max())
        else:
            np.testing.assert_array_equal(got, reference)


@pytest.mark.parametrize("quant", ["f32", "f16", "bf16", "q8_0", "q4_1", "q4_0"])
def test_quant_applies_to_every_matrix(quant: str, tmp_path: Path) -> None:
    file = converted(tiny_folder(tmp_path / "m"), quant=quant)
    tolerance = {"f32": 0, "f16": 1e-3, "bf16": 2e-2, "q8_0": 0.02, "q4_1": 0.25, "q4_0": 0.35}
    source = tiny_tensors()
    names = {"q": "self_attn.q_proj", "down": "mlp.down_proj", "up": "mlp.up_proj"}
    for role, name in names.items():
        assert file.encoding(0, role) == quant
        want = source[f"model.layers.0.{name}.weight"]
        np.testing.assert_allclose(file.weight(0, role), want, atol=tolerance[quant])
    assert file.encoding(LEVEL, "embedding") == quant
    assert file.encoding(0, "norm1") == "f32"
    np.testing.assert_array_equal(
        file.weight(0, "norm1"), source["model.layers.0.input_layernorm.weight"]
    )
    assert file.metadata["quantisation"] == quant


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    source = str(tiny_folder(tmp_path / "m"))
    with pytest.raises(ModelError, match="--quant q3_k"):
        convert(source, tmp_path / "x.cflow", quant="q3_k")


def drop(name: str) -> Callable[[GgufBuilder], None]:
    return lambda b: b.tensors.remove(tensor(b, name))


def change(name: str, **fields: Any) -> Callable[[GgufBuilder], None]:
    def edit(b: GgufBuilder) -> None:
        for k, v in fields.items():
            setattr(tensor(b, name), k, v)

    return edit


def key(name: str, kind: str, content: Any) -> Callable[[GgufBuilder], None]:
    def edit(b: GgufBuilder) -> None:
        keys(b, (name, kind, content))

    return edit


def poison(name: str, number: float) -> Callable[[GgufBuilder], None]:
    def edit(builder: GgufBuilder) -> None:
        values = np.frombuffer(tensor(builder, name).bytes(), np.float32).copy()
        values[-1] = number
        tensor(builder, name).data = values.tobytes()

    return edit


REFUSALS: dict[str, tuple[Callable[[GgufBuilder], Any], str]] = {
    "architecture": (
        key("general.architecture", "s", "mamba"),
        "unknown architecture 'mamba'; supported: llama, qwen2, qwen3, qwen2moe, qwen3moe, olmoe, gemma2",
    ),
    "missing tensor": (drop("blk.1.attn_k.weight"), r"blk\.1\.attn_k\.weight is missing"),
    "missing norm": (drop("output_norm.weight"), r"output_norm\.weight is missing"),
    "missing embedding": (drop("token_embd.weight"), r"token_embd\.weight is missing"),
    "wrong shape": (
        change("blk.0.attn_v.weight", dims=[32, 64]),
        r"blk\.0\.attn_v\.weight has the shape \(64, 32\), \(32, 64\) is expected",
    ),
    "vector for a matrix": (change("blk.0.attn_v.weight", dims=[2048]), r"shape \(2048,\)"),
    "leftover": (
        lambda b: b.tensors.append(Tensor("blk.0.attn_sinks.weight", [4])),
        r"without a known role: blk\.0\.attn_sinks\.weight",
    ),
    "one layer too few": (key("llama.block_count", "I", 1), r"without a known role: blk\.1\."),
    "NaN in a matrix": (
        poison("blk.1.ffn_down.weight", np.nan),
        r"blk\.1\.ffn_down\.weight holds NaN",
    ),
    "infinity in a norm": (
        poison("blk.0.ffn_norm.weight", np.inf),
        r"blk\.0\.ffn_norm\.weight holds NaN or inf",
    ),
    "no heads": (key("llama.attention.head_count", "I", 0), "head_count is 0"),
    "heads a string": (key("llama.attention.head_count", "s", "4"), "an integer is required"),
    "heads a bool": (key("llama.attention.head_count", "?", True), "an integer is required"),
    "heads an array": (key("llama.attention.head_count", "[I", [4, 4]), "an integer is required"),
    "KV heads do not divide": (key("llama.attention.head_count_kv", "I", 3), "3 KV heads"),
    "KV heads 0": (key("llama.attention.head_count_kv", "I", 0), "head_count_kv is 0"),
    "layers 2^32 - 1": (key("llama.block_count", "I", 2**32 - 1), "block_count is 4294967295"),
    "epsilon NaN": (
        key("llama.attention.layer_norm_rms_epsilon", "f", float("nan")),
        "not finite",
    ),
    "epsilon negative": (key("llama.attention.layer_norm_rms_epsilon", "f", -1.0), "above 0"),
    "rope base 0": (key("llama.rope.freq_base", "f", 0.0), "freq_base is 0"),
    "rope dimensions odd": (key("llama.rope.dimension_count", "I", 15), "15 rotary"),
    "rope dimensions too many": (key("llama.rope.dimension_count", "I", 64), "2 to 16"),
    "yarn": (key("llama.rope.scaling.type", "s", "yarn"), "original_context_length is missing"),
    "longrope": (key("llama.rope.scaling.type", "s", "longrope"), "tensors of its factors"),
    "value length": (key("llama.attention.value_length", "I", 8), "value_length is 8"),
    "softcapping an array": (
        key("llama.final_logit_softcapping", "[f", [0.0, 0.0]),
        "which is not supported",
    ),
    "temperature below 0": (
        lambda b: keys(vocabulary(b), ("general.sampling.temp", "f", -1.0)),
        r"generation temperature is -1\.0; it must be a number from 0 to 100",
    ),
    "softcapping": (key("llama.final_logit_softcapping", "f", 30.0), "softcapping is 30"),
    "architecture missing": (key("general.architecture", "I", 1), "a string is required"),
    "SentencePiece without tokens": (
        key("tokenizer.ggml.model", "s", "llama"),
        r"tokenizer\.ggml\.tokens is not a list",
    ),
    "tokens missing": (key("tokenizer.ggml.model", "s", "gpt2"), "tokens is not a list"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_refusal_names_the_thing_and_leaves_no_output(fault: str, tmp_path: Path) -> None:
    edit, message = REFUSALS[fault]
    builder = tiny_llama()
    edit(builder)
    path = gguf(tmp_path, builder)
    with pytest.raises(ModelError, match=message):
        convert(str(path), tmp_path / "out.cflow")
    assert os.listdir(tmp_path) == ["x.gguf"]


HF_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "unknown architecture 'GPT2LMHead.*llama|Llama",
    ),
    "two architectures": ({"architectures": ["A", "B"]}, "does not name one class"),
    "mlp bias": ({"mlp_bias": True}, r"mlp\.gate_proj\.bias is missing"),
    "attention bias": ({"attention_bias": True}, r"q_proj\.bias is missing"),
    "clip": ({"clip_qkv": 8.0}, r"clip_qkv is 8\.0"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": -4.0}}, "factor is -4"),
    "dynamic": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "rope_type is 'dynamic'",
    ),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor is None"),
    "rope per layer": ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, "differ between layers"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "width missing": ({"hidden_size": None}, "hidden_size is missing"),
    "vocabulary": ({"vocab_size": 65}, r"embed_tokens\.weight has the shape \(64, 64\)"),
    "untied without a head": ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    "eos a string": ({"eos_token_id": "2"}, "token ids are required"),
}


@pytest.mark.parametrize("fault", HF_REFUSALS)
def test_a_config_we_cannot_run_is_refused(fault: str, tmp_path: Path) -> None:
    change, message = HF_REFUSALS[fault]
    path = tiny_folder(tmp_path / "m", **change)
    with pytest.raises(ModelError, match=message):
        convert(str(path), tmp_path / "out.cflow")
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_refused_unread(name: str, tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "m")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(ModelError, match=f"{name}: it is not a regular file"):
        convert(str(path), tmp_path / "out.cflow")


def test_a_name_that_is_not_utf8_is_converted_and_opened(tmp_path: Path) -> None:
    builder = tiny_llama()
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe9le.gguf"))
    source.write_bytes(builder.build())
    out = source.with_suffix(".cflow")
    convert(str(source), out)
    assert Model(str(out), header_only=True).metadata["source"] == "mod?le.gguf"


@pytest.mark.parametrize("n", [250, 300])  # the temporary file's name is longer
def test_names_too_long_are_refused(n: int, tmp_path: Path) -> None:
    source = gguf(tmp_path, tiny_llama())
    with pytest.raises(ModelError, match=r"cannot write .*: File name too long"):
        convert(str(source), tmp_path / ("x" * n))
    with pytest.raises(ModelError, match="does not exist"):
        convert("x" * n, tmp_path / "out.cflow")


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        convert(str(gguf(tmp_path, tiny_llama())), tmp_path)


def test_a_source_is_never_its_own_output(tmp_path: Path) -> None:
    source = gguf(tmp_path, tiny_llama())
    before = source.read_bytes()
    link = tmp_path / "same.cflow"
    link.symlink_to(source)
    for out in (source, link):
        with pytest.raises(ModelError, match="is the source itself"):
            convert(str(source), out)
    assert source.read_bytes() == before


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        convert(str(tmp_path / "no.gguf"), tmp_path / "out.cflow")


def test_mutated_keys_are_refused_or_converted(tmp_path: Path) -> None:
    """Whatever a header says, the converter answers with a file or a ModelError."""
    rng = np.random.default_rng(9)
    good = tiny_llama(n_layers=1, d_model=32, vocab=8)
    vocabulary(good)
    data = good.build()
    header = data.index(b"token_embd.weight")
    path, out = tmp_path / "x.gguf", tmp_path / "out.cflow"
    n_converted = 0
    for _ in range(1_500):
        mutated = bytearray(data)
        for at in rng.integers(24, header, size=rng.integers(1, 3)):
            mutated[at] = rng.integers(256)
        path.write_bytes(mutated)
        try:
            convert(str(path), out)
            n_converted += 1
        except ModelError:
            assert not out.exists()
        out.unlink(missing_ok=True)
    assert 20 < n_converted < 1_480
