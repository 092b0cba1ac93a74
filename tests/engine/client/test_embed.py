"""Embeddings of a random Qwen3Model: right, and the same bits however they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, SamplingParams
from cflow.engine.client.engine import GenerateRequest
from cflow.engine.client.local import LocalEngine
from cflow.engine.files.convert import convert
from cflow.engine.files.hub import BUNDLED_FILE
from oracles import embedding_model

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 96, n).tolist() for n in (1, 7, 40, 130, 33)]
LONG = [RANDOM.integers(0, 96, 130).tolist() for _ in range(30)]
Vectors = list[NDArray[np.float32]]


class Models:
    """The torch model, and its conversions by pooling."""

    def __init__(self, folder: Path) -> None:
        self.torch = embedding_model.build()
        self.files: dict[str, Path] = {}
        for kind, mode in (("last", "lasttoken"), ("mean", "mean_tokens")):
            source = embedding_model.save(self.torch, folder / kind, mode)
            self.files[kind] = folder / f"{kind}.cflow"
            convert(str(source), self.files[kind])

    def expected(self, kind: str) -> Vectors:
        with torch.no_grad():
            states = [self.torch(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
        pooled = [state[-1] if kind == "last" else state.mean(0) for state in states]
        return [vector.numpy() for vector in pooled]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("embed"))


@asynccontextmanager
async def running(path: Path, **settings: Any) -> AsyncIterator[LocalEngine]:
    engine = await LocalEngine.start(EngineConfig(model=str(path), precision="f32", **settings))
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def embed(engine: LocalEngine, prompts: list[list[int]], priority: int = 0) -> Vectors:
    sampling = [SamplingParams(max_tokens=0)] * len(prompts)
    request = GenerateRequest(prompts=prompts, sampling=sampling, priority=priority)
    vectors = []
    for answer in await engine.embed(request):
        (delta,) = [event async for event in answer if isinstance(event, Delta)]
        assert delta.finish is not None
        assert delta.embedding is not None
        vectors.append(np.frombuffer(delta.embedding, "<f4"))
    return vectors


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_are_those_of_torch_with_the_same_bits_however_computed(
    models: Models, kind: str
) -> None:
    async def check() -> None:
        async with running(models.files[kind], kv="f32") as engine:
            together = await embed(engine, PROMPTS)
            alone = [(await embed(engine, [prompt]))[0] for prompt in PROMPTS]
        for ours, expected in zip(together, models.expected(kind), strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-3, rtol=1e-3)
        _assert_same(together, alone)
        settings: dict[str, Any] = {"max_step_tokens": 16, "max_sequences": 4, "threads": 1}
        settings["kv"] = "f32"
        async with running(models.files[kind], **settings) as engine:
            _assert_same(together, await embed(engine, PROMPTS))
            _assert_same(together, await embed(engine, PROMPTS[::-1]), reverse=True)

    asyncio.run(check())


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_preempted_embedding_has_the_same_bits(models: Models, kind: str) -> None:
    async def check() -> None:
        settings: dict[str, Any] = {"max_step_tokens": 16, "max_sequences": 1, "threads": 1}
        async with running(models.files[kind], **settings) as engine:
            waiting = asyncio.create_task(embed(engine, LONG))
            for _ in range(3):  # the second finds a long one running: they take 250 steps
                await embed(engine, PROMPTS[:1], priority=-1)
            vectors = await waiting
            assert engine.stats.preemptions > 0
        async with running(models.files[kind]) as engine:
            _assert_same(vectors, await embed(engine, LONG))

    asyncio.run(check())


def _assert_same(one: Vectors, other: Vectors, reverse: bool = False) -> None:
    for a, b in zip(one, other[::-1] if reverse else other, strict=True):
        assert a.tobytes() == b.tobytes()


def test_each_kind_of_model_refuses_the_other_s_work(models: Models) -> None:
    async def check() -> None:
        request = GenerateRequest(prompts=[[1]], sampling=[SamplingParams(max_tokens=1)])
        async with running(models.files["last"]) as engine:
            with pytest.raises(EngineError, match="is a model for embeddings") as caught:
                await engine.submit(request)
        assert caught.value.code == "invalid_request"
        async with running(BUNDLED_FILE) as engine:
            with pytest.raises(EngineError, match="is not a model for embeddings"):
                await engine.embed(request)

    asyncio.run(check())
