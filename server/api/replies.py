"""Choices of a chat answer, split into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from cflow.engine.base.messages import Delta, Finish, Logprob, Progress
from cflow.engine.text.reply import Part, ReplyReader
from cflow.server.api.generation import Generation

_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def new_call_id(length: int) -> str:
    """A new call id. Some templates accept nine characters only; other ids look like OpenAI's."""
    letters = "".join(secrets.choice(_LETTERS) for _ in range(length))
    return letters if length < 16 else f"call_{letters}"


@dataclass(slots=True)
class Reply:
    """One choice. reader: None if all text is content."""

    reader: ReplyReader | None = None
    id_length: int = 24
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] = ()  # in the first choice only
    n_reasoning: int = 0
    finish: Finish | None = None

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta; return the deltas of a stream, in OpenAI's shape."""
        if self.is_over:
            return []
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish = delta.finish or self.finish
        return [self._take(part) for part in self._read(delta)]

    def _read(self, delta: Delta) -> list[Part]:
        reader = self.reader
        if reader is None:
            return [Part("content", delta.text)] if delta.text else []
        was_thinking = reader.is_thinking
        parts = reader.push(delta.text)
        if was_thinking or reader.is_thinking:
            self.n_reasoning += len(delta.tokens)
        if reader.is_over:
            self.finish = Finish("stop")
        elif delta.finish is not None:
            is_cut = delta.finish.reason == "length" or delta.finish.stop is not None
            parts += reader.flush(is_cut=is_cut)
        return parts

    def _take(self, part: Part) -> dict[str, Any]:
        if part.kind == "content":
            self.content.append(part.text)
            return {"content": part.text}
        if part.kind == "reasoning":
            self.reasoning.append(part.text)
            return {"reasoning_content": part.text}
        if part.kind == "call":
            call = self.calls[part.call] = Call(new_call_id(self.id_length), part.text)
            return {"tool_calls": [{"index": part.call} | call.as_json()]}
        self.calls[part.call].arguments += part.text
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, for what it says or with its last delta."""
        return self.finish is not None

    @property
    def reason(self) -> str | None:
        if self.finish is None:
            return None
        return "tool_calls" if self.calls and self.finish.reason == "stop" else self.finish.reason

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.as_json() for call in self.calls.values()]
        return message


Pieces = list[dict[str, Any]]


async def read_replies(
    generation: Generation, replies: list[Reply]
) -> AsyncGenerator[tuple[Reply, Delta, Pieces] | Progress]:
    """Each delta with its reply and what it adds to it, until all replies are over."""
    async with aclosing(generation.events()) as events:
        async for _, event in events:
            if isinstance(event, Progress):
                yield event
                continue
            reply = replies[event.choice]
            pieces = reply.add(event)
            generation.n_reasoning = sum(reply.n_reasoning for reply in replies)
            if reply.is_over:
                generation.finish(event.choice)
            yield reply, event, pieces
