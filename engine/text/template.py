"""Chat messages to a prompt, with the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cflow.engine.base.errors import TemplateError
from cflow.engine.text.arguments import arguments_object
from cflow.engine.text.jail import Jail
from cflow.engine.text.jobs import TIME_S, Job, Result
from cflow.engine.text.tokenizer import Span


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. own: the spans of it that the template wrote, in order; the rest came with the
    messages and other variables."""

    text: str
    own: Sequence[Span]

    def until(self, end: int) -> Rendered:
        """The first `end` characters."""
        own = [(first, min(last, end)) for first, last in self.own if first < end]
        return Rendered(self.text[:end], own)


class ChatTemplate:
    """A model's chat template, rendered in a process of its own (renderer.py).

    Any thread may call render(); calls run one at a time.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: template variables such as bos_token and eos_token."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._jail = Jail("cflow.engine.text.renderer", source.encode(errors="replace"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Rendered:
        """Render the prompt. Raises TemplateError if the template rejects the messages or fails."""
        everything = {
            "documents": None,
            **variables,
            "messages": [_normalise(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        result = self._run(everything)
        if result.error is not None:
            message = f"the chat template failed: {result.error}"
            raise TemplateError(message, is_limit=result.is_limit)
        return Rendered(result.text, result.own)

    def syntax_error(self) -> str | None:
        """Line and message of a syntax error, None if the template has none."""
        result = self._run({"messages": []})
        return result.error if result.is_broken else None

    def close(self) -> None:
        self._jail.close()

    def _run(self, variables: dict[str, Any]) -> Result:
        try:
            given = json.dumps(variables, ensure_ascii=False).encode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Result("", error=f"its variables cannot be encoded: {error}")
        result = self._jail.run(msgspec.msgpack.encode(Job(given, self._special_tokens)))
        if result is None:
            why = f"rendering took more than {TIME_S:g} s or too much memory"
            return Result("", error=why, is_limit=True)
        return msgspec.msgpack.decode(result, type=Result)


def _normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: role system for developer, content text, arguments objects."""
    normal = dict(message)
    if normal.get("role") == "developer":
        normal["role"] = "system"
    if normal.get("content") is None:
        normal["content"] = ""
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_normalise_call(call) for call in normal["tool_calls"]]
    return normal


def _normalise_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    function["arguments"] = arguments_object(arguments)
    return {**call, "function": function}
