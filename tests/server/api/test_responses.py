"""POST /v1/responses over recorded answers, checked against the openai client's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from msgspec import structs
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Progress
from cflow.engine.text.dialect import HERMES, Dialect
from cflow.server.api.stored import ResponseStore
from harness.fake_engine import READY, Call, FakeEngine, deltas_of
from harness.live import Live, error_of, request
from harness.scripts import CALL, CALL_2, Template, say
from harness.waiting import until

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "clock"},
]  # fmt: skip
LEFT = 'http_requests_total{handler="/v1/responses",method="POST",status="4xx"}'
Tell = Callable[..., Live]


@pytest.fixture
def tell(serve: Any) -> Tell:
    def start(text: str, reason: str = "stop", *, thinks: bool = False) -> Live:
        engine = FakeEngine(
            script=say(text, reason=reason),
            dialect=Dialect(HERMES, thinks),
            template=Template(""),
        )
        engine.put(ready=structs.replace(READY, max_context=400))
        live: Live = serve(engine)
        return live

    return start


def ask(live: Live, **fields: Any) -> httpx.Response:
    return live.post("/v1/responses", {"input": "hi"} | fields)


def whole(live: Live, **fields: Any) -> Response:
    response = ask(live, **fields)
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json(), strict=True)


def stream(live: Live, **fields: Any) -> list[Any]:
    """Its events, each as the client's types have it, numbered from 0."""
    response = ask(live, stream=True, **fields)
    events = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        events.append(EVENT.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def shown(response: Response) -> list[tuple[str, ...]]:
    """The output without its ids."""
    out: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "message":
            (part,) = item.content
            out.append(("message", item.status, getattr(part, "text", "")))
        elif item.type == "reasoning":
            assert item.content
            out.append(("reasoning", str(item.status), item.content[0].text))
        elif item.type == "function_call":
            out.append(("call", str(item.status), item.name, item.arguments))
    assert len(out) == len(response.output)
    return out


CASES = [
    ("Hello.", "stop", [("message", "completed", "Hello.")]),
    ("", "stop", [("message", "completed", "")]),
    ("Hel", "length", [("message", "incomplete", "Hel")]),
    ("<think>\nHm.\n</think>\n\nTwo.", "stop",
     [("reasoning", "completed", "Hm."), ("message", "completed", "Two.")]),
    ("Look:\n" + CALL + "\n" + CALL_2, "stop",
     [("message", "completed", "Look:"),
      ("call", "completed", "get_weather", '{"city": "Zürich"}'), ("call", "completed", "clock", "{}")]),
    (CALL[:66], "length", [("call", "incomplete", "get_weather", CALL[CALL.index('{"c') : 66])]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason", "expected"), CASES)
def test_answers(tell: Tell, text: str, reason: str, expected: list[Any]) -> None:
    live = tell(text, reason, thinks=True)
    response = whole(live, tools=TOOLS)
    assert shown(response) == expected
    is_cut = reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    details = response.incomplete_details
    assert (details and details.reason) == ("max_output_tokens" if is_cut else None)
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == len(text.encode()) + (not is_cut)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert bool(usage.output_tokens_details.reasoning_tokens) == text.startswith("<think>")


@pytest.mark.parametrize(("text", "reason", "expected"), [case for case in CASES if case[0]])
def test_streams_end_with_what_they_told(
    tell: Tell, text: str, reason: str, expected: list[Any]
) -> None:
    events = stream(tell(text, reason, thinks=True), tools=TOOLS)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{'incomplete' if reason == 'length' else 'completed'}"
    final = events[-1].response
    assert shown(final) == expected
    texts = [""] * len(final.output)
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
            assert event.item_id == final.output[event.output_index].id
    assert texts == [item[-1] for item in expected]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(expected)))


def seen(live: Live, what: str = "messages") -> list[dict[str, Any]]:
    """What the template was shown."""
    assert isinstance(live.engine.template, Template)
    shown: list[dict[str, Any]] = live.engine.template.seen[what]
    return shown


def test_items_become_turns(tell: Tell) -> None:
    live = tell("ok")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "We"}, {"type": "input_text", "text": "ather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Look:", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "dry"}]},
    ]  # fmt: skip
    whole(live, input=items, instructions="Be brief.", tools=TOOLS)
    calls = [
        {"id": "a", "type": "function", "function": {"name": "clock", "arguments": {}}},
        {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}},
    ]  # fmt: skip
    assert seen(live) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "b", "content": "dry"},
    ]


def test_an_answer_can_be_sent_back_as_it_came(tell: Tell) -> None:
    live = tell("<think>Hm.</think>Look: " + CALL, thinks=True)
    body = ask(live, tools=TOOLS).json()
    result = {
        "type": "function_call_output",
        "call_id": body["output"][-1]["call_id"],
        "output": "dry",
    }
    whole(live, input=[{"role": "user", "content": "q"}, *body["output"], result], tools=TOOLS)
    _, answer, told = seen(live)
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "Look:")
    assert answer["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    assert told["tool_call_id"] == answer["tool_calls"][0]["id"]


def test_knobs_reach_the_engine(tell: Tell) -> None:
    live = tell("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = whole(
        live, text={"format": form}, temperature=0.5, top_p=0.9, seed=4, max_output_tokens=9,
        metadata={"a": "b"}, store=True, truncation="auto", reasoning={"effort": "low"},
    )  # fmt: skip
    how = live.engine.calls[0].sampling
    assert (how.temperature, how.top_p, how.seed, how.max_tokens) == (0.5, 0.9, 4, 9)
    assert how.grammar is not None
    assert (response.temperature, response.top_p, response.metadata) == (0.5, 0.9, {"a": "b"})
    whole(live, tools=TOOLS, tool_choice={"type": "function", "name": "clock"})
    assert "clock" in (live.engine.calls[-1].sampling.grammar or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"), ({"input": []}, "input"), ({"input": None}, "input"),
        ({"input": [5]}, "input[0].type"), ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}], "instructions": "x"}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]},
         "input[0].tool_calls[0].function.name"),
        ({"input": "x" * 500}, "input"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"), ({"return_token_ids": True}, "return_token_ids"),
        ({"top_logprobs": 21}, "top_logprobs"), ({"n": 2}, "n"), ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]},
         "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0]"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "wizard"}}}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter(tell: Tell, fields: dict[str, Any], param: str) -> None:
    response = tell("x").post("/v1/responses", {"input": "hi"} | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert "messages" not in error["message"]


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        (EngineError("io_error", "the disk"), "io_error", "io_error: the disk"),
        (RuntimeError("secret"), "internal", "internal: The server failed"),
    ],
)
def test_a_failure_in_the_stream_is_an_event(
    serve: Any, fault: Exception, code: str, told: str
) -> None:
    async def fail(call: Call) -> AsyncIterator[Delta | Progress]:
        for delta in deltas_of(call, 0, b"Half", "length")[:3]:
            yield delta
        raise fault

    live: Live = serve(FakeEngine(script=fail))
    events = stream(live)
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error.code == "server_error"
    assert error.message.startswith(told)
    assert json.loads(ask(live).text)["error"]["code"] == code


HOSTED = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]


def test_f10_hosted_tools_are_named_and_left_out(tell: Tell) -> None:
    live = tell(CALL)
    response = ask(live, tools=[*HOSTED, *TOOLS])
    assert response.headers["x-cflow-ignored-params"] == "tools.web_search,tools.custom"
    (call,) = response.json()["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert [tool["function"]["name"] for tool in seen(live, "tools")] == [
        "get_weather",
        "clock",
    ]
    assert ask(tell("x"), tools=HOSTED).json()["output"][0]["content"][0]["text"] == "x"


def test_f10_items_of_hosted_tools_are_named_and_left_out(tell: Tell) -> None:
    live = tell("x")
    summary = [{"type": "summary_text", "text": "s"}]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": summary},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
        {"role": "assistant", "content": "found"},
        {"role": "user", "content": "more"},
    ]
    response = ask(live, input=items)
    assert response.headers["x-cflow-ignored-params"] == "input.reasoning,input.web_search_call"
    assert [(turn["role"], turn["content"]) for turn in seen(live)] == [
        ("user", "hi"), ("assistant", "found"), ("user", "more"),
    ]  # fmt: skip
    refused = live.post("/v1/responses", {"input": items[1:3]})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input")
    refused = live.post("/v1/responses", {"input": [*items[1:3], {"role": "wizard"}]})
    assert error_of(refused)["param"] == "input[2].role"


def test_a_renamed_parameter_leaves_the_value_as_it_is(tell: Tell) -> None:
    fields = {"input": "hi", "reasoning": {"effort": "reasoning_effort"}}
    error = error_of(tell("x").post("/v1/responses", fields))
    assert error["message"].startswith("reasoning.effort")
    assert "'reasoning_effort'" in error["message"]


def test_f10_functions_of_a_namespace_are_functions(tell: Tell) -> None:
    live = tell(CALL)
    space = {"type": "namespace", "name": "weather", "description": "d", "tools": [TOOLS[0]]}
    (call,) = ask(live, tools=[space]).json()["output"]
    assert (call["name"], call["namespace"]) == ("get_weather", "weather")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "hot"}
    ask(live, tools=[space], input=[{"role": "user", "content": "hi"}, call, output])
    (sent,) = seen(live)[1]["tool_calls"]
    assert sent["function"]["name"] == "get_weather"


@pytest.mark.parametrize("is_first", [True, False])
def test_f10_a_namespace_does_not_take_a_name(tell: Tell, is_first: bool) -> None:
    live = tell(CALL + CALL_2.replace("clock", "n.clock"))
    space = {"type": "namespace", "name": "n", "tools": [TOOLS[1]]}
    tools = [space, *TOOLS] if is_first else [*TOOLS, space]
    plain, spaced = ask(live, tools=tools).json()["output"]
    assert (plain["name"], plain.get("namespace")) == ("get_weather", None)
    assert (spaced["name"], spaced["namespace"]) == ("clock", "n")
    names = {tool["function"]["name"] for tool in seen(live, "tools")}
    assert names == {"get_weather", "clock", "n.clock"}


def test_f10_two_functions_of_one_name_are_told_apart(tell: Tell) -> None:
    live = tell(CALL.replace("get_weather", "b.get_weather"))
    spaces = [{"type": "namespace", "name": name, "tools": [TOOLS[0]]} for name in ("a", "b")]
    (call,) = ask(live, tools=spaces).json()["output"]
    assert (call["name"], call["namespace"]) == ("get_weather", "b")


def test_f10_calls_of_custom_tools_are_turns(tell: Tell) -> None:
    live = tell("x")
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "text"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    assert ask(live, input=items).status_code == 200
    _, call, result = seen(live)
    assert call["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "text"}}
    assert (result["role"], result["content"]) == ("tool", "done")


def test_f10_references_are_resolved_or_not_found(tell: Tell) -> None:
    live = tell("x")
    first = ask(live).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert ask(live, input=[reference, {"role": "user", "content": "b"}]).status_code == 200
    assert [turn["content"] for turn in seen(live)] == ["x", "b"]
    missing = ask(live, input=[reference | {"id": "msg_0"}])
    assert missing.status_code == 404
    assert (error_of(missing)["code"], error_of(missing)["param"]) == (
        "item_not_found",
        "input[0].id",
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "clock"},
        {"type": "function", "function": {"name": "clock"}},
    ],
)
def test_f20_a_named_tool_in_both_forms(tell: Tell, choice: dict[str, Any]) -> None:
    live = tell(CALL_2)
    (call,) = ask(live, tools=TOOLS, tool_choice=choice).json()["output"]
    assert call["name"] == "clock"


def test_f10_many_references_read_the_store_once(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tell("x")
    (item,) = ask(live).json()["output"]
    reads, items = [], ResponseStore.items

    def counted(store: ResponseStore, key: str) -> dict[str, dict[str, Any]]:
        reads.append(key)
        return items(store, key)

    monkeypatch.setattr(ResponseStore, "items", counted)
    body = ask(live, input=[{"type": "item_reference", "id": item["id"]}] * 100)
    assert (body.status_code, len(reads)) == (200, 1)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_f21_only_allowed_tools_count(tell: Tell, mode: str, is_nested: bool) -> None:
    allowed = [{"type": "web_search"}, {"type": "function", "name": "clock"}]
    choice: dict[str, Any] = {"mode": mode, "tools": allowed}
    choice = {"type": "allowed_tools"} | ({"allowed_tools": choice} if is_nested else choice)
    live = tell(CALL)  # a call of the other one
    body = ask(live, tools=TOOLS, tool_choice=choice).json()
    assert [item["type"] for item in body["output"]] == ["message"]
    assert [tool["function"]["name"] for tool in seen(live, "tools")] == ["clock"]
    grammar = live.engine.calls[-1].sampling.grammar
    assert (grammar is not None) == (mode == "required")


def test_f21_where_none_of_the_allowed_can_run(tell: Tell) -> None:
    live = tell(CALL)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    tools = [*HOSTED, *TOOLS]
    (item,) = ask(live, tools=tools, tool_choice=choice).json()["output"]
    assert item["type"] == "message"
    assert live.engine.template.seen["tools"] is None
    refused = ask(live, tools=tools, tool_choice=choice | {"mode": "required"})
    assert refused.status_code == 400
    assert "none of the tools: web_search" in error_of(refused)["message"]


def test_f25_input_may_be_left_out_where_instructions_are_there(tell: Tell) -> None:
    live = tell("x")
    assert live.post("/v1/responses", {"instructions": "i"}).status_code == 200
    assert seen(live) == [{"role": "system", "content": "i"}]
    refused = live.post("/v1/responses", {})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input": []}, 400),
        ({"input": [], "instructions": "i"}, 200),
        ({"input": ""}, 200),
        ({"input": [], "previous_response_id": "known"}, 200),
    ],
)
def test_f25_there_is_something_to_answer(tell: Tell, fields: dict[str, Any], status: int) -> None:
    live = tell("x")
    if "previous_response_id" in fields:
        fields = fields | {"previous_response_id": ask(live).json()["id"]}
    assert ask(live, **fields).status_code == status


class TestStore:
    def test_a_response_goes_on_from_another(self, tell: Tell) -> None:
        live = tell("x")
        first = ask(live, instructions="i").json()
        assert first["store"] is True
        second = ask(live, input="b", previous_response_id=first["id"]).json()
        assert second["previous_response_id"] == first["id"]
        assert [(t["role"], t["content"]) for t in seen(live)] == [
            ("user", "hi"), ("assistant", "x"), ("user", "b")
        ]  # fmt: skip
        events = stream(live, input="c", previous_response_id=second["id"])
        assert [t["content"] for t in seen(live)] == ["hi", "x", "b", "x", "c"]
        last = events[-1].response
        kept = live.client.get(f"/v1/responses/{last.id}").json()
        assert kept == json.loads(last.model_dump_json(exclude_unset=True))

    def test_it_is_shown_and_deleted(self, tell: Tell) -> None:
        live = tell("x")
        body = ask(live).json()
        path = f"/v1/responses/{body['id']}"
        assert live.client.get(path).json() == body
        assert live.client.delete(path).json() == {
            "id": body["id"], "object": "response", "deleted": True
        }  # fmt: skip
        for response in (live.client.get(path), live.client.delete(path)):
            assert response.status_code == 404
            assert error_of(response)["code"] == "response_not_found"
        gone = ask(live, previous_response_id=body["id"])
        assert (gone.status_code, error_of(gone)["param"]) == (404, "previous_response_id")

    def test_nothing_is_kept_unless_wanted(self, tell: Tell, serve: Any) -> None:
        live = tell("x")
        body = ask(live, store=False).json()
        assert body["store"] is False
        assert live.client.get(f"/v1/responses/{body['id']}").status_code == 404
        off = serve(FakeEngine(template=Template("")), response_memory=0)
        body = ask(off).json()
        assert body["store"] is False
        refused = ask(off, previous_response_id=body["id"])
        assert error_of(refused)["param"] == "previous_response_id"
        assert "response_memory" in error_of(refused)["message"]

    def test_an_answer_that_nobody_waits_for_is_not_kept(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def endless(call: Call) -> AsyncIterator[Delta | Progress]:
            yield deltas_of(call, 0, b"Half", "length")[0]
            await asyncio.Event().wait()

        kept: list[Any] = []
        monkeypatch.setattr(ResponseStore, "put", lambda *given: kept.append(given))
        live: Live = serve(FakeEngine(script=endless))
        sock = live.raw(request("POST", "/v1/responses", b'{"input": "hi"}'))
        until(lambda: bool(live.engine.answers))
        sock.close()
        until(lambda: LEFT in live.client.get("/metrics").text)
        assert kept == []

    def test_tokens_of_the_input_are_counted(self, tell: Tell) -> None:
        live = tell("x")
        first = ask(live).json()
        fields = {"input": "b", "previous_response_id": first["id"], "tools": TOOLS}
        counted = live.post("/v1/responses/input_tokens", fields).json()
        usage = ask(live, **fields).json()["usage"]
        assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_log_probabilities_belong_to_the_text(serve: Any) -> None:
    live = serve(FakeEngine())
    fields = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 3,
    }
    (item,) = ask(live, **fields).json()["output"]
    (part,) = item["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    told = [event for event in stream(live, **fields) if event.type == "response.output_text.delta"]
    streamed = [entry for event in told for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry["token"] for entry in part["logprobs"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nThree k.\n</think>\n\nk.", ["k."]),  # not the k of the reasoning or its mark
        ("Look: Zürich.\n" + CALL, ["Look: Zürich."]),
        (f"A {CALL}\n{CALL_2}\nmore", ["A", "more"]),
        ('{"name": "other"}', ['{"name": "other"}']),  # held back, as it may become a call
    ],
)
def test_log_probabilities_leave_marks_out(tell: Tell, text: str, expected: list[str]) -> None:
    live = tell(text, thinks="<think>" in text)
    fields = {"tools": TOOLS, "include": ["message.output_text.logprobs"]}
    (*_, last) = stream(live, **fields)
    for output in (ask(live, **fields).json()["output"], last.response.to_dict()["output"]):
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [part["text"] for part in parts] == expected
        told = [b"".join(bytes(e["bytes"]) for e in part["logprobs"]).decode() for part in parts]
        assert told == expected


@pytest.mark.parametrize("end", [5, 15, 20, 60, len(CALL) + 5, len(CALL) + 20])
def test_f18_a_cut_response_has_no_marks(tell: Tell, end: int) -> None:
    live = tell((CALL + "\n" + CALL_2)[:end], reason="length")
    response = whole(live, tools=TOOLS, tool_choice="required")
    assert response.status == "incomplete"
    last = stream(live, tools=TOOLS, tool_choice="required")[-1]
    assert last.type == "response.incomplete"
    assert shown(last.response) == shown(response)
    assert all(item[-1] == "" for item in shown(response) if item[0] == "message")
    assert [item[2] for item in shown(response) if item[0] == "call"] == (
        ["get_weather"] if end >= 60 else []
    )


def test_f17_bare_json_is_a_call(tell: Tell) -> None:
    text = '```json\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n```'
    expected = [
        ("reasoning", "completed", "Hm."),
        ("call", "completed", "get_weather", '{"city": "Zürich"}'),
    ]
    live = tell(f"<think>Hm.</think>{text}", thinks=True)
    assert shown(whole(live, tools=TOOLS)) == expected
    assert shown(stream(live, tools=TOOLS)[-1].response) == expected
