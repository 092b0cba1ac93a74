"""Mixed load on a real server while its worker is killed now and then.

    make soak                                  30 minutes, a kill every 3, SmolLM2 (or tinystories offline)
    make soak FLAGS="--minutes 5 --kill-every 60"
    make soak FLAGS=--record                   also writes docs/results/soak.json and its table in the docs

Clients stream, ask for whole answers, send batches and long prompts, and leave in the middle. Every
answer is compared with what the server said to the same request before the load: same bits whatever
else runs, so a different letter is a wrong answer. What fails must fail because of a kill, say so, and
what it streamed until then must be the beginning of the right text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cflow.engine.base.errors import ModelError
from cflow.engine.files import hub
from harness.servers import Server, serving, workers_of
from harness.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results" / "soak.json"
PAGE = ROOT / "docs" / "operations.md"
TABLE = re.compile(r"(<!-- make soak -->\n).*?(<!-- end -->)", re.DOTALL)
NEAR_S = 60.0  # failures of requests that began so long after a kill are its consequences
WARM = 1 / 6  # of the time, before memory is looked at
GROWN = 1.1  # memory after it that is not flat
ALLOWED = {500, 503}  # while a worker is dead
WAYS = {"whole": "whole", "stream": "streamed", "leave": "left in the middle"}
STORY = "Once upon a time there was a little dog who lived in a big house by the sea. "


@dataclass(frozen=True)
class Ask:
    """A request whose answer is known. texts: of its choices, by index."""

    body: dict[str, Any]
    texts: tuple[str, ...]


@dataclass
class Report:
    """What happened. front_bytes, worker_bytes: of memory, by second."""

    minutes: float
    clients: int
    kills: int = 0
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    front_bytes: list[int] = field(default_factory=list)
    worker_bytes: list[int] = field(default_factory=list)
    tokens: int = 0

    def growth(self, samples: list[int]) -> float:
        """The last tenth against the first one after the warm-up."""
        steady = samples[int(len(samples) * WARM) :]
        part = max(len(steady) // 10, 1)
        return statistics.median(steady[-part:]) / statistics.median(steady[:part])

    def summary(self) -> dict[str, Any]:
        found = asdict(self) | {"done": dict(self.done), "failed": dict(self.failed)}
        for who in ("front", "worker"):
            samples = found.pop(f"{who}_bytes")
            found[f"{who}_memory_growth"] = round(self.growth(samples), 3)
            found[f"{who}_memory_mib"] = [n >> 20 for n in samples[::60]]
        found["recovery_s"] = [round(seconds, 2) for seconds in self.recovery_s]
        return found


def table(found: dict[str, Any]) -> str:
    """A summary in Markdown."""
    recovery = sorted(found["recovery_s"])
    rows = {
        "model, load": f"{found['model']}, {found['clients']} clients for {found['minutes']:g} minutes",
        "answers": ", ".join(f"{found['done'].get(way, 0):,} {WAYS[way]}" for way in WAYS),
        "tokens": f"{found['tokens']:,}",
        "wrong answers": len(found["wrong"]),
        "hung clients": len(found["hung"]),
        "workers killed": found["kills"],
        "failed or refused around a kill": ", ".join(
            f"{n} {code}" for code, n in found["failed"].items()
        ),
        "from a kill to ready again": f"{statistics.median(recovery):.2f} s (median), "
        f"{recovery[-1]:.2f} s (longest)"
        if recovery
        else "-",
    }
    for who, name in (("front", "front end"), ("worker", "worker")):
        memory = found[f"{who}_memory_mib"]
        rows[f"memory of the {name}"] = (
            f"{min(memory):,} to {max(memory):,} MiB, the last minutes "
            f"{found[f'{who}_memory_growth']:g} times the first ones after the warm-up"
        )
    return "".join(
        f"| {name} | {value} |\n" for name, value in [("", ""), ("---", "---"), *rows.items()]
    )


def record(found: dict[str, Any]) -> None:
    """Into the docs."""
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    PAGE.write_text(TABLE.sub(lambda m: m[1] + table(found) + m[2], PAGE.read_text()))


def bodies(context: int) -> list[dict[str, Any]]:
    """Greedy and seeded ones, short and long, alone and in batches; all fit the context."""
    most = min(context // 4, 48)
    n_long = context // 2 // 20  # some 20 tokens a sentence
    prompts = ["Lily saw a cat.", "The old man said", "Tom and his mom went to", STORY]
    found: list[dict[str, Any]] = [{"prompt": p, "max_tokens": most} for p in prompts]
    found.append({"prompt": STORY * n_long, "max_tokens": 8})
    found.append({"prompt": prompts, "max_tokens": most // 2})
    found.append({"prompt": "A dog", "max_tokens": most, "temperature": 0.8, "seed": 5, "n": 2})
    return [{"temperature": 0} | body for body in found]


def texts_of(choices: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(c["text"] for c in sorted(choices, key=lambda choice: choice["index"]))


def known(server: Server) -> list[Ask]:
    context = min(server.http.get("/v1/models").json()["data"][0]["max_model_len"], 1024)
    return [
        Ask(body, texts_of(server.post("/v1/completions", body)["choices"]))
        for body in bodies(context)
    ]


# ---- clients ----


@dataclass
class Soak:
    server: Server
    asks: list[Ask]
    report: Report
    kill_every_s: float
    n_kills: int
    end: float = 0.0  # of the load, or later: with the last kill's consequences
    killed: float = -1e9  # when last
    n_least: int = 0  # answers of each way that must have come before it ends

    @property
    def is_over(self) -> bool:
        return (
            time.monotonic() >= self.end
            and len(self.report.recovery_s) == self.n_kills
            and min(self.report.done[way] for way in WAYS) >= self.n_least
        )

    async def run(self, seed: int) -> None:
        self.end = time.monotonic() + 60 * self.report.minutes
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, limits=limits, timeout=None) as http:
            clients = [
                self._client(http, random.Random(seed + i)) for i in range(self.report.clients)
            ]
            await asyncio.gather(*clients, self._kill(http), self._watch())

    async def _client(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        ways = {"whole": self._whole, "stream": self._stream, "leave": self._leave}
        while not self.is_over:
            way, ask = choose.choice(list(ways)), choose.choice(self.asks)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await ways[way](http, ask, choose)
            except TimeoutError:
                self.report.hung.append(f"{way} {json.dumps(ask.body)[:80]}")
            except httpx.TransportError as error:
                self._fail(type(error).__name__, time.monotonic())

    def _fail(self, what: str, began: float) -> None:
        """A failure is right while a kill's consequences last."""
        near = self.killed > began - NEAR_S
        if near:
            self.report.failed[what] += 1
        else:
            self.report.wrong.append(f"{what}, and nothing had been killed")

    async def _whole(self, http: httpx.AsyncClient, ask: Ask, choose: random.Random) -> None:
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=ask.body)
        if answer.status_code in ALLOWED:
            self._fail(answer.json()["error"]["code"], began)
            await asyncio.sleep(0.2)
        elif answer.status_code != 200:
            self.report.wrong.append(f"status {answer.status_code}: {answer.text[:200]}")
        else:
            body = answer.json()
            self.report.tokens += body["usage"]["completion_tokens"]
            self._compare("whole", texts_of(body["choices"]), ask)

    def _compare(self, way: str, texts: tuple[str, ...], ask: Ask) -> None:
        self.report.done[way] += 1
        if texts != ask.texts:
            self.report.wrong.append(f"{way}: {texts!r} instead of {ask.texts!r}")

    async def _stream(self, http: httpx.AsyncClient, ask: Ask, choose: random.Random) -> None:
        await self._read("stream", http, ask, sys.maxsize)

    async def _leave(self, http: httpx.AsyncClient, ask: Ask, choose: random.Random) -> None:
        await self._read("leave", http, ask, choose.randrange(1, 7))

    async def _read(self, way: str, http: httpx.AsyncClient, ask: Ask, n_events: int) -> None:
        """At most so many events of a stream."""
        began, texts = time.monotonic(), [""] * len(ask.texts)
        async for event in self._events(http, ask):
            if "error" in event:
                self._fail(event["error"]["code"], began)
                self._check_beginning(texts, ask)
                return
            for choice in event.get("choices", []):
                texts[choice["index"]] += choice["text"]
                self.report.tokens += 1
            n_events -= 1
            if not n_events:
                self._check_beginning(texts, ask)
                self.report.done[way] += 1
                return
        self._compare(way, tuple(texts), ask)

    def _check_beginning(self, texts: list[str], ask: Ask) -> None:
        if not all(full.startswith(part) for part, full in zip(texts, ask.texts, strict=True)):
            self.report.wrong.append(f"at first: {texts!r} of {ask.texts!r}")

    async def _events(self, http: httpx.AsyncClient, ask: Ask) -> AsyncIterator[dict[str, Any]]:
        """Of a stream, to its [DONE]; a refusal comes as its one event."""
        body = ask.body | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await asyncio.sleep(0.2)
                yield json.loads(await answer.aread())
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
            yield {"error": {"code": "no_done"}}

    # ---- what is done to the server ----

    async def _kill(self, http: httpx.AsyncClient) -> None:
        for _ in range(self.n_kills):
            await asyncio.sleep(self.kill_every_s)
            (worker,) = workers_of(self.server.process.pid)
            self.killed = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            self.report.kills += 1
            async with asyncio.timeout(LIMIT_S):
                while (await http.get("/ready")).status_code == 200:
                    await asyncio.sleep(0.01)
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
            self.report.recovery_s.append(time.monotonic() - self.killed)

    async def _watch(self) -> None:
        began = told = time.monotonic()
        while not self.is_over:
            await asyncio.sleep(1)
            self.report.front_bytes.append(resident(self.server.process.pid))
            for worker in workers_of(self.server.process.pid):
                self.report.worker_bytes.append(resident(worker))
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{(told - began) / 60:4.1f} min: {self._line()}", flush=True)

    def _line(self) -> str:
        report = self.report
        return (
            f"{report.done.total()} answers, {report.failed.total()} failed around {report.kills} kills, "
            f"{len(report.wrong)} wrong, {len(report.hung)} hung; front end "
            f"{report.front_bytes[-1] >> 20} MiB, worker {max(report.worker_bytes[-5:]) >> 20} MiB"
        )


def resident(pid: int) -> int:
    try:
        pages = (Path("/proc") / str(pid) / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def soak(
    model: Path,
    *,
    minutes: float,
    kill_every_s: float,
    clients: int,
    seed: int = 1,
    n_least: int = 0,
) -> Report:
    report = Report(minutes, clients)
    n_kills = max(0, int(60 * minutes / kill_every_s) - 1)
    with serving(model, "--max-sequences", "16") as server:
        asks = known(server)
        load = Soak(server, asks, report, kill_every_s, n_kills, n_least=n_least)
        asyncio.run(load.run(seed))
        server.ready()
        again = known(server)
        report.wrong += [
            f"afterwards: {new}" for new, old in zip(again, asks, strict=True) if new != old
        ]
        left = [
            server.metric(f"vllm:{name}")
            for name in ("num_requests_running", "kv_cache_usage_perc")
        ]
        if any(left):
            report.wrong.append(f"left behind: {left} running requests and KV memory")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kill-every", type=float, default=180, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--record", action="store_true")
    flags = parser.parse_args()
    name = "smollm2-135m"
    try:
        model = hub.resolve(name)
    except ModelError as error:
        print(f"{error}\ntinystories in its place", file=sys.stderr)
        name, model = "tinystories", hub.BUNDLED_FILE
    found = soak(model, minutes=flags.minutes, kill_every_s=flags.kill_every, clients=flags.clients)
    summary = {"model": name} | found.summary()
    print(json.dumps(summary, indent=2))
    if flags.record:
        record(summary)
    grown = [who for who in ("front", "worker") if summary[f"{who}_memory_growth"] > GROWN]
    if grown:
        print(f"not flat after the first {flags.minutes * WARM:g} minutes: memory of {grown}")
    sys.exit(bool(found.wrong or found.hung or grown))


if __name__ == "__main__":
    main()
