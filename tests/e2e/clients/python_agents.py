"""One question to an agent with one tool; prints its last text as JSON: python_agents.py CLIENT URL."""

from __future__ import annotations

import json
import sys
from typing import Any

QUESTION = "What is the weather in Zürich?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sun in {city}"


def openai_chat(url: str) -> str:
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    client = OpenAI(base_url=url)
    while True:
        answer = client.chat.completions.create(model="M", messages=messages, tools=[tool])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_stream(url: str) -> str:
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    function: Any = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
    client = OpenAI(base_url=url)
    while True:
        with client.chat.completions.stream(
            model="M", messages=messages, tools=[{"type": "function", "function": function}]
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_responses(url: str) -> str:
    from openai import OpenAI

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    client = OpenAI(base_url=url)
    while True:
        with client.responses.stream(model="M", input=items, tools=[tool]) as stream:
            answer = stream.get_final_response()
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            result = get_weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


def anthropic_messages(url: str) -> str:
    return _anthropic(url, is_streamed=False)


def anthropic_stream(url: str) -> str:
    return _anthropic(url, is_streamed=True)


def _anthropic(url: str, is_streamed: bool) -> str:
    from anthropic import Anthropic

    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]
    client = Anthropic(base_url=url, api_key="none")
    ask: dict[str, Any] = {"model": "M", "max_tokens": 500, "tools": tools}
    while True:
        if is_streamed:
            with client.messages.stream(messages=turns, **ask) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=turns, **ask)
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in message.content if block.type == "text")
        assert message.stop_reason == "tool_use"
        results = [
            {
                "type": "tool_result",
                "tool_use_id": use.id,
                "content": get_weather(str(use.input["city"])),
            }
            for use in uses
        ]
        turns += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


def pydantic_ai(url: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("M", provider=OpenAIProvider(base_url=url, api_key="none"))
    return str(Agent(model, tools=[get_weather]).run_sync(QUESTION).output)


def openai_agents_chat(url: str) -> str:
    return _openai_agents(url, "OpenAIChatCompletionsModel")


def openai_agents_responses(url: str) -> str:
    return _openai_agents(url, "OpenAIResponsesModel")


def _openai_agents(url: str, kind: str) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)(model="M", openai_client=AsyncOpenAI(base_url=url))
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(get_weather)])
    return str(agents.Runner.run_sync(agent, QUESTION).final_output)


def langchain_agent(url: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="M", base_url=url), [get_weather])
    end = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    return str(end["messages"][-1].content)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
