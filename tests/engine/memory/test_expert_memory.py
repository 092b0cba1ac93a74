"""A model whose experts are larger than the memory it gets: what it reads and what it takes, as the
kernel counts them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import Delta, SamplingParams
from cflow.engine.client.local import LocalEngine
from cflow.engine.native import Context, Model
from harness.asking import submit
from makefiles.shape_file import synth_model
from oracles import running as native

N_LAYERS, N_EXPERTS, TOP_K = 20, 64, 4
# Gate, up and down of 480 x 512 weights, 18 bytes for 32 of them, and what is lacking to whole pages.
RECORD = 3 * 480 * 512 // 32 * 18 + 3072
BANK = N_LAYERS * N_EXPERTS * RECORD  # 535 MB
TOKENS = [(37 * i + 11) % 256 for i in range(40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("experts")
    file = synth_model(
        folder / "m.cflow", "qwen3moe", n_layers=N_LAYERS, d_model=512, heads=(4, 2, 64),
        n_experts=N_EXPERTS, top_k=TOP_K, d_expert=480, renormalise=True,
    )  # fmt: skip
    yield file
    file.unlink()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_token_reads_the_records_it_misses_and_nothing_else(path: Path) -> None:
    """3 records fit, so that no token finds one that it wants: each reads 80 of 1,280."""
    per_token = N_LAYERS * TOP_K * RECORD
    model = Model(str(path), experts={"cache": 3 * RECORD, "expert_reads": 2, "speculate": False})
    context = Context(model, threads=2, max_rows=1, max_sequences=1, max_context=64, n_kv_blocks=2)
    context.bind(0, range(2))
    native.step(context, native.rows(TOKENS[:1]))  # what is imported late is in memory by then
    before = read_bytes("self")
    for position, token in enumerate(TOKENS[1:], 1):
        (usage,) = context.step(native.rows([token], position)).usage
        assert (usage.expert_hits, usage.expert_misses) == (0, N_LAYERS * TOP_K)
        assert usage.disk_bytes == per_token
    read = read_bytes("self") - before
    tier = model.tier
    assert tier is not None
    assert tier.disk_bytes == tier.misses * RECORD == len(TOKENS) * per_token
    if tier.direct_io:  # or else the kernel may have had the file
        assert 1 <= read / ((len(TOKENS) - 1) * per_token) < 1.5  # code may be read again


@pytest.mark.anyio
async def test_memory_stays_within_weights_budget_and_keys_and_values(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kv, budget = 16 << 20, BANK // 10
    bound = path.stat().st_size - BANK + budget + kv + 300_000_000
    assert bound < BANK
    engine = await LocalEngine.start(
        EngineConfig(model=str(path), expert_cache=budget, kv_memory=kv)
    )
    try:
        ready = await engine.wait_ready()
        sampling = SamplingParams(max_tokens=24, temperature=1, seed=1, ignore_eos=True)
        answer = await submit(engine, TOKENS, sampling=sampling)
        usage = [event.disk async for event in answer if isinstance(event, Delta)][-1]
        most = 1024 * int(field(f"/proc/{ready.pid}/status", "VmHWM").split()[0])
    finally:
        await engine.close()
    assert usage is not None
    assert usage.disk_bytes == usage.expert_misses * RECORD > BANK // 2
    assert budget < most < bound


def read_bytes(pid: str) -> int:
    """What a process has had from disks."""
    return int(field(f"/proc/{pid}/io", "read_bytes"))


def field(path: str, name: str) -> str:
    """A line "name: value" of a file."""
    found = re.search(rf"^{name}:\s*(.*)$", Path(path).read_text(), re.MULTILINE)
    assert found
    return found[1]
