"""Scripts of the fake engine: answers with calls, and a template that records what it is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from msgspec.structs import replace

from cflow.engine.base.messages import Delta, Progress
from cflow.engine.text.template import Rendered
from harness.fake_engine import EOS, Call, Script, all_own, deltas_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALL_2 = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def say(*texts: str, reason: str = "stop", stop: str | None = None) -> Script:
    """Choice i says texts[i]. stop: the stop string that ends it."""

    async def script(call: Call) -> AsyncIterator[Delta | Progress]:
        for choice in range(call.n_choices):
            tokens = [*texts[choice].encode(), *([EOS] if reason == "stop" else [])]
            for delta in deltas_of(call, choice, tokens, reason):
                yield replace(delta, finish=delta.finish and replace(delta.finish, stop=stop))

    return script


class Template:
    """Shows what it is given."""

    def __init__(self, end: str = "assistant:") -> None:
        self.seen: dict[str, Any] = {}
        self._end = end

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> Rendered:
        self.seen = {"messages": messages} | variables
        text = "|".join(f"{m['role']}:{m['content']}" for m in messages)
        return all_own(text + ("|" + self._end if variables["add_generation_prompt"] else "|end"))
