"""A thousand clients, most of which leave: in the head or the body of their request, in the queue, in
the prompt, in the answer, by FIN and by RST. Nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from cflow.engine.files.convert import convert
from harness.servers import Server, serving
from harness.waiting import LIMIT_S, until
from oracles import embedding_model, tiny

HALF = 500
N_AT_ONCE = 32
FLAGS = ("--context", "4096", "--max-sequences", "8")
RST = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, and say so
MOST_THREADS = 16  # of the front end; its pools grow as they are used

WORDS = ("a", "cat", "and", "the", "dog", "went", "home", "to", "sleep", "soon", "after", "dark")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} calls go in <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


class Visit(NamedTuple):
    request: bytes
    n_sent: int  # of it
    stays: bool  # to the end of the answer
    n_read: int  # bytes, before it leaves
    wait_s: float
    resets: bool


# ---- what is asked ----


def text(choose: Random, n: int) -> str:
    """n characters, which are tokens; their beginnings are often shared. Of few words: the tokenizer
    remembers thousands of those it has seen, which is no leak."""
    own = f"{choose.randrange(40)} " + " ".join(choose.choices(WORDS, k=n))
    return own[:n]


def completion(choose: Random) -> dict[str, Any]:
    body = {"prompt": text(choose, choose.randrange(2, 80)), "max_tokens": choose.randrange(24)}
    return body | {"n": choose.randrange(1, 4), "logprobs": choose.choice([None, 0, 3])}


def batch(choose: Random) -> dict[str, Any]:
    prompts = [text(choose, 30) for _ in range(choose.randrange(2, 4))]
    return {"prompt": prompts, "max_tokens": 12, "best_of": 2, "echo": True, "logprobs": 1}


def long(choose: Random) -> dict[str, Any]:
    """The first bytes behind the head of a stream say that the prompt has begun."""
    prompt = text(choose, choose.randrange(500, 2500))
    return {"prompt": prompt, "max_tokens": 8, "return_progress": True}


def timed(choose: Random) -> dict[str, Any]:
    waits = {"timeout_s": choose.uniform(1e-4, 0.2), "ignore_eos": True, "max_tokens": 2000}
    return {"prompt": text(choose, 20)} | waits


def formed(choose: Random) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [
        {"guided_regex": "[a-f]{3,40}"},
        {"response_format": {"type": "json_object"}},
    ]
    return {"prompt": text(choose, 20), "max_tokens": 24} | choose.choice(forms)


def chat(choose: Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": text(choose, choose.randrange(1, 200))}]
    return {"messages": messages, "max_tokens": 16, "n": choose.randrange(1, 3)}


def tools(choose: Random) -> dict[str, Any]:
    choice = choose.choice(["auto", "required"])
    return chat(choose) | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 40}


def response(choose: Random) -> dict[str, Any]:
    body = {"input": text(choose, choose.randrange(1, 200)), "max_output_tokens": 16}
    return body | {"store": choose.random() < 0.5}


def message(choose: Random) -> dict[str, Any]:
    turns = [{"role": "user", "content": text(choose, choose.randrange(1, 200))}]
    tool = {"name": "add", "input_schema": PARAMETERS}
    return {"messages": turns, "max_tokens": 16, "system": "s", "tools": [tool]}


def counted(choose: Random) -> dict[str, Any]:
    return {"input": text(choose, choose.randrange(1, 2000))}


def embedded(choose: Random) -> dict[str, Any]:
    n_texts = choose.randrange(1, 12)
    texts = [text(choose, choose.randrange(1, 400)) for _ in range(n_texts)]
    return {"input": texts, "encoding_format": choose.choice(["float", "base64"])}


def wrong(choose: Random) -> dict[str, Any]:
    faults: list[dict[str, Any]] = [{"max_tokens": -1}, {"model": "nope"}, {"prompt": "x" * 9000}]
    return {"prompt": "x"} | choose.choice(faults)


Kinds = dict[Callable[[Random], dict[str, Any]], int]
KINDS: Kinds = {
    completion: 5, batch: 2, long: 3, timed: 2, formed: 2, chat: 3, tools: 2, response: 2, message: 2,
    counted: 1, wrong: 1,
}  # fmt: skip
UNSAMPLED = (counted, embedded)


PATHS: dict[Callable[[Random], dict[str, Any]], str] = {
    chat: "/v1/chat/completions",
    tools: "/v1/chat/completions",
    response: "/v1/responses",
    message: "/v1/messages",
    counted: "/v1/responses/input_tokens",
    embedded: "/v1/embeddings",
}
ANSWERS = {"choices", "output", "content", "input_tokens", "data", "error"}
# What the last event of a stream has, by API.
ENDS = re.compile(
    rb"data: \[DONE\]|event: (response\.(completed|incomplete|failed)|message_stop|error)\n"
)


def visit(choose: Random, kinds: Kinds = KINDS) -> Visit:
    (kind,) = choose.choices(list(kinds), list(kinds.values()))
    body = kind(choose)
    if kind not in UNSAMPLED:
        body = {"temperature": choose.choice([0, 1.0])} | body
        body["stream"] = choose.random() < 0.5 and "best_of" not in body
    path = PATHS.get(kind, "/v1/completions")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    ).encode()
    request = head + data
    way = choose.choice(["stay", "stay", "head", "body", "sent", "late", "read", "read"])
    n_sent = {
        "head": choose.randrange(len(head)),
        "body": choose.randrange(len(head), len(request)),
    }
    return Visit(
        request,
        n_sent.get(way, len(request)),
        way == "stay",
        choose.randrange(1, 800 if kind is long else 4000) if way == "read" else 0,
        0.0 if way == "sent" else choose.expovariate(20),
        choose.random() < 0.5,
    )


# ---- how it is asked ----


async def pay(visit: Visit, port: int) -> str:
    """What became of it: left, or the status of its whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(visit.request[: visit.n_sent])
        if visit.stays:
            return checked(await reader.read())
        n_left = visit.n_read
        while n_left > 0 and (piece := await reader.read(n_left)):
            n_left -= len(piece)
        if not visit.n_read:
            await asyncio.sleep(visit.wait_s)
        return "left"
    finally:
        if visit.resets:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        writer.close()


def checked(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode()
    if b"text/event-stream" in head:
        assert body.endswith(b"\n\n\r\n0\r\n\r\n"), answer
        assert ENDS.search(body), answer
    else:
        assert json.loads(body).keys() & ANSWERS, answer
    return status


async def pay_all(visits: list[Visit], port: int) -> Counter[str]:
    gate = asyncio.Semaphore(N_AT_ONCE)

    async def one(visit: Visit) -> str:
        async with gate, asyncio.timeout(LIMIT_S):
            return await pay(visit, port)

    return Counter(await asyncio.gather(*map(one, visits)))


# ---- what is left of them ----


class Trace(NamedTuple):
    """Of the front end and of the worker."""

    descriptors: list[int]
    threads: list[int]


def trace(server: Server) -> Trace:
    processes = [Path("/proc") / str(pid) for pid in (server.process.pid, *server.workers())]
    return Trace(
        [len(os.listdir(process / "fd")) for process in processes],
        [len(os.listdir(process / "task")) for process in processes],
    )


def n_half_closed(port: int) -> int:
    """Connections whose clients have left and that the server keeps: CLOSE_WAIT."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "08" for row in rows)


def is_idle(server: Server) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    received = server.metric("cflow_requests_received_total")
    return (
        not any(server.metric(f"vllm:{name}") for name in gauges)
        and server.metric("vllm:request_success_total") == received
        and not n_half_closed(server.port)
    )


def asked(server: Server) -> list[Any]:
    """Greedy answers with their log-probabilities."""
    return [
        server.complete("0 abcabc", max_tokens=40, logprobs=3)["choices"],
        server.complete("ab" * 800, max_tokens=10, logprobs=1, echo=True)["choices"],
        server.chat("hello", max_tokens=30, logprobs=True, top_logprobs=2)["choices"],
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small random model whose template has tools."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny.llama(max_position_embeddings=4096)
    tiny.randomise(model, 0)
    model.float()
    tiny.save(model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    convert(str(folder), folder.parent / "leaving.cflow")
    with serving(folder.parent / "leaving.cflow", *FLAGS) as server:
        yield server


def test_a_thousand_clients_that_leave_leave_nothing(server: Server) -> None:
    choose = Random(6)
    before = asked(server)
    ends: Counter[str] = Counter()
    traces: list[Trace] = []
    for _ in range(2):
        ends += asyncio.run(pay_all([visit(choose) for _ in range(HALF)], server.port))
        until(lambda: is_idle(server))
        traces.append(trace(server))
    half, whole = traces
    print(ends, half, whole)
    assert asked(server) == before
    assert whole.descriptors == half.descriptors
    assert whole.threads[0] <= MOST_THREADS
    assert ends.keys() <= {"left", "200", "400", "404", "503"}  # 503: timeout_s without a token
    assert ends["left"] > HALF
    assert ends["200"] > HALF / 4
    assert server.metric("cflow_cancelled_total") > 0  # some were in the engine


def test_clients_that_leave_before_their_embeddings_leave_nothing(tmp_path: Path) -> None:
    source = embedding_model.save(embedding_model.build(context=1024), tmp_path / "m")
    convert(str(source), tmp_path / "m.cflow")
    choose = Random(7)
    ask = {"input": ["0 abcabc", "ab" * 100]}
    with serving(tmp_path / "m.cflow", "--max-sequences", "4") as server:
        before = server.http.post("/v1/embeddings", json=ask).json()["data"]
        ends = asyncio.run(pay_all([visit(choose, {embedded: 1}) for _ in range(200)], server.port))
        until(lambda: is_idle(server))
        assert server.http.post("/v1/embeddings", json=ask).json()["data"] == before
        assert ends.keys() == {"left", "200"}
        assert server.metric("cflow_cancelled_total") > 0
