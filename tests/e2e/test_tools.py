"""Tools and schemas with a real model that knows them, through the official openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall
from pydantic import BaseModel

from harness.servers import Server, serving
from oracles.real_models import RealModel

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the current time of a time zone",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] for t in (WEATHER, TIME)}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = RealModel.fetch("qwen2.5-coder-0.5b").cflow
    with serving(model, "--context", "2048", "--max-sequences", "8") as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def check(call: Any) -> tuple[str, Any]:
    """Name and arguments, which must fit the tool's schema."""
    assert isinstance(call, ChatCompletionMessageToolCall)
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name])
    return call.function.name, arguments


def test_a_tool_is_called_and_its_result_is_told(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "M", "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    first = client.chat.completions.create(messages=QUESTION, tool_choice="required", **fields)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls
    name, arguments = check(message.tool_calls[0])
    assert (name, arguments["city"], arguments["unit"]) == ("get_weather", "Paris", "celsius")
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"degrees": 17}',
    }
    turns: list[Any] = [*QUESTION, message, result]
    second = client.chat.completions.create(messages=turns, **fields)
    assert "17" in (second.choices[0].message.content or "")
    assert second.choices[0].finish_reason == "stop"


def test_a_named_tool_is_called_whatever_is_asked(client: openai.OpenAI) -> None:
    """Hot, in several choices: all fit, the pattern too."""
    answer = client.chat.completions.create(
        model="M", messages=QUESTION, tools=[WEATHER, TIME], n=6, temperature=1.5, seed=1,
        max_tokens=300, parallel_tool_calls=False,
        tool_choice={"type": "function", "function": {"name": "get_time"}},
    )  # fmt: skip
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert check(call)[0] == "get_time"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_calls_are_the_whole_ones(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "model": "M", "messages": QUESTION, "tools": [WEATHER], "temperature": 0,
        "max_tokens": 120, "tool_choice": choice,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    calls = [
        [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        for message in (streamed.message, whole.message)
    ]
    assert calls[0] == calls[1]
    if choice == "required":
        assert calls[0]


def test_nothing_is_called_when_it_must_not_be(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="M", messages=QUESTION, tools=[WEATHER], tool_choice="none", max_tokens=40, temperature=0
    )  # fmt: skip
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].message.content


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_is_filled_from_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="M",
        messages=[{"role": "user", "content": "Extract: Ada Lovelace, 36 years old."}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert ("Ada" in parsed.name, parsed.age) == (True, 36)


# ---- /v1/responses ----


def test_responses_call_a_tool_and_go_on(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    fields: dict[str, Any] = {"model": "M", "tools": [tool], "temperature": 0}
    question = QUESTION[0]["content"]
    first = client.responses.create(input=question, tool_choice="required", **fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] == "Paris"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 17}'}
    turns: Any = [{"role": "user", "content": question}, call, result]
    second = client.responses.create(input=turns, max_output_tokens=60, **fields)
    assert "17" in second.output_text
    assert second.usage is not None
    assert second.usage.output_tokens > 5


def test_streamed_responses_are_the_whole_ones(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "M", "input": "Name three colours.", "instructions": "Answer with one line.",
        "temperature": 0, "max_output_tokens": 30,
    }  # fmt: skip
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert whole.output_text
    assert text == final.output_text == whole.output_text
    assert final.status == whole.status
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_streamed_responses_call_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    question = QUESTION[0]["content"]
    with client.responses.stream(
        model="M", input=question, tools=[tool], tool_choice="required", temperature=0
    ) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", "".join(pieces))
    assert len(pieces) > 2
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["get_weather"])


def test_responses_are_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="M", input="Extract: Ada Lovelace, 36 years old.", text_format=Person, temperature=0
    )
    assert answer.output_parsed is not None
    assert answer.output_parsed.age == 36
