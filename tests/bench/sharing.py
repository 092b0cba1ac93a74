"""What requests cost each other, over HTTP and with default settings. Prints JSON, times in ms.

stream    gaps between a stream's tokens while a long prompt is computed
question  time to the first token of a question beside a long prompt, and beside a batch
keys      tokens that each of two keys gets
grammar   time that a grammar adds to a token

PYTHONPATH=tests python -m bench.sharing model.cflow stream --prompt-tokens 4000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from harness.servers import Server, serving

QUESTION = {"prompt": [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007], "ignore_eos": True}
N_PROMPTS = 1000
PART = 250  # prompts of a request, which takes at most 256
KEYS = ("first", "second")


class Client:
    """Asks over a new connection each time, and notes when tokens arrive."""

    def __init__(self, server: Server, key: str = KEYS[0]) -> None:
        self._port = server.port
        self._key = key

    async def tokens(self, **fields: Any) -> AsyncGenerator[float, None]:
        """The time at which each chunk with text arrives."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        body = json.dumps(QUESTION | {"temperature": 0, "stream": True} | fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read(2000)
            while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
                if line.startswith(b"data: ") and b'"text":""' not in line:
                    assert b'"error"' not in line, line
                    yield time.perf_counter()
        finally:
            writer.close()

    async def first_token(self) -> float:
        """Milliseconds until the first token."""
        started = time.perf_counter()
        async with aclosing(self.tokens(max_tokens=1)) as tokens:
            async for arrived in tokens:
                return 1e3 * (arrived - started)
        raise AssertionError("no token came")

    async def count(self, counts: dict[str, int], **fields: Any) -> None:
        async with aclosing(self.tokens(**fields)) as tokens:
            async for _ in tokens:
                counts[self._key] += 1


def spread(times: list[float]) -> dict[str, float]:
    return {
        "n": len(times),
        "p50": round(median(times), 1),
        "p95": round(quantiles(times, n=20)[-1], 1),
        "max": round(max(times), 1),
    }


def random_prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=n)


async def beside_a_prompt(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps of a stream alone, and between the sending of a long prompt and its first token."""
    found: dict[str, Any] = {"alone": [], "beside": [], "prompt_s": []}
    for turn in range(args.turns):
        arrivals: list[float] = []

        async def read(arrivals: list[float] = arrivals) -> None:
            async for arrived in Client(server).tokens(max_tokens=8000):
                arrivals.append(arrived)

        stream = asyncio.create_task(read())
        while len(arrivals) < 60:
            await asyncio.sleep(0.01)
        sent, n_alone = time.perf_counter(), len(arrivals)
        async for _ in Client(server, KEYS[1]).tokens(
            prompt=random_prompt(turn, args.prompt_tokens), max_tokens=1
        ):
            pass
        found["prompt_s"].append(round(time.perf_counter() - sent, 2))
        stream.cancel()
        await asyncio.wait([stream])
        gaps = [1e3 * (b - a) for a, b in pairwise(arrivals)]
        found["alone"] += gaps[10 : n_alone - 1]
        found["beside"] += gaps[n_alone - 1 :]
    return found | {name: spread(found[name]) for name in ("alone", "beside")}


async def questions(server: Server, n: int) -> list[float]:
    """Times to the first token of n questions, half a second apart."""
    times = []
    for _ in range(n):
        times.append(await Client(server).first_token())
        await asyncio.sleep(0.5)
    return times


async def a_question(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Alone, beside a long prompt that no stream delays, and while 1,000 prompts wait."""
    alone = await questions(server, args.turns)
    prompt = random_prompt(0, args.prompt_tokens)
    long = asyncio.create_task(Client(server).count({KEYS[0]: 0}, prompt=prompt, max_tokens=1))
    await asyncio.sleep(0.5)
    beside_prompt = await questions(server, args.turns)
    assert not long.done(), "the prompt is too short"
    long.cancel()
    await asyncio.wait([long])
    counts = dict.fromkeys(KEYS, 0)
    batch = [
        asyncio.create_task(
            Client(server).count(
                counts,
                prompt=[random_prompt(1 + first + i, 32) for i in range(PART)],
                max_tokens=64,
            )
        )
        for first in range(0, N_PROMPTS, PART)
    ]
    while not counts[KEYS[0]]:
        await asyncio.sleep(0.1)
    beside_batch = await questions(server, args.turns)
    assert not any(task.done() for task in batch)
    n_left = server.metric("vllm:num_requests_waiting") + server.metric("vllm:num_requests_running")
    for task in batch:
        task.cancel()
    await asyncio.wait(batch)
    times = {"alone": alone, "beside_prompt": beside_prompt, "beside_batch": beside_batch}
    return {name: spread(found) for name, found in times.items()} | {"answers_left": n_left}


async def two_keys(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens that each key gets in the same time. Both ask for more than there is room for; the
    second key joins while the first is being served."""
    counts = dict.fromkeys(KEYS, 0)

    def load(key: str, seed: int) -> asyncio.Task[None]:
        prompts = [random_prompt(seed + i, 32) for i in range(PART)]
        return asyncio.create_task(Client(server, key).count(counts, prompt=prompts, max_tokens=64))

    tasks = [load(KEYS[0], 1), load(KEYS[0], 1000)]
    while counts[KEYS[0]] < 200:
        await asyncio.sleep(0.1)
    came = time.perf_counter()
    tasks.append(load(KEYS[1], 2000))
    while not counts[KEYS[1]]:
        await asyncio.sleep(0.01)
    first_token_ms, before = 1e3 * (time.perf_counter() - came), dict(counts)
    await asyncio.sleep(args.seconds)
    got = {key: counts[key] - before[key] for key in KEYS}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    share = got[KEYS[1]] / sum(got.values())
    return {"first_token": round(first_token_ms, 1), "tokens": got, "share": round(share, 3)}


async def a_grammar(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Time from a token to the next, without a grammar and with one, in turn."""
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    forms: dict[str, dict[str, Any]] = {
        "none": {},
        "json_schema": {"guided_json": {"type": "array", "items": person, "minItems": 50}},
        "regex": {"guided_regex": r"(.|\n){4000,}"},
    }
    gaps: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(args.turns):
        for name, form in forms.items():
            arrivals = [arrived async for arrived in Client(server).tokens(max_tokens=100, **form)]
            gaps[name] += [1e3 * (b - a) for a, b in pairwise(arrivals[5:])]
    return {name: spread(found) for name, found in gaps.items()}


MEASURES: dict[str, Callable[[Server, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]] = {
    "stream": beside_a_prompt,
    "question": a_question,
    "keys": two_keys,
    "grammar": a_grammar,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("\n".join(KEYS))
        keys.flush()
        flags = ["--speculation", "off"]  # without drafts, a chunk of a stream is one token
        if args.measure == "keys":
            flags += ["--api-keys", keys.name]
        with serving(args.model, *flags) as server:
            print(json.dumps(asyncio.run(MEASURES[args.measure](server, args))))


if __name__ == "__main__":
    main()
