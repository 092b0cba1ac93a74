"""The worker with a real model: answers do not depend on caches, neighbours or memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import Delta, SamplingParams
from cflow.engine.client.answer import LocalAnswer
from cflow.engine.client.card import read_card
from cflow.engine.client.local import LocalEngine
from harness.asking import submit
from harness.waiting import until_async
from oracles.real_models import RealModel

pytestmark = pytest.mark.anyio

N_PROMPT = 300
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8, seed=7, n_logprobs=2, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def prompt(data: Path) -> list[int]:
    """Token ids of prose."""
    text = (data / "wikitext2" / "wiki.test.raw").read_text()[2000:6000]
    model = RealModel.fetch("smollm2-135m")
    return read_card(EngineConfig(model=str(model.cflow))).tokenizer.encode(text)[:N_PROMPT]


class Said(NamedTuple):
    """All that a client can see of a choice, log-probabilities bit for bit."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[LocalEngine]:
    model = RealModel.fetch("smollm2-135m")
    engine = await LocalEngine.start(EngineConfig(model=str(model.cflow), **options))
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def read(answer: LocalAnswer) -> tuple[list[Said], int]:
    """Every choice, and how much of the prompt was cached."""
    deltas: dict[int, list[Delta]] = {}
    async for event in answer:
        if isinstance(event, Delta):
            deltas.setdefault(event.choice, []).append(event)
    said = [
        Said(
            tuple(token for delta in choice for token in delta.tokens),
            "".join(delta.text for delta in choice),
            tuple(score.logprob for delta in choice for score in delta.logprobs),
        )
        for _, choice in sorted(deltas.items())
    ]
    return said, deltas[0][0].n_cached or 0


async def test_a_cached_prefix_changes_no_bit(prompt: list[int]) -> None:
    async with running() as engine:

        async def ask(ids: list[int]) -> tuple[Said, int]:
            (said,), n_cached = await read(await submit(engine, ids, sampling=SAMPLING))
            return said, n_cached

        fresh, n_cached = await ask(prompt)
        assert n_cached == 0
        assert await ask(prompt) == (fresh, 288)
        shorter, n_cached = await ask(prompt[:-1])
        assert n_cached == 288
        dropped = await submit(engine, [*prompt[:200], 5, *prompt[200:]], sampling=SAMPLING)
        async for event in dropped:
            if isinstance(event, Delta):
                break
        dropped.cancel()
        assert await ask(prompt) == (fresh, 288)
    async with running() as engine:
        (said,), _ = await read(await submit(engine, prompt[:-1], sampling=SAMPLING))
        assert said == shorter


async def test_neighbours_chunks_and_lack_of_memory_change_no_bit(prompt: list[int]) -> None:
    prompts = [prompt[i : i + 60 + 10 * i] for i in range(6)]
    alone = []
    async with running() as engine:
        for ids in prompts:
            alone.append((await read(await submit(engine, ids, sampling=SAMPLING, n_choices=2)))[0])
    # Room for hardly more than two of the twelve answers at a time.
    tight = {"context": 192, "kv_memory": 192 * 23040 * 3 // 2, "max_step_tokens": 32}
    async with running(max_sequences=16, **tight) as engine:
        answers = [await submit(engine, ids, sampling=SAMPLING, n_choices=2) for ids in prompts]
        together = [said for said, _ in await asyncio.gather(*map(read, answers))]
        await until_async(lambda: engine.stats.preemptions > 0)
    assert together == alone


async def test_prompt_scores_agree_with_what_sampling_says(prompt: list[int]) -> None:
    """The log-probability of a token as part of a prompt is the one it had when it was sampled."""
    async with running() as engine:
        greedy = SamplingParams(max_tokens=8, temperature=0, n_logprobs=0, ignore_eos=True)
        (said,), _ = await read(await submit(engine, prompt, sampling=greedy))
        scoring = SamplingParams(max_tokens=0, n_prompt_logprobs=1)
        async for event in await submit(engine, [*prompt, *said.tokens], sampling=scoring):
            if isinstance(event, Delta):
                scores = event.prompt_logprobs
        assert scores is not None
        tail = [score for score in scores[-8:] if score is not None]
        assert tuple(score.logprob for score in tail) == said.logprobs
        assert [score.top[0][0] for score in tail] == list(said.tokens)
