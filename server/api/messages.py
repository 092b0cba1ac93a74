"""Anthropic's /v1/messages in terms of a chat: requests become chat requests, replies become blocks.

An answer is written once, as events of a stream; a whole answer has the blocks of these events.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from cflow.engine.base.messages import Progress
from cflow.engine.text.arguments import arguments_object
from cflow.server.api.generation import Generation
from cflow.server.api.replies import Reply, read_replies
from cflow.server.api.schemas import ChatRequest, MessagesRequest, parse
from cflow.server.api.wire import encode
from cflow.server.errors import RequestError, shorten

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Parameters of a chat request, and their names here.
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}
# Parts of the names of other parameters, likewise.
PARTS = ((".function.parameters", ".input_schema"), (".function", ""), (".json_schema", ""))
_PARAM = re.compile(r"((?:messages|tools)\[\d+\]|\w*)(.*)")


# ---- what is asked ----


def to_chat(ask: MessagesRequest) -> tuple[ChatRequest, dict[str, str], list[str]]:
    """The chat request, the names here of its parameters, and the types of tools that this server
    cannot run. Raises RequestError."""
    turns, params = _read_turns(ask)
    tools, places, ignored = _read_tools(ask.tools)
    names = (
        NAMES
        | {f"messages[{i}]": param for i, param in enumerate(params)}
        | {f"tools[{i}]": f"tools[{place}]" for i, place in enumerate(places)}
    )
    choice = ask.tool_choice or {}
    body: dict[str, Any] = {
        "model": ask.model,
        "messages": turns,
        "max_tokens": ask.max_tokens,
        "stop": ask.stop_sequences,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "tools": tools,
        "tool_choice": _read_choice(choice, tools, ignored),
        "parallel_tool_calls": not _is_single(choice),
        "reasoning_effort": _read_effort(ask),
        "response_format": _read_format(ask.output_config.get("format") or ask.output_format),
        "stream": ask.stream,
        # An answer whose beginning the client gives.
        "continue_final_message": _is_begun(turns[-1]) or None,
    }
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return parse(ChatRequest, given), names, ignored
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """A chat's error with its parameter renamed. names: as to_chat() gives them."""
    found = _PARAM.match(error.param or "")
    assert found is not None
    first, rest = found.groups()
    for part, name in PARTS:
        rest = rest.replace(part, name, 1)
    # A turn has other fields than the message it comes from.
    param = names.get(first, first) + ("" if first.startswith("messages[") else rest)
    message = str(error).replace(error.param, param, 1) if error.param else str(error)
    return RequestError(
        message, code=error.code, param=param or None, status=error.status, headers=error.headers
    )


def _read_turns(ask: MessagesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    turns: list[dict[str, Any]] = []
    params: list[str] = []
    if ask.system is not None:
        turns.append({"role": "system", "content": _text("system", ask.system)})
        params.append("system")
    for i, message in enumerate(ask.messages):
        param = f"messages[{i}]"
        found = READERS[message.role](f"{param}.content", message.content)
        turns += found
        params += [param] * len(found)
    return turns, params


def _read_system(where: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A coding agent adds reminders in the middle of a conversation."""
    return [{"role": "system", "content": _text(where, content)}]


def _read_user(where: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of a user's message: results of tools, then its text."""
    results, texts = [], []
    for j, block in enumerate(_blocks(content)):
        if block.get("type") == "tool_result":
            text = _text(f"{where}[{j}].content", block.get("content") or "")
            if block.get("is_error"):  # templates know no such mark
                text = f"Error: {text}"
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        else:
            texts.append(_text_of(f"{where}[{j}]", block))
    return results + ([{"role": "user", "content": "".join(texts)}] if texts or not results else [])


def _read_assistant(where: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(_blocks(content)):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = encode(block.get("input") or {}).decode()
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":  # which says nothing
            texts.append(_text_of(f"{where}[{j}]", block))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


READERS = {"user": _read_user, "assistant": _read_assistant, "system": _read_system}


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(where: str, content: Any) -> str:
    """The text of a string or of text blocks. Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{where} is {shorten(content)}; it must be a text or a list of text blocks."
        raise RequestError(message, param=where)
    return "".join(_text_of(f"{where}[{i}]", block) for i, block in enumerate(content))


def _text_of(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block.get("text"), str):
        message = f"{where}: blocks of type {shorten(kind)} are not supported; only text is."
        raise RequestError(message, param=where)
    text: str = block["text"]
    return text


def _read_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """The functions as a chat has them, their places among the tools, and the types of the others,
    which Anthropic defines."""
    functions, places, ignored = [], [], []
    for place, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            ignored.append(f"tools.{kind}")
            continue
        places.append(place)
        names = {"name": "name", "description": "description", "parameters": "input_schema"}
        function = {ours: tool[theirs] for ours, theirs in names.items() if theirs in tool}
        functions.append({"type": "function", "function": function})
    return functions, places, ignored


def _read_choice(
    choice: dict[str, Any], tools: list[dict[str, Any]], ignored: list[str]
) -> str | dict[str, Any] | None:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "any" and ignored and not tools:
        message = "tool_choice is any, but this server can run none of the tools."
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    if kind not in ("auto", "any", "none"):
        message = f"tool_choice.type is {shorten(kind)}; it must be auto, any, tool or none."
        raise RequestError(message, param="tool_choice.type")
    return "required" if kind == "any" else kind if tools else None


def _is_begun(turn: dict[str, Any]) -> bool:
    return turn["role"] == "assistant" and "tool_calls" not in turn


def _is_single(choice: dict[str, Any]) -> bool:
    value = choice.get("disable_parallel_tool_use", False)
    if not isinstance(value, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise RequestError(f"{where} is {shorten(value)}; it must be true or false.", param=where)
    return value


def _read_effort(ask: MessagesRequest) -> Any:
    """The reasoning effort; None leaves it to the model."""
    kind = ask.thinking.type if ask.thinking else None
    if kind == "disabled":
        return "none"
    return ask.output_config.get("effort") or ("medium" if kind == "enabled" else None)


def _read_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


# ---- what is answered ----


class MessageWriter:
    """The events of a stream, and the message that they make."""

    def __init__(self, model: str, generation: Generation) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, str] = {}  # of the calls, by index of block
        self._is_open = False
        self._generation = generation
        self._message = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def begin(self) -> Iterator[bytes]:
        ending: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._generation.n_prompt, "output_tokens": 0}
        yield _event("message_start", message=self._message | ending | {"usage": usage})
        yield _event("ping")

    async def events(self, generation: Generation, reply: Reply) -> AsyncGenerator[bytes]:
        """The events between begin() and end()."""
        async with aclosing(read_replies(generation, [reply])) as read:
            async for event in read:
                if isinstance(event, Progress):
                    continue
                for piece in event[2]:
                    for told in self.add(piece):
                        yield told

    def add(self, delta: dict[str, Any]) -> Iterator[bytes]:
        """Events for one delta of a chat."""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                use = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._open(use)
                self._arguments[len(self.blocks) - 1] = ""
            if piece := function["arguments"]:
                self._arguments[len(self.blocks) - 1] += piece
                yield self._delta(type="input_json_delta", partial_json=piece)
        if "reasoning_content" in delta:
            yield from self._write("thinking", delta["reasoning_content"])
        if "content" in delta:
            yield from self._write("text", delta["content"])

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield from self._close()
        ending = self._ending(reply)
        yield _event("message_delta", delta=ending, usage=self._usage())
        yield _event("message_stop")

    def message(self, reply: Reply) -> dict[str, Any]:
        """The whole answer, after end()."""
        return self._message | {
            "content": self.blocks,
            **self._ending(reply),
            "usage": self._usage(),
        }

    def _write(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **more})
        self.blocks[-1][kind] += text
        yield self._delta(**{"type": f"{kind}_delta", kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self.blocks.append(block)
        self._is_open = True
        yield _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        index, block = len(self.blocks) - 1, self.blocks[-1]
        if block["type"] == "thinking":
            yield self._delta(type="signature_delta", signature="")
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments[index])
        yield _event("content_block_stop", index=index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _ending(self, reply: Reply) -> dict[str, Any]:
        stop = reply.finish.stop if reply.finish else None
        if reply.reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOP_REASONS[reply.reason or "stop"], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        n_cached = self._generation.n_cached
        return {
            "input_tokens": self._generation.n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": self._generation.n_completion,
        }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. An answer that is cut leaves half of one; what a model
    writes that is no JSON becomes the only parameter, as in a conversation that carries it back."""
    with suppress(ValueError):
        return arguments_object(from_json(arguments, allow_partial=True))
    return arguments_object(arguments)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind} | fields))


def error_event(error: RequestError) -> bytes:
    return _event("error", error={"type": error_type(error.status), "message": str(error)})


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
