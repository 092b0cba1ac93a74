"""What drafting ahead is worth: answers with and without, in turn, from two workers of one model.

    .venv/bin/python tests/bench/speculation.py smollm2-135m --streams 1

Prompts that have much of their answer in them, and prompts that have nothing of it. Speed is of whole
answers, to prompts whose keys and values are cached. Takes a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import Delta, SamplingParams
from cflow.engine.client.local import LocalEngine
from cflow.engine.files import hub
from harness.asking import submit

ROOT = Path(__file__).parent.parent.parent
CODE = (ROOT / "engine" / "worker" / "stops.py").read_text()
TEXT = "\n\n".join((ROOT / "README.md").read_text().split("\n\n")[1:9])
STORY = "One day, a girl named Lily went to the park with her mom. She saw a big red ball. "


@dataclass(frozen=True)
class Case:
    name: str
    ask: str
    temperature: float = 0.0
    is_chat: bool = True


CASES = {
    "smollm2-135m": (
        Case("quote", f"Repeat the following text word for word:\n\n{TEXT}"),
        Case("story", "Tell me a long story about a sailor and the sea.", 0.8),
    ),
    "qwen2.5-coder-0.5b": (
        Case("edit", f"Rename `text` to `said` in this file and print all of it:\n\n{CODE}"),
        Case("quote", f"Repeat the following text word for word:\n\n{TEXT}"),
        Case("story", "Tell me a long story about a sailor and the sea.", 0.8),
    ),
    "tinystories": (
        Case("repeat", 4 * STORY, is_chat=False),
        Case("story", "One day, a boy", 0.8, is_chat=False),
    ),
}


def encode(engine: LocalEngine, case: Case) -> list[int]:
    text = case.ask
    if case.is_chat:
        assert engine.card.template is not None
        messages = [{"role": "user", "content": case.ask}]
        text = engine.card.template.render(messages, add_generation_prompt=True).text
    return engine.card.tokenizer.encode(text)


async def answer(engine: LocalEngine, prompt: list[int], sampling: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async for event in await submit(engine, prompt, sampling=sampling):
        if isinstance(event, Delta):
            tokens += event.tokens
    return tokens


async def run(
    engine: LocalEngine, case: Case, streams: int, n: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second of all streams together, and what they said."""
    prompt = encode(engine, case)
    ways = [
        SamplingParams(max_tokens=n, temperature=case.temperature, seed=seed, ignore_eos=True)
        for seed in range(streams)
    ]
    started = time.perf_counter()
    said = await asyncio.gather(*(answer(engine, prompt, way) for way in ways))
    return sum(map(len, said)) / (time.perf_counter() - started), said


async def compare(
    engines: dict[str, LocalEngine], case: Case, streams: int, args: argparse.Namespace
) -> None:
    speeds: dict[str, list[float]] = {way: [] for way in engines}
    for engine in engines.values():
        await run(engine, case, streams, 8)
    await asyncio.sleep(0.3)  # the last totals are on their way
    before = engines["ngram"].stats
    for _ in range(args.rounds):
        said = {}
        for way, engine in engines.items():
            speed, said[way] = await run(engine, case, streams, args.gen)
            speeds[way].append(speed)
        assert said["off"] == said["ngram"], "drafting has changed an answer"
    await asyncio.sleep(0.3)
    after = engines["ngram"].stats
    drafts = after.drafts - before.drafts
    right = sum(after.accepted_at) - sum(before.accepted_at)
    gains = [on / off for on, off in zip(speeds["ngram"], speeds["off"], strict=True)]
    print(
        f"{case.name:8} {streams:3} streams: off {median(speeds['off']):7.1f} tok/s, "
        f"ngram {median(speeds['ngram']):7.1f}, gain {median(gains):.2f} "
        f"({min(gains):.2f} to {max(gains):.2f}), {right} of {drafts} drafts right, "
        f"{right / (args.rounds * streams * args.gen):.2f} of the tokens",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=CASES)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gen", type=int, default=192)
    args = parser.parse_args()
    path = str(hub.resolve(args.model))
    configs = {way: EngineConfig(model=path, speculation=way) for way in ("off", "ngram")}
    engines = {way: await LocalEngine.start(config) for way, config in configs.items()}
    try:
        for engine in engines.values():
            await engine.wait_ready()
        for case in CASES[args.model]:
            for streams in args.streams:
                await compare(engines, case, streams, args)
    finally:
        for engine in engines.values():
            await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
