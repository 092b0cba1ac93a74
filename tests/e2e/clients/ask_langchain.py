"""What langchain-openai gets from a server, as JSON: ask_langchain.py URL."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "Name three colours."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It rains in {city}."


def ask(url: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model": "M", "base_url": f"{url}/v1", "api_key": "none", "temperature": 0,
    }  # fmt: skip
    model = ChatOpenAI(**common, max_tokens=16)
    found: dict[str, Any] = {}

    whole = model.invoke(QUESTION)
    found["whole"] = whole.content
    found["usage"] = (whole.usage_metadata or {})["output_tokens"]
    found["reason"] = whole.response_metadata["finish_reason"]
    found["streamed"] = "".join(str(chunk.content) for chunk in model.stream(QUESTION))
    found["later"] = asyncio.run(model.ainvoke(QUESTION)).content
    found["many"] = [answer.content for answer in model.batch([QUESTION, "Say hello."])]
    found["text"] = OpenAI(**common, max_tokens=6).invoke("1 2 3 4")

    wide = ChatOpenAI(**common, max_tokens=80)
    calling = wide.bind_tools([get_weather], tool_choice="required")
    (call,) = calling.invoke("What is the weather in Paris?").tool_calls
    found["call"] = {"name": call["name"], "arguments": call["args"]}
    found["told"] = get_weather.invoke(call["args"])

    for method in ("json_schema", "function_calling"):
        form = wide.with_structured_output(Person, method=method)
        person = form.invoke("Extract: Ada Lovelace, 36 years old.")
        assert isinstance(person, Person)
        found[method] = person.model_dump()
    return found


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1])))
