"""Random models: the shapes are the real ones, and what is written can be computed with."""

from pathlib import Path

import numpy as np
import pytest

from cflow.engine import native
from cflow.engine.base.errors import ModelError
from cflow.engine.files import shapes, synth
from oracles.forward import Forward
from oracles.model_file import MODEL_LEVEL, ModelFile

# Published parameter counts; pipeline-native ones from the published totals (docs/delays.md).
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "llama3-8b": 8_030_261_248,
    "qwen2.5-32b": 32_763_876_352,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "arch2_4_8k_16l": 30.89e9,
    "arch2_4_8k_4l": 8.340e9,
    # 114.4 million by hand: 6 layers of attention 4 d^2, dense 3 d 2048, 8 experts 3 d 512, router 8 d
    # and two norms, embedding and head, the last norm.
    **dict.fromkeys(
        (
            "sequential_d512",
            "parallel_d512",
            "arch2_4_combined_d512",
            "arch2_4_sync_d512",
            "arch4_async_experts_d512",
        ),
        114_408_960,
    ),
    "arch5_d512": 72_445_440,  # two such layers
}


def test_every_shape_has_the_published_size() -> None:
    assert shapes.shape_names() == sorted(PARAMETERS)
    for name, want in PARAMETERS.items():
        assert synth.load_shape(name).n_parameters() == pytest.approx(want, rel=1e-4)


def test_headers_of_every_shape_pass_the_engine(tmp_path: Path) -> None:
    for name in shapes.shape_names():
        path = tmp_path / f"{name}.cflow"
        synth.synth_header(name, path)
        model = native.Model(str(path), header_only=True)
        spec = synth.load_shape(name)
        assert model.header.n_blocks == len(spec.layers)
        assert model.header.n_layers == len(spec.layers) * spec.passes
        assert model.plan.bytes_per_token > 0
        model.close()


SMALL = """
architecture = "arch2_4"
n_layers = 12
d_model = 128
vocab_size = 300
context = 64
tied = {tied}
norm_eps = 1e-5
[layer]
n_heads = 4
n_kv_heads = 2
head_dim = 32
d_ff = 256
activation = "gelu_tanh"
activation_on_up = true
n_experts = 8
top_k = 2
d_expert = 64
renormalise = true
dense_source = "x_in_previous"
expert_anchor = "x_in"
expert_delay = 2
[layer.rope]
kind = "half"
dim = 32
base = 1e4
"""


def small(tmp_path: Path, name: str, *, seed: int = 0, tied: bool = False) -> Path:
    shape = tmp_path / "small.toml"
    shape.write_text(SMALL.format(tied=str(tied).lower()))
    synth.synth(str(shape), tmp_path / name, seed=seed)
    return tmp_path / name


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    one, two, other = (small(tmp_path, n, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_weights_keep_the_size_of_what_passes_through(tmp_path: Path) -> None:
    """Matrices that write to the stream of 12 layers are smaller by sqrt(2 x 12)."""
    file = ModelFile(small(tmp_path, "x.cflow"))
    for role, size in (("q", 1), ("up", 1), ("router", 1), ("o", 24**-0.5), ("down", 24**-0.5)):
        weight = file.weight(11, role)
        assert weight.std() * np.sqrt(weight.shape[1]) == pytest.approx(size, rel=0.1)
        assert abs(weight.mean()) < 0.1 * weight.std()
    down = file.weight(11, "expert_down", 3)
    assert down.std() * np.sqrt(down.shape[1]) == pytest.approx(24**-0.5, rel=0.1)
    assert not np.array_equal(file.weight(0, "expert_up", 0), file.weight(0, "expert_up", 1))


def test_logits_stay_finite_and_of_moderate_size_through_twelve_layers(tmp_path: Path) -> None:
    logits = Forward(ModelFile(small(tmp_path, "x.cflow")), list(range(40, 70))).logits
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize(("tied", "size"), [(False, 1.0), (True, 128**-0.5)])
def test_an_embedding_is_larger_than_what_layers_add_unless_it_is_the_head(
    tied: bool, size: float, tmp_path: Path
) -> None:
    path = small(tmp_path, "x.cflow", tied=tied)
    assert ModelFile(path).weight(MODEL_LEVEL, "embedding").std() == pytest.approx(size, rel=0.1)


def test_a_byte_is_a_token_and_other_rows_are_none(tmp_path: Path) -> None:
    model = native.Model(str(small(tmp_path, "x.cflow", tied=True)))
    assert (model.header.n_tokens, model.header.vocab_size, model.header.tied) == (256, 300, 1)
    model.close()


@pytest.mark.parametrize("shape", ["no-such-shape", "../olmoe-1b-7b", "missing.toml", ""])
def test_an_unknown_shape_lists_the_known_ones(shape: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"olmoe-1b-7b, parallel_d512"):
        synth.synth(shape, tmp_path / "x.cflow")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n_layers = 12\n", ""),
        ("n_layers = 12", 'n_layers = "12"'),
        ("d_ff = 256", "d_fff = 256"),
        ("n_heads = 4", "n_heads = 3"),
        ("top_k = 2", "top_k = 9"),
        ('"half"', '"spiral"'),
        ("[layer]", "[layer"),
    ],
)
def test_a_wrong_shape_file_is_refused(old: str, new: str, tmp_path: Path) -> None:
    shape = tmp_path / "wrong.toml"
    shape.write_text(SMALL.format(tied="false").replace(old, new))
    with pytest.raises(ModelError):
        synth.synth(str(shape), tmp_path / "x.cflow")
    assert not (tmp_path / "x.cflow").exists()
