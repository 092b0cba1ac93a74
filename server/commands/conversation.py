"""A model in the terminal: what `cflow run` and `cflow chat` do."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta
from cflow.engine.client.engine import Engine, GenerateRequest
from cflow.engine.client.local import LocalEngine
from cflow.server.api.parameters import sampling_params
from cflow.server.api.prompts import Prompt, context_of, encode_text, fit, render_chat
from cflow.server.api.schemas import Sampling
from cflow.server.commands.progress import say
from cflow.server.commands.startup import wait_ready
from cflow.server.errors import RequestError


def run(config: EngineConfig, prompt: str, ask: Sampling) -> None:
    """Continue a text and print the continuation."""

    async def main() -> None:
        async with _started(config) as engine:
            await answer(engine, await encode_text(engine.card.tokenizer, prompt), ask)

    asyncio.run(main())


def chat(config: EngineConfig, system: str | None, ask: Sampling) -> None:
    """Answer each line of stdin with the conversation so far, until its end."""

    async def main() -> None:
        async with _started(config) as engine:
            await _converse(engine, system, ask)

    asyncio.run(main())


async def _converse(engine: Engine, system: str | None, ask: Sampling) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := await _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            text = await answer(engine, await render_chat(engine.card, messages, {}), ask)
            messages.append({"role": "assistant", "content": text})
        except RequestError as error:
            say(f"{error} The conversation starts over.")
            messages = list(opening)


async def answer(engine: Engine, prompt: Prompt, ask: Sampling) -> str:
    """Print an answer as it is generated, and return its text. Ctrl-C ends it."""
    room = fit(len(prompt.ids), ask.max_tokens, context_of(engine), param="prompt", cap=True)
    sampling = sampling_params(ask, engine.card, max_tokens=room, n_logprobs=None)
    request = GenerateRequest(prompts=[prompt.ids], sampling=[sampling])
    (coming,) = await engine.submit(request)
    texts = []
    try:
        with _on_interrupt(coming.cancel):
            async for event in coming:
                if isinstance(event, Delta):
                    texts.append(event.text)
                    print(event.text, end="", flush=True)
    except EngineError as error:
        if error.code != "cancelled":
            raise
    finally:
        coming.cancel()
        print()
    return "".join(texts)


class _on_interrupt:
    """Within this context Ctrl-C calls `action` instead of ending the program."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._action)

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._before)


async def _read_line() -> str | None:
    """Read a line from stdin, or None at its end, without blocking the event loop on a terminal."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    print("> ", end="", flush=True)
    loop, has_line = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, has_line.set)
    try:
        await has_line.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline() or None


@asynccontextmanager
async def _started(config: EngineConfig) -> AsyncIterator[Engine]:
    engine = await LocalEngine.start(config)
    try:
        await wait_ready(engine)
        yield engine
    finally:
        await engine.drain(0)  # lets the worker save its expert uses
