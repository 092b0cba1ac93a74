"""POST /v1/messages over recorded answers, with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from msgspec import structs

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Progress
from cflow.engine.text.dialect import HERMES, Dialect
from harness.fake_engine import READY, Call, FakeEngine, deltas_of
from harness.live import Live
from harness.scripts import CALL, CALL_2, Template, say

TOOLS: list[Any] = [
    {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "clock", "description": "the time", "input_schema": {"type": "object"}},
]  # fmt: skip
Tell = Callable[..., Live]


@pytest.fixture
def tell(serve: Any) -> Tell:
    def start(
        text: str,
        reason: str = "stop",
        *,
        thinks: bool = False,
        stop: str | None = None,
        **more: Any,
    ) -> Live:
        engine = FakeEngine(
            script=say(text, reason=reason, stop=stop),
            dialect=Dialect(HERMES, thinks, frozenset(more.pop("switches", ()))),
            template=Template(""),
        )
        engine.put(ready=structs.replace(READY, max_context=600))
        live: Live = serve(engine, **more)
        return live

    return start


@pytest.fixture
def client() -> Iterator[Callable[..., anthropic.Anthropic]]:
    """client(live, ...): Anthropic's client, closed at the end of the test."""
    with ExitStack() as open_clients:

        def make(live: Live, api_key: str = "none") -> anthropic.Anthropic:
            url = f"http://127.0.0.1:{live.port}"
            made = anthropic.Anthropic(base_url=url, max_retries=0, api_key=api_key)
            return open_clients.enter_context(made)

        yield make


def ask(live: Live, **fields: Any) -> httpx.Response:
    turns = [{"role": "user", "content": "hi"}]
    return live.post("/v1/messages", {"messages": turns, "max_tokens": 64} | fields)


def events(live: Live, **fields: Any) -> list[dict[str, Any]]:
    found = []
    for block in filter(None, ask(live, stream=True, **fields).text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def seen(live: Live, what: str = "messages") -> Any:
    assert isinstance(live.engine.template, Template)
    return live.engine.template.seen[what]


def test_an_answer(tell: Tell) -> None:
    body = ask(tell("Hello.")).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake/model",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("user:hi|"),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": body["usage"]["output_tokens"],
        },
    }


def test_the_order_of_events(tell: Tell) -> None:
    live = tell("<think>a</think>b" + CALL, thinks=True)
    found = events(live, tools=TOOLS)
    names = [event["type"] for event in found]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    kinds = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    is_open = -1
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert is_open == -1
            is_open = event["index"]
        assert event["index"] == is_open
        if event["type"] == "content_block_stop":
            is_open = -1
    deltas = [e["delta"]["type"] for e in found if e["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta"
    ]  # fmt: skip


HEAD = '<tool_call>\n{"name": "get_we'
ARGUMENTS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü'
THOUGHT = "<think>so</think>"


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("A b.", "stop", None, "end_turn"),
        ("", "stop", None, "end_turn"),
        ("A b", "length", None, "max_tokens"),
        ("A b", "stop", "c", "stop_sequence"),
        (CALL, "stop", None, "tool_use"),
        ("A " + CALL + CALL_2, "stop", None, "tool_use"),
        ('{"name": "get_weather", "arguments": {"city": "Rome"}}', "stop", None, "tool_use"),  # F17
        (HEAD, "length", None, "max_tokens"),
        (ARGUMENTS, "length", None, "max_tokens"),
        (CALL + HEAD, "length", None, "max_tokens"),
        (CALL + ARGUMENTS, "length", None, "max_tokens"),
        ("<think>so", "length", None, "max_tokens"),
    ],
)
def test_a_stream_is_the_whole_answer(
    tell: Tell, client: Any, thought: str, text: str, reason: str, stop: str | None, expected: str
) -> None:
    live = tell(thought + text, reason, thinks=True, stop=stop)
    fields: dict[str, Any] = {
        "model": "fake/model",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 64,
        "tools": TOOLS,
        "stop_sequences": ["c"],
    }
    sdk = client(live)
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    streamed_blocks, whole_blocks = (
        [block.to_dict() | {"id": None} for block in message.content]
        for message in (streamed, whole)
    )
    assert streamed_blocks == whole_blocks
    assert streamed.stop_reason == whole.stop_reason == expected
    assert streamed.stop_sequence == whole.stop_sequence == stop
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("arguments", ['{"a": 01}', "{'a': 1}"])
def test_arguments_that_are_no_json_are_one_parameter(tell: Tell, arguments: str) -> None:
    """The model is free in what it writes with tool_choice auto."""
    live = tell(CALL.replace('{"city": "Zürich"}', arguments))
    (block,) = ask(live, tools=TOOLS).json()["content"]
    assert (block["name"], block["input"]) == ("get_weather", {"arguments": arguments})
    found = events(live, tools=TOOLS)
    pieces = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert "".join(pieces) == arguments
    assert found[-1]["type"] == "message_stop"


def test_blocks_become_turns(tell: Tell) -> None:
    live = tell("x")
    use = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "9"}],
    }
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                          {"type": "text", "text": "c"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
        {"role": "system", "content": [{"type": "text", "text": "r"}]},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]  # fmt: skip
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "s", **cached}]
    response = ask(live, messages=turns, system=system, tools=[TOOLS[1] | cached])
    assert response.status_code == 200, response.text
    function = {"name": "clock", "arguments": {"a": 1}}
    assert seen(live) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning_content": "t",
         "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "9"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "r"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]  # fmt: skip
    (tool,) = seen(live, "tools")
    assert tool["function"] == {
        "name": "clock", "description": "the time", "parameters": {"type": "object"}
    }  # fmt: skip


def test_a_failed_tool_says_so(tell: Tell) -> None:
    live = tell("x")
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no disk", "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "clock", "input": {}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert ask(live, messages=turns, tools=TOOLS).status_code == 200
    assert seen(live)[-1]["content"] == "Error: no disk"


def test_the_beginning_of_an_answer_is_continued(tell: Tell) -> None:
    live = tell("mat.")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A cat on a "}]
    response = ask(live, messages=turns)
    assert response.json()["content"] == [{"type": "text", "text": "mat."}]
    (call,) = live.engine.calls
    assert bytes(call.prompt).decode() == "user:q|assistant:A cat on a "


def test_tools_that_run_elsewhere_are_named(tell: Tell) -> None:
    live = tell(CALL)
    search = {"type": "web_search_20250305", "name": "web_search"}
    response = ask(live, tools=[search, TOOLS[0] | {"type": None}, TOOLS[1] | {"type": "custom"}])
    assert response.headers["x-cflow-ignored-params"] == "tools.web_search_20250305"
    assert response.json()["content"][0]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("choice", "is_forced", "is_single"),
    [
        ({"type": "auto"}, False, False),
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "clock"}, True, True),
    ],
)
def test_choices(tell: Tell, choice: dict[str, Any], is_forced: bool, is_single: bool) -> None:
    live = tell(CALL_2 + CALL_2.replace("{}", '{"a": 1}'))
    body = ask(live, tools=TOOLS, tool_choice=choice).json()
    assert len(body["content"]) == (1 if is_single else 2)
    assert (live.engine.calls[-1].sampling.grammar is not None) == is_forced


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
    ],
)
def test_thinking_is_switched(tell: Tell, fields: dict[str, Any], value: bool | None) -> None:
    live = tell("x", thinks=True, switches=["enable_thinking"])
    assert ask(live, **fields).status_code == 200
    assert live.engine.template.seen.get("enable_thinking") is value
    without = ask(tell("x"), **fields)
    assert without.headers.get("x-cflow-ignored-params") == (None if value is None else "thinking")


def test_an_answer_may_follow_a_schema(tell: Tell) -> None:
    live = tell("{}")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert ask(live, **fields).status_code == 200
        assert live.engine.calls[-1].sampling.grammar is not None


def test_tokens_are_counted(tell: Tell, client: Any) -> None:
    live = tell("x")
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    count = client(live).messages.count_tokens(model="fake/model", messages=turns, tools=TOOLS)
    usage = ask(live, tools=TOOLS).json()["usage"]
    assert count.input_tokens == usage["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124"}, {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124"}, TOOLS[0], TOOLS[0]]}, "tools[2].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
         "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}},
         "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"output_config": {"effort": "x"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "context"),
    ],
)  # fmt: skip
def test_refusals_have_anthropic_s_shape(tell: Tell, fields: dict[str, Any], named: str) -> None:
    response = ask(tell("x"), **fields)
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def test_f46_x_api_key_is_a_key(tell: Tell, client: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("me: secret\n")
    live = tell("x", api_keys=tmp_path / "keys")
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    right, wrong = client(live, api_key="secret"), client(live, api_key="other")
    assert right.messages.create(model="fake/model", max_tokens=8, messages=turns).content
    assert live.engine.requests[-1].key == "me"
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        wrong.messages.create(model="fake/model", max_tokens=8, messages=turns)
    models = live.client.get("/v1/models", headers={"x-api-key": "secret"})
    assert models.status_code == 200
    both = {"x-api-key": "secret", "authorization": "Bearer other"}
    assert live.client.get("/v1/models", headers=both).status_code == 401
    with pytest.raises(anthropic.NotFoundError):
        right.messages.create(model="other", max_tokens=8, messages=turns)


def test_a_failure_in_the_stream_is_an_event(serve: Any) -> None:
    async def script(call: Call) -> AsyncIterator[Delta | Progress]:
        yield deltas_of(call, 0, b"ab", "stop")[0]
        raise EngineError("io_error", "the disk")

    live = serve(FakeEngine(script=script, template=Template("")))
    last = events(live)[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the disk"}}


def test_models_have_anthropic_s_shape(tell: Tell, client: Any) -> None:
    sdk = client(tell("x"))
    (model,) = sdk.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "fake/model", "fake/model")
    assert model.created_at.timestamp() == 1700000000
    assert model.max_input_tokens == 600
    assert sdk.models.retrieve("fake/model") == model
    with pytest.raises(anthropic.NotFoundError, match="fake/model"):
        sdk.models.retrieve("other")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", "/v1/messages?beta=true", "{", 400, "invalid_request_error"),
        ("GET", "/v1/messages", "", 405, "invalid_request_error"),
        ("POST", "/v1/messages", "x" * (9 << 20), 413, "request_too_large"),
        ("POST", "/api/event_logging/batch", "{}", 404, "not_found_error"),
    ],
)
def test_other_refusals(
    tell: Tell, method: str, path: str, content: str, status: int, kind: str
) -> None:
    headers = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
    response = tell("x").client.request(method, path, content=content, headers=headers)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["x-request-id"]


def test_a_full_queue_is_a_rate_limit(tell: Tell) -> None:
    live = tell("x")
    live.engine.refuse = EngineError("queue_full", "the queue is full")
    response = ask(live)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
