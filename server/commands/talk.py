"""cflow run, chat: a model in the terminal, without a server."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta
from cflow.engine.client.engine import Engine, GenerateRequest
from cflow.engine.client.local import LocalEngine
from cflow.server.api.parameters import sampling_params
from cflow.server.api.prompts import Prompt, context_of, encode_text, fit, render_chat
from cflow.server.api.schemas import Sampling, parse
from cflow.server.commands.models import MODEL, resolve
from cflow.server.commands.options import engine_flags, read_engine
from cflow.server.commands.progress import console, wait_ready
from cflow.server.errors import RequestError

TEMPERATURE = Annotated[
    float | None, typer.Option(help="0: always the likeliest token; default: the model's.")
]
TOP_P = Annotated[float | None, typer.Option(help="Choose from this much probability.")]
TOP_K = Annotated[int | None, typer.Option(help="Choose from this many tokens.")]
SEED = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]


@engine_flags()
def run(
    model: MODEL,
    engine: dict[str, Any],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: TEMPERATURE = None,
    top_p: TOP_P = None,
    top_k: TOP_K = None,
    seed: SEED = None,
) -> None:
    """Continue a text in the terminal. Ctrl-C ends the answer."""
    ask = _read_ask(max_tokens, temperature, top_p, top_k, seed)

    async def talk(handle: Engine) -> None:
        await answer(handle, await encode_text(handle.card.tokenizer, prompt), ask)

    _with_engine(model, engine, talk)


@engine_flags()
def chat(
    model: MODEL,
    engine: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: until the model ends it.")
    ] = None,
    temperature: TEMPERATURE = None,
    top_p: TOP_P = None,
    top_k: TOP_K = None,
    seed: SEED = None,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    ask = _read_ask(max_tokens, temperature, top_p, top_k, seed)
    opening = [{"role": "system", "content": system}] if system else []

    async def talk(handle: Engine) -> None:
        messages = list(opening)
        while (line := await _read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line.rstrip("\n")})
            try:
                text = await answer(handle, await render_chat(handle.card, messages, {}), ask)
                messages.append({"role": "assistant", "content": text})
            except RequestError as error:
                console.print(f"cflow: {error} The conversation starts anew.", markup=False)
                messages = list(opening)

    _with_engine(model, engine, talk)


def _read_ask(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
) -> Sampling:
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    return parse(Sampling, {name: value for name, value in given.items() if value is not None})


async def answer(engine: Engine, prompt: Prompt, ask: Sampling) -> str:
    """Prints the answer as it comes; Ctrl-C ends it. Returns its text."""
    room = fit(len(prompt.ids), ask.max_tokens, context_of(engine), param="prompt", cap=True)
    sampling = sampling_params(ask, engine.card, max_tokens=room, n_logprobs=None)
    work = GenerateRequest(prompts=[prompt.ids], sampling=[sampling])
    (coming,) = await engine.submit(work)
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
    """Inside, Ctrl-C calls `action` instead of ending the program."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._action)

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._before)


async def _read_line() -> str | None:
    """A line from the terminal, None at its end; the engine is served meanwhile."""
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
async def _started(model: str, flags: dict[str, Any]) -> AsyncIterator[Engine]:
    engine = await LocalEngine.start(read_engine(str(resolve(model)), flags))
    try:
        await wait_ready(engine)
        yield engine
    finally:
        await engine.drain(0)  # lets the worker keep what it has learnt


def _with_engine(
    model: str, flags: dict[str, Any], talk: Callable[[Engine], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with _started(model, flags) as engine:
            await talk(engine)

    asyncio.run(main())
