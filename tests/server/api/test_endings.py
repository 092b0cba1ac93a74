"""A stream is the whole answer, item by item, over every API and every ending."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from msgspec import structs

from cflow.engine.text.dialect import HERMES, Dialect
from harness.fake_engine import READY, FakeEngine
from harness.live import Live
from harness.scripts import CALL, CALL_2, Template, say

THOUGHTS = {"": "", "thinks ": "<think>so it is</think>", "thinks on ": "<think>so it"}
TEXTS = {"": "", "text ": "It is\n12."}
CALLS = {
    "": "",
    "a call ": CALL,
    "two calls ": f"{CALL}\n{CALL_2}",
    "a head ": CALL[:24],
    "arguments ": CALL[:58],
    "a call and a head ": CALL + CALL_2[:24],
    "a broken call ": CALL.replace("}}", "}"),
}
ENDS = {"stop": ("stop", None), "length": ("length", None), "a stop string": ("stop", "!")}
ANSWERS = [
    pytest.param(thought + text + calls, *end, id=f"{a}{b}{c}{d}")
    for (a, thought), (b, text), (c, calls), (d, end) in itertools.product(
        THOUGHTS.items(), TEXTS.items(), CALLS.items(), ENDS.items()
    )
    if not (a == "thinks on " and (text or calls))
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("get_weather", "clock")
TURNS = [{"role": "user", "content": "hi"}]


def functions(**more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": PARAMETERS, **more} for name in NAMES]


@pytest.fixture(scope="module")
def server() -> Any:
    live = Live(FakeEngine())
    yield live
    live.close()


@pytest.fixture
def telling(server: Live) -> Any:
    """telling(text, reason, stop): the server, whose model says that."""

    def start(text: str, reason: str, stop: str | None) -> Live:
        script = say(text, reason=reason, stop=stop)
        engine = FakeEngine(script=script, dialect=Dialect(HERMES, True), template=Template(""))
        engine.put(ready=structs.replace(READY, max_context=600))
        server.engine.become(engine)
        return server

    return start


def told(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = live.post(path, body | {"stream": True}).text
    data = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(one) for one in data]


def plain(value: Any) -> Any:
    """The value without what differs between two answers: ids and times."""
    if isinstance(value, dict):
        dropped = {"id", "call_id", "created", "created_at", "item_id"}
        return {key: plain(item) for key, item in value.items() if key not in dropped}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("text", "reason", "stop"), ANSWERS)
def test_f26_chats(telling: Any, text: str, reason: str, stop: str | None) -> None:
    live = telling(text, reason, stop)
    tools = [{"type": "function", "function": function} for function in functions()]
    body = {"messages": TURNS, "tools": tools, "stream_options": {"include_usage": True}}
    whole = live.post(
        "/v1/chat/completions", {k: v for k, v in body.items() if k != "stream_options"}
    )
    (choice,) = whole.json()["choices"]
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, str]] = []
    ends = {}
    for chunk in told(live, "/v1/chat/completions", body):
        for part in chunk["choices"]:
            for name in texts:
                texts[name] += part["delta"].get(name) or ""
            for call in part["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            if part["finish_reason"]:
                ends = {name: part[name] for name in ("finish_reason", "stop_reason")}
        usage = chunk.get("usage")
    message = choice["message"]
    assert texts["content"] == (message["content"] or "")
    assert texts["reasoning_content"] == message.get("reasoning_content", "")
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    assert ends == {name: choice[name] for name in ends}
    assert usage == whole.json()["usage"]
    assert "<tool_call>" not in texts["content"] or reason != "length"


@pytest.mark.parametrize(("text", "reason", "stop"), ANSWERS)
def test_f26_responses(telling: Any, text: str, reason: str, stop: str | None) -> None:
    live = telling(text, reason, stop)
    body = {"input": "hi", "tools": functions(type="function")}
    whole = plain(live.post("/v1/responses", body).json())
    events = told(live, "/v1/responses", body)
    assert plain(events[-1]["response"]) == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert plain(done) == whole["output"]


@pytest.mark.parametrize(("text", "reason", "stop"), ANSWERS)
def test_f26_messages(telling: Any, text: str, reason: str, stop: str | None) -> None:
    live = telling(text, reason, stop)
    tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    body = {"messages": TURNS, "max_tokens": 500, "tools": tools}
    whole = live.post("/v1/messages", body).json()
    kinds, texts = [], []
    for event in told(live, "/v1/messages", body):
        if event["type"] == "content_block_start":
            kinds.append(event["content_block"]["type"])
            texts.append("")
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
        if event["type"] == "message_delta":
            assert event["delta"] == {
                name: whole[name] for name in ("stop_reason", "stop_sequence")
            }
            assert event["usage"] == whole["usage"]
    assert kinds == [block["type"] for block in whole["content"]]
    for block, shown in zip(whole["content"], texts, strict=True):
        if block["type"] != "tool_use":
            assert block[block["type"]] == shown
        elif shown.endswith("}"):
            assert block["input"] == json.loads(shown or "{}")


@pytest.mark.parametrize(("text", "reason", "stop"), ANSWERS[::5])
def test_f26_completions(telling: Any, text: str, reason: str, stop: str | None) -> None:
    live = telling(text, reason, stop)
    (whole,) = live.post("/v1/completions", {"prompt": "hi", "max_tokens": 500}).json()["choices"]
    events = told(live, "/v1/completions", {"prompt": "hi", "max_tokens": 500})
    shown = "".join(choice["text"] for event in events for choice in event["choices"])
    last = [choice for event in events for choice in event["choices"]][-1]
    assert shown == whole["text"]
    assert (last["finish_reason"], last["stop_reason"]) == (
        whole["finish_reason"],
        whole["stop_reason"],
    )
