"""Scripts of the fake engine: answers with calls, and a template that records what it is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from cflow.engine.base.messages import Delta, Progress
from cflow.engine.text.template import Rendered
from harness.fake_engine import EOS, Call, Script, all_own, deltas_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALL_2 = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def say(*texts: str, reason: str = "stop") -> Script:
    """Choice i says texts[i]."""

    async def script(call: Call) -> AsyncIterator[Delta | Progress]:
        for choice in range(call.n_choices):
            tokens = [*texts[choice].encode(), *([EOS] if reason == "stop" else [])]
            for delta in deltas_of(call, choice, tokens, reason):
                yield delta

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
