"""What litellm gets from a server, as JSON: ask_litellm.py URL, in an environment that has litellm."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "Name three colours."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


def ask(url: str) -> dict[str, Any]:
    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    chat = common | {"model": "openai/M", "messages": QUESTION, "max_tokens": 16}
    found: dict[str, Any] = {}

    whole = litellm.completion(**chat)
    found["whole"] = whole.choices[0].message.content
    found["reason"] = whole.choices[0].finish_reason
    found["usage"] = whole.usage.completion_tokens
    found["later"] = asyncio.run(litellm.acompletion(**chat)).choices[0].message.content

    chunks = list(litellm.completion(**chat, stream=True))
    found["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    text = litellm.text_completion(
        model="text-completion-openai/M", prompt="1 2 3 4", max_tokens=6, **common
    )
    found["text"] = text.choices[0].text

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = litellm.completion(
        **chat | {"messages": messages, "max_tokens": 60}, tools=[TOOL], tool_choice="required"
    )
    function = called.choices[0].message.tool_calls[0].function
    found["call"] = {"name": function.name, "arguments": json.loads(function.arguments)}

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    formed = litellm.completion(**chat | {"max_tokens": 60}, response_format=form)
    found["formed"] = json.loads(formed.choices[0].message.content)

    long = [{"role": "user", "content": "word " * 5000}]
    for name, body in (("unknown", {"model": "openai/nope"}), ("long", {"messages": long})):
        try:
            litellm.completion(**chat | body, num_retries=0)
        except Exception as error:
            found[name] = type(error).__name__
    return found


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1])))
