"""Calls that a model writes as its whole answer in JSON, bare or in a code block.

Some models write them so although their template asks for marks. A call is an object of exactly the
name of a tool and an object of arguments; several are a list. JSON is common in answers, so anything
else is content.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

_KNOWN = 32  # compiled grammars that are kept
_BYTES = LLTokenizer("byte")  # token ids are bytes
_LARK = r"""
start: BLANKS? (calls | FENCE calls BLANKS? "```") BLANKS?
FENCE: /```(json)?[ \t]*\r?\n[ \t\r\n]*/
BLANKS: /[ \t\r\n]+/
calls: %json """


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_CALLS = msgspec.json.Decoder(_Call | list[_Call])


class JsonCalls:
    """The text of an answer for as long as all of it may become calls."""

    def __init__(self, tools: tuple[str, ...]) -> None:
        """tools: names."""
        self._matcher = _matcher(tools).deep_copy()
        self.text = ""

    def take(self, text: str) -> bool:
        """Take more text; return whether all of it may still become calls."""
        self.text += text
        raw = list(text.encode(errors="replace"))
        return bool(self._matcher.try_consume_tokens(raw) == len(raw))

    def calls(self) -> list[tuple[str, str]]:
        """The calls that the text consists of, as names and arguments in JSON; else nothing."""
        if not self._matcher.is_accepting():
            return []
        try:
            found = _CALLS.decode(self.text.strip().removeprefix("```json").strip("`"))
        except (msgspec.MsgspecError, RecursionError):
            return []
        calls = found if isinstance(found, list) else [found]
        return [(call.name, bytes(call.arguments).decode()) for call in calls]


@lru_cache(_KNOWN)
def _matcher(tools: tuple[str, ...]) -> LLMatcher:
    parts: dict[str, Any] = {"name": {"enum": tools}, "arguments": {"type": "object"}}
    call = {"anyOf": [_object(parts), _object(dict(reversed(parts.items())))]}
    calls = {"anyOf": [call, {"type": "array", "items": call, "minItems": 1}]}
    return LLMatcher(_BYTES, _LARK + json.dumps(calls), log_level=0)


def _object(parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these parts, in this order."""
    names = {"properties": parts, "required": list(parts), "additionalProperties": False}
    return {"type": "object"} | names
