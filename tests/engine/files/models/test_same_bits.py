"""A row's logits do not depend on how it was computed: compared bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cflow.engine.files.convert import convert
from cflow.engine.native import Context, best_isa
from oracles import running, tiny
from oracles.real_models import RealModel

Logits = NDArray[np.float32]
PROMPT = [(7 * i * i + 3 * i + 1) % tiny.VOCAB_SIZE for i in range(75)]
OTHERS = [[(5 * i + k) % tiny.VOCAB_SIZE for i in range(40)] for k in (1, 2, 3)]
ISAS = ("scalar", "avx2", "avx512vnni")


@pytest.fixture(scope="module", params=["q4_0", "q8_0", "bf16", "smollm2-135m"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE model with a shared expert in three encodings, and a real dense one."""
    if request.param == "smollm2-135m":
        return RealModel.fetch(request.param).cflow
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.save(tiny.build("qwen2moe"), folder / "hf")
    convert(str(source), folder / "model.cflow", quant=request.param)
    return folder / "model.cflow"


@pytest.fixture(scope="module")
def want(path: Path) -> Logits:
    """Row by row, one thread."""
    with running.opened(path, threads=1) as context:
        return running.logits(context, PROMPT, chunk=1)


@pytest.fixture(scope="module")
def context(path: Path) -> Iterator[Context]:
    with running.opened(path) as context:
        yield context


def assert_same_bits(got: Logits, want: Logits) -> None:
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes(), f"max difference {np.abs(got - want).max()}"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_in_chunks(context: Context, want: Logits, chunk: int) -> None:
    assert_same_bits(running.logits(context, PROMPT, chunk), want)


def test_among_other_sequences(context: Context, want: Logits) -> None:
    """Every step mixes one row of the prompt with rows of three prompts at other positions."""
    batches = [running.rows(PROMPT)]
    batches += [running.rows(o, sequence=i) for i, o in enumerate(OTHERS, start=1)]
    first = running.logits(context, PROMPT[:30])
    rest = []
    for i in range(30, len(PROMPT)):
        others = [row for other in batches[1:] for row in other[i - 30 : i - 29]]
        batch = [*others, batches[0][i]]
        rest.append(running.step(context, batch)[-1])
    assert_same_bits(np.concatenate([first, rest]), want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(path: Path, want: Logits, threads: int) -> None:
    with running.opened(path, threads=threads) as context:
        assert_same_bits(running.logits(context, PROMPT), want)


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(path: Path, want: Logits, isa: str) -> None:
    require(isa)
    is_slow = isa == "scalar" and path.stat().st_size > 50 << 20
    n = 9 if is_slow else len(PROMPT)
    with running.opened(path, isa=isa) as context:
        assert_same_bits(running.logits(context, PROMPT[:n]), want[:n])


def test_prefix_that_another_sequence_left_in_the_cache(context: Context, want: Logits) -> None:
    running.logits(context, PROMPT[:64], sequence=0)
    n_blocks = 512 // running.KV_BLOCK
    own = range(n_blocks + 2, 2 * n_blocks)
    context.bind(1, [0, 1, *own])  # two full blocks of sequence 0, then its own
    try:
        got = running.step(context, running.rows(PROMPT[64:], first=64, sequence=1))
    finally:
        context.bind(1, range(n_blocks, 2 * n_blocks))
    assert_same_bits(got, want[64:])


def test_a_copied_block_is_as_good_as_its_original(context: Context, want: Logits) -> None:
    running.logits(context, PROMPT[:40], sequence=0)
    n_blocks = 512 // running.KV_BLOCK
    for block in (0, 1):
        context.copy_block(block, 2 * n_blocks + block)
    got = running.step(context, running.rows(PROMPT[40:], first=40, sequence=2))
    assert_same_bits(got, want[40:])


def require(isa: str) -> None:
    """Skips where this machine lacks an instruction set."""
    if ISAS.index(isa) > ISAS.index(best_isa()):
        pytest.skip(f"this machine has no {isa}")
