"""Stage order: where the plan puts each weight, derived by hand, and the same answer from there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine.base.errors import ModelError
from cflow.engine.files import synth
from cflow.engine.files.convert import convert
from cflow.engine.lab.arms import ARMS
from cflow.engine.lab.export import export
from cflow.engine.native import Model, crc32c
from makefiles.safetensors_file import tiny_folder
from oracles import pipelines, running, tiny
from oracles.model_file import MODEL_LEVEL, ModelFile
from oracles.random_model import EXPERTS, RandomModel

POST_ATTENTION, X_IN, X_IN_PREVIOUS = range(3)
COMBINED = EXPERTS | {"dense_source": X_IN_PREVIOUS, "expert_anchor": X_IN, "expert_delay": 2}
ASYNC = EXPERTS | {"dense_source": POST_ATTENTION, "expert_anchor": X_IN, "expert_delay": 2}
PROMPT = [(i * i + 3 * i) % tiny.VOCAB_SIZE for i in range(70)]


def resident(path: Path) -> str:
    """The resident bank from its first byte on: "gate.0" is block 0's."""
    tensors = ModelFile(path)._tensors.items()
    return " ".join(
        role if block == MODEL_LEVEL else f"{role}.{block}"
        for (block, role), tensor in sorted(tensors, key=lambda item: item[1]["offset"])
        if not role.startswith("expert_")
    )


def bank(path: Path) -> list[tuple[int, int]]:
    """(block, expert) of the records from the bank's first byte on."""
    records = ModelFile(path)._experts
    return sorted(records, key=lambda key: records[key]["offset"])


def random_model(path: Path, *layers: dict[str, Any]) -> Path:
    return RandomModel(layers).write(path, "q4_0")


# ---- where weights lie ----


def test_a_delayed_dense_lies_beside_the_attention_it_runs_with(tmp_path: Path) -> None:
    """arch2_4_combined. Dense l reads x_in[l-1] (layers 0 and 1 both the embedding), so it runs
    beside Q, K, V of layer l-1 and ends before that layer's O; its norm comes with its source."""
    two = random_model(tmp_path / "two.vflow", COMBINED, COMBINED)
    assert resident(two) == (
        "embedding norm1.0 norm2.0 norm2.1 "
        "router.0 q.0 k.0 v.0 gate.0 up.0 gate.1 up.1 down.0 down.1 o.0 "
        "norm1.1 router.1 q.1 k.1 v.1 o.1 final_norm head"
    )
    three = random_model(tmp_path / "three.vflow", COMBINED, COMBINED, COMBINED)
    assert resident(three) == (
        "embedding norm1.0 norm2.0 norm2.1 "
        "router.0 q.0 k.0 v.0 gate.0 up.0 gate.1 up.1 down.0 down.1 o.0 "
        "norm1.1 norm2.2 router.1 q.1 k.1 v.1 gate.2 up.2 down.2 o.1 "
        "norm1.2 router.2 q.2 k.2 v.2 o.2 final_norm head"
    )


def test_an_early_router_lies_before_the_attention_it_runs_ahead_of(tmp_path: Path) -> None:
    """arch4: routers read x_in, the dense stays behind the attention."""
    path = random_model(tmp_path / "x.vflow", ASYNC, ASYNC)
    layer = "norm1.{0} norm2.{0} router.{0} q.{0} k.{0} v.{0} o.{0} gate.{0} up.{0} down.{0}"
    want = f"embedding {layer.format(0)} {layer.format(1)} final_norm head"
    assert resident(path) == want


def test_experts_lie_in_the_order_of_their_injection(tmp_path: Path) -> None:
    """Layer 0's experts join after layer 3, with layer 3's own; 1 and 2 join their own layers. The
    table stays by block and expert."""
    delays = (3, 0, 0, 0)
    layers = [EXPERTS | {"expert_anchor": X_IN, "expert_delay": delay} for delay in delays]
    path = random_model(tmp_path / "x.vflow", *layers)
    assert bank(path) == [(block, e) for block in (1, 2, 0, 3) for e in range(6)]
    assert list(ModelFile(path)._experts) == [(block, e) for block in range(4) for e in range(6)]
    offsets = [ModelFile(path)._experts[key]["offset"] for key in bank(path)]
    assert np.all(np.diff(offsets) == 4096 * -(-ModelFile(path)._experts[0, 0]["bytes"] // 4096))


def test_a_tied_embedding_lies_where_the_head_reads_it(tmp_path: Path) -> None:
    path = RandomModel([COMBINED, COMBINED], tied=1).write(tmp_path / "x.vflow")
    assert resident(path).startswith("norm1.0 norm2.0 norm2.1 router.0 q.0 ")
    assert resident(path).endswith(" o.1 final_norm embedding")


def test_gate_and_up_stay_interleaved(tmp_path: Path) -> None:
    file = ModelFile(random_model(tmp_path / "x.vflow", COMBINED, COMBINED))
    gate, up = file._tensors[1, "gate"], file._tensors[1, "up"]
    assert up["offset"] == gate["offset"] + gate["stripe_stride"] // 2
    assert up["stripe_stride"] == gate["stripe_stride"] == 2 * 96 // 16 * 2 * 288


# ---- what a stock model loses by it: nothing ----

STOCK = "llama-tied llama-attention-bias qwen2 qwen3 mixtral qwen3moe olmoe".split()  # noqa: SIM905


def pair(folder: Path, source: Path, quant: str = "q4_0") -> tuple[Path, Path]:
    """The same model by layer and by stage."""
    paths = folder / "x.cflow", folder / "x.vflow"
    for path in paths:
        convert(str(source), path, quant=quant)
    return paths


def arm(folder: Path, name: str) -> Path:
    export(pipelines.build(ARMS[name]), folder / "hf", tiny.byte_tokenizer())
    return folder / "hf"


def but_for_the_order(path: Path) -> bytes:
    """The file with the header's order and its checksum blanked out."""
    data = bytearray(path.read_bytes())
    data[12:16] = data[4092:4096] = bytes(4)
    return bytes(data)


@pytest.mark.parametrize("name", [*STOCK, "sequential", "arch5"])
def test_a_model_that_runs_layer_by_layer_is_the_same_in_both(name: str, tmp_path: Path) -> None:
    is_arm = name in ARMS
    source = arm(tmp_path, name) if is_arm else tiny.save(tiny.build(name), tmp_path / "hf")
    by_layer, by_stage = pair(tmp_path, source)
    assert (ModelFile(by_layer).header["order"], ModelFile(by_stage).header["order"]) == (0, 1)
    assert by_layer.read_bytes() != by_stage.read_bytes()
    assert but_for_the_order(by_layer) == but_for_the_order(by_stage)


def test_only_the_scale_of_a_shared_expert_moves(tmp_path: Path) -> None:
    """It is read with the router, before the shared expert that it scales."""
    by_layer, by_stage = pair(tmp_path, tiny.save(tiny.build("qwen2moe"), tmp_path / "hf"))
    want = resident(by_layer)
    for block in range(3):
        want = want.replace(f" shared_scale.{block}", "")
        want = want.replace(f" router.{block}", f" router.{block} shared_scale.{block}")
    assert resident(by_stage) == want


# ---- the same bits ----


@pytest.fixture(
    scope="module",
    params=["llama", "qwen2moe", "arch2_4_combined", "arch4_async_experts", "arch5"],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    is_arm = request.param in ARMS
    source = (
        arm(folder, request.param) if is_arm else tiny.save(tiny.build(request.param), folder / "s")
    )
    return pair(folder, source)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_logits_have_the_same_bits(both: tuple[Path, Path], threads: int) -> None:
    found = []
    for path in both:
        with running.opened(path, max_context=128, threads=threads) as context:
            found.append(running.logits(context, PROMPT, chunk=16).tobytes())
    assert found[0] == found[1]


def test_weights_are_the_same_and_stored_once(both: tuple[Path, Path]) -> None:
    by_layer, by_stage = map(ModelFile, both)
    assert by_layer.sections[7][1] == by_stage.sections[7][1]
    assert by_layer.sections[8][1] == by_stage.sections[8][1]
    assert by_layer._tensors.keys() == by_stage._tensors.keys()
    for block, role in by_layer._tensors:
        for expert in range(8 if role.startswith("expert_") else 1):
            want = by_layer.weight(block, role, expert)
            np.testing.assert_array_equal(by_stage.weight(block, role, expert), want)


def test_the_answer_hangs_on_offsets_and_not_on_the_claimed_order(tmp_path: Path) -> None:
    """Plans may change from build to build: a file that an older one laid out is still right."""
    path = random_model(tmp_path / "x.cflow", COMBINED, COMBINED, COMBINED)
    data = bytearray(path.read_bytes())
    data[12:16] = (1).to_bytes(4, "little")
    data[4092:4096] = crc32c(bytes(data[:4092])).to_bytes(4, "little")
    claims = tmp_path / "claims.vflow"
    claims.write_bytes(data)
    found = []
    for one in (path, claims):
        with running.opened(one, max_context=128) as context:
            found.append(running.logits(context, list(range(20))).tobytes())
    assert found[0] == found[1]


# ---- names and faults ----


@pytest.mark.parametrize(
    ("name", "order", "want"),
    [
        ("x.cflow", None, 0),
        ("x.vflow", None, 1),
        ("x.cflow", "layer", 0),
        ("x.vflow", "stage", 1),
        ("x", None, 0),
        ("x", "stage", 1),
    ],
)
def test_the_suffix_is_the_order(name: str, order: str | None, want: int, tmp_path: Path) -> None:
    out = tmp_path / name
    convert(str(tiny_folder(tmp_path / "m")), out, order=order)
    assert ModelFile(out).header["order"] == want
    synth.synth("smollm2-135m", out, order=order)
    assert ModelFile(out).header["order"] == want


@pytest.mark.parametrize(
    ("name", "order", "message"),
    [
        ("x.cflow", "stage", r"x\.cflow is the name of a file in layer order.* end in \.vflow"),
        ("x.vflow", "layer", r"x\.vflow is the name of a file in stage order.* end in \.cflow"),
        ("x.cflow", "column", "--order column is not known; one of layer, stage"),
    ],
)
def test_a_name_that_contradicts_the_order_is_refused(
    name: str, order: str, message: str, tmp_path: Path
) -> None:
    source = tiny_folder(tmp_path / "m")
    with pytest.raises(ModelError, match=message):
        convert(str(source), tmp_path / name, order=order)
    with pytest.raises(ModelError, match=message):
        synth.synth("smollm2-135m", tmp_path / name, order=order)
    assert not (tmp_path / name).exists()


def test_a_cut_or_altered_file_is_refused_by_name(tmp_path: Path) -> None:
    path = random_model(tmp_path / "x.vflow", COMBINED, COMBINED)
    good = path.read_bytes()
    file = ModelFile(path)
    gate, record = file._tensors[1, "gate"], file._experts[1, 2]
    for n in (0, 4095, 4096, file.sections[7][0], len(good) - 4096, len(good) - 1):
        path.write_bytes(good[:n])
        with pytest.raises(ModelError, match="truncated"):
            Model(str(path))
    altered = {
        file.sections[7][0] + gate["offset"]: "resident bank, run 0",
        file.sections[8][0] + record["offset"]: "expert bank, block 1 expert 2",
    }
    for at, name in altered.items():
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ModelError, match=name):
            Model(str(path))
