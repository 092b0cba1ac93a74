"""Times a stream beside the bare engine, in turn: the cost of a token through a worker's socket, or
through HTTP and server-sent events as well. Greedy, with the same tokens. Prints JSON.

    python -m bench.beside x.cflow http --tokens 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path

from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import Delta, SamplingParams
from cflow.engine.client.local import LocalEngine
from cflow.engine.measure.bare import open_stream, step
from cflow.engine.native import Context, Model, Pick, Row, const
from harness.asking import submit
from harness.servers import serving

FIRST = 65  # the prompt
Stream = Callable[[int], Awaitable[int]]  # asks for n tokens, returns how many came


def bare(context: Context, n: int) -> None:
    token = FIRST
    for position in range(n):
        step(context, [Row(0, token, position, const.CFLOW_ROW_LOGITS)])
        token = context.sample([Pick(0, temperature=0.0)])[0].token


@asynccontextmanager
async def over_engine(model: Path) -> AsyncIterator[Stream]:
    engine = await LocalEngine.start(EngineConfig(model=str(model), speculation="off"))

    async def stream(n: int) -> int:
        sampling = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        came = 0
        async for event in await submit(engine, [FIRST], sampling=sampling):
            came += len(event.tokens) if isinstance(event, Delta) else 0
        return came

    try:
        await engine.wait_ready()
        yield stream
    finally:
        await engine.close()


@asynccontextmanager
async def over_http(model: Path) -> AsyncIterator[Stream]:
    with serving(model, "--speculation", "off") as server:

        async def stream(n: int) -> int:
            return ask(server.port, n)

        yield stream


def ask(port: int, n: int) -> int:
    """Asks with a client that only reads; returns the number of tokens in the last event."""
    body = json.dumps(
        {
            "prompt": [FIRST],
            "max_tokens": n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b""
        while b"data: [DONE]" not in answer[-64:]:
            part = connection.recv(1 << 16)
            if not part:
                raise SystemExit(f"the server closed the connection: {answer[-500:]!r}")
            answer += part
    usage = next(line for line in reversed(answer.split(b"\n")) if b'"completion_tokens"' in line)
    return int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])


async def compare(way: str, path: Path, n: int, rounds: int) -> list[dict[str, float]]:
    threads = machine.cores().threads
    model = Model(str(path), threads=threads)
    context = open_stream(model, n, threads=threads)
    found = []
    async with {"engine": over_engine, "http": over_http}[way](path) as stream:
        for turn in range(-1, rounds):  # one to warm up
            started = time.perf_counter()
            bare(context, n)
            between = time.perf_counter()
            came = await stream(n)
            ended = time.perf_counter()
            if came != n:
                raise SystemExit(f"{came} tokens came, {n} were asked for")
            if turn >= 0:
                found.append({"bare_s": between - started, "through_s": ended - between})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="time a stream beside the bare engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("way", choices=("engine", "http"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with redirect_stdout(sys.stderr):  # the server's log
        rounds = asyncio.run(compare(args.way, args.model, args.tokens, args.rounds))
    print(json.dumps({"tokens": args.tokens, "rounds": rounds}))


if __name__ == "__main__":
    main()
