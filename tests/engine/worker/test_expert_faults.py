"""Model files that are altered, cut or replaced while a worker reads experts from them."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, DiskStats, SamplingParams
from cflow.engine.client.local import LocalEngine
from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Context, Model
from harness.asking import submit
from harness.waiting import until_async
from oracles import running as native
from oracles.random_model import VOCAB_SIZE, RandomModel

pytestmark = pytest.mark.anyio

N_EXPERTS = 32
EXPERTS = {"n_experts": N_EXPERTS, "top_k": 2, "d_expert": 48}
N_TOKENS = 4
GREEDY = SamplingParams(max_tokens=N_TOKENS, temperature=0, ignore_eos=True, n_logprobs=0)
PROMPTS = [[(i * 37 + j * 11) % VOCAB_SIZE for j in range(3 + i % 3)] for i in range(40)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of experts that another test has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Case(NamedTuple):
    """A file, its experts' places, and what each prompt needs and says where nothing is wrong."""

    path: Path
    places: list[int]  # in the file, of record 32 layer + expert
    record_bytes: int
    needed: list[set[int]]  # records
    answers: list[list[int]]
    at_start: set[int]  # records of the token that a worker makes first

    def split(self, broken: set[int]) -> tuple[list[int], list[int]]:
        """The prompts that need one of these records, and the others; some of each."""
        assert not broken & self.at_start
        hit = [i for i, records in enumerate(self.needed) if records & broken]
        spared = [i for i in range(len(PROMPTS)) if i not in hit]
        assert hit
        assert spared
        return hit, spared


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("faults")
    path = RandomModel([dict(EXPERTS)] * 2, seed=2).write(folder / "m.cflow", "q8_0")
    bank = ExpertBank.of(Model(str(path), header_only=True))
    needed, answers = [], []
    with native.opened(path, n_sequences=1, keep_values=True) as context:
        for prompt in PROMPTS:
            answers.append(native.greedy(context, prompt, N_TOKENS))
            needed.append(_routed(context, [*prompt, *answers[-1][:-1]]))
        at_start = _routed(context, [0])
    return Case(path, list(bank.offsets), bank.record_bytes, needed, answers, at_start)


def _routed(context: Context, tokens: list[int]) -> set[int]:
    native.logits(context, tokens)
    return {
        N_EXPERTS * layer + int(expert)
        for layer in (0, 1)
        for row in range(len(tokens))
        for expert in context.value(f"L{layer}.routed", row)
    }


@pytest.fixture
def file(case: Case, tmp_path: Path) -> Path:
    return Path(shutil.copy(case.path, tmp_path / "served.cflow"))


@asynccontextmanager
async def serving(path: Path, **settings: Any) -> AsyncIterator[LocalEngine]:
    """With the smallest cache there is."""
    smallest: dict[str, Any] = {"expert_cache": "6%", "expert_reads": 2}
    engine = await LocalEngine.start(EngineConfig(model=str(path), **smallest, **settings))
    try:
        await engine.wait_ready()
        yield engine
        assert engine.restarts == 0
    finally:
        await engine.close()


Said = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, log-probabilities


async def ask(engine: LocalEngine, i: int) -> Said | EngineError:
    tokens: list[int] = []
    scores: list[float] = []
    try:
        async for event in await submit(engine, PROMPTS[i], sampling=GREEDY):
            if isinstance(event, Delta):
                tokens += event.tokens
                scores += [score.logprob for score in event.logprobs]
    except EngineError as error:
        return error
    return tuple(tokens), tuple(scores)


async def ask_all(engine: LocalEngine) -> list[Said | EngineError]:
    return await asyncio.gather(*(ask(engine, i) for i in range(len(PROMPTS))))


def check_answers(said: list[Said | EngineError], clean: list[Said], which: list[int]) -> None:
    assert {i: said[i] for i in which} == {i: clean[i] for i in which}


@pytest.fixture(scope="module")
def clean(case: Case) -> list[Said]:
    """What is said with all experts in memory, one request at a time; bits count."""

    async def gather() -> list[Said]:
        engine = await LocalEngine.start(EngineConfig(model=str(case.path)))
        try:
            ready = await engine.wait_ready()
            assert ready.n_experts == 0
            return [cast(Said, await ask(engine, i)) for i in range(len(PROMPTS))]
        finally:
            await engine.close()

    said = asyncio.run(gather())
    assert [list(tokens) for tokens, _ in said] == case.answers
    return said


async def test_answers_and_accounts_with_the_smallest_cache(
    case: Case, clean: list[Said], file: Path
) -> None:
    async with serving(file) as engine:
        assert engine.ready is not None
        assert (engine.ready.n_experts, engine.ready.n_expert_slots) == (64, 3)
        assert await ask_all(engine) == clean
        experts = await stats_where(engine, lambda e: e.misses > 0)
        assert experts.disk_bytes == (experts.misses + experts.extra_reads) * case.record_bytes
        assert sum(experts.latencies) == experts.reads
        assert experts.n_resident <= 3


@pytest.mark.parametrize("expert_io", ["direct", "cached"])
async def test_an_altered_expert_ends_whom_it_concerns_until_it_is_right_again(
    case: Case, clean: list[Said], file: Path, expert_io: str
) -> None:
    broken = pick_broken(case)
    hit, spared = case.split({broken})
    place, data = case.places[broken] + 100, file.read_bytes()
    async with serving(file, expert_io=expert_io) as engine:
        write_at(file, place, bytes([data[place] ^ 0x10]))
        said = await ask_all(engine)
        check_answers(said, clean, spared)
        name = f"layer {broken // N_EXPERTS}, expert {broken % N_EXPERTS}: "
        for i in hit:
            error = said[i]
            assert isinstance(error, EngineError)
            assert error.code == "io_error"
            assert name in str(error)
        experts = await stats_where(engine, lambda e: e.failed_altered > 0)
        assert experts.failed_io == experts.failed_cut == experts.failed_timed_out == 0
        assert engine.stats.n_kv_used == 0
        write_at(file, place, data[place : place + 1])
        assert await ask_all(engine) == clean


async def test_a_cut_file_ends_whom_it_concerns_until_it_is_whole_again(
    case: Case, clean: list[Said], file: Path
) -> None:
    first = 2 * N_EXPERTS - 3
    hit, spared = case.split(set(range(first, 2 * N_EXPERTS)))
    data = file.read_bytes()
    async with serving(file) as engine:
        os.truncate(file, case.places[first] + 512)
        said = await ask_all(engine)
        check_answers(said, clean, spared)
        for i in hit:
            assert isinstance(said[i], EngineError)
            assert "the file ends" in str(said[i])
        experts = await stats_where(engine, lambda e: e.failed_cut > 0)
        assert experts.failed_altered == 0
        write_at(file, case.places[first] + 512, data[case.places[first] + 512 :])
        assert await ask_all(engine) == clean


async def test_a_file_that_is_replaced_removed_or_closed_to_us_goes_on(
    clean: list[Said], file: Path
) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    async with serving(file) as engine:
        os.chmod(file, 0)
        assert await ask_all(engine) == clean
        os.replace(other, file)
        assert await ask_all(engine) == clean
        file.unlink()
        assert await ask_all(engine) == clean


async def test_what_was_used_most_is_there_at_the_next_start(
    case: Case, clean: list[Said], file: Path
) -> None:
    async with serving(file) as engine:
        for _ in range(3):
            await ask(engine, 7)
        await engine.drain(5)
    async with serving(file) as engine:
        assert await ask(engine, 7) == clean[7]
        experts = await stats_where(engine, lambda e: e.misses > 0)
        assert experts.warm_bytes == 3 * case.record_bytes


def pick_broken(case: Case) -> int:
    """A record that some but not most prompts need."""
    counts = {
        record: sum(record in needed for needed in case.needed)
        for record in set(range(2 * N_EXPERTS)) - case.at_start
    }
    return min((r for r, n in counts.items() if n >= 4), key=lambda r: counts[r])


def write_at(file: Path, place: int, data: bytes) -> None:
    with file.open("r+b") as out:
        out.seek(place)
        out.write(data)


async def stats_where(engine: LocalEngine, condition: Callable[[DiskStats], bool]) -> DiskStats:
    """The first that are reported while nothing runs and the condition holds."""

    def is_reported() -> bool:
        experts = engine.stats.disk.get("experts")
        return experts is not None and condition(experts) and not engine.stats.n_running

    await until_async(is_reported)
    return engine.stats.disk["experts"]
