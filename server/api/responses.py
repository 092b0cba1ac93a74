"""/v1/responses in terms of a chat: requests become chat requests, replies become items."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from cflow.server.api.generation import Generation
from cflow.server.api.replies import Reply
from cflow.server.api.schemas import ChatRequest, ResponsesRequest, Sampling, parse
from cflow.server.api.wire import encode
from cflow.server.errors import RequestError, shorten

# Parameters of a chat request, and their names here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def to_chat(ask: ResponsesRequest, turns: list[dict[str, Any]]) -> ChatRequest:
    """The chat request. turns: the messages, from read_input."""
    body: dict[str, Any] = ask.model_dump(
        include=set(Sampling.model_fields) - {"response_format"}, exclude_unset=True, by_alias=True
    )
    body |= {
        "messages": turns,
        "tools": [_read_tool(i, tool) for i, tool in enumerate(ask.tools)],
        "tool_choice": _read_choice(ask.tool_choice),
        "parallel_tool_calls": ask.parallel_tool_calls,
        "chat_template_kwargs": ask.chat_template_kwargs,
        "reasoning_effort": ask.reasoning_effort,
        "max_completion_tokens": ask.max_output_tokens,
        "response_format": _read_format(ask),
    }
    return parse(ChatRequest, {key: item for key, item in body.items() if item is not None})


def renamed(error: RequestError, origins: list[str]) -> RequestError:
    """A chat's error with its parameter renamed. origins: the parameter each turn comes from."""
    param = error.param or ""
    turn = re.match(r"messages\[(\d+)\]", param)
    if turn:
        param = origins[int(turn[1])] + param[turn.end() :]
    elif param == "messages":
        param = "input"
    elif param.startswith("tools["):
        param = param.replace(".function", "", 1)
    else:
        for theirs, ours in NAMES.items():
            if param.startswith(theirs):
                param = ours + param[len(theirs) :]
                break
    message = str(error).replace(error.param, param) if error.param else str(error)
    return RequestError(
        message, code=error.code, param=param or None, status=error.status, headers=error.headers
    )


# ---- what is asked ----


def read_input(ask: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The turns of a request, and the parameter that each comes from."""
    turns: list[dict[str, Any]] = []
    origins: list[str] = []
    if ask.instructions is not None:
        turns.append({"role": "system", "content": ask.instructions})
        origins.append("instructions")
    is_text = isinstance(ask.input, str)
    items = [{"role": "user", "content": ask.input}] if is_text else ask.input
    for i, item in enumerate(items):
        turn = _read_item(i, item)
        if turns and turn["role"] == "assistant" and turns[-1].get("_open"):
            _join(turns[-1], turn)
        else:
            turns.append(turn)
            origins.append(f"input[{i}]")
    for turn in turns:
        turn.pop("_open", None)
    return turns, origins


def _read_item(i: int, item: Any) -> dict[str, Any]:
    """The turn of one item.

    `_open` marks a turn that later items may extend: reasoning, text and calls of one answer are
    separate items."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        content = _read_content(f"input[{i}].content", item.get("content"))
        turn = {"role": role, "content": content}
        return turn | {"_open": True} if role == "assistant" else turn
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call], "_open": True}
    if kind == "function_call_output":
        content = _read_content(f"input[{i}].output", item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "reasoning":
        text = _read_content(f"input[{i}].content", item.get("content") or "")
        return {"role": "assistant", "reasoning_content": text, "_open": True}
    message = f"input[{i}] is {shorten(item)}; items of type {shorten(kind)} are not supported."
    raise RequestError(message, param=f"input[{i}].type")


def _join(turn: dict[str, Any], more: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if more.get(key):
            turn[key] = (turn.get(key) or "") + more[key]
    if "tool_calls" in more:
        turn.setdefault("tool_calls", []).extend(more["tool_calls"])


def _read_content(where: str, content: Any) -> Any:
    """The text of a string or of parts. Anything else is returned as it is; the chat rejects it."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        known = kind in ("input_text", "output_text", "text", "reasoning_text")
        if not known or not isinstance(part.get("text"), str):
            message = f"{where}: parts of type {shorten(kind)} are not supported; only text is."
            raise RequestError(message, param=where)
        texts.append(part["text"])
    return "".join(texts)


def _read_tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"tools[{i}].type is {shorten(tool.get('type'))}; only functions are supported."
        raise RequestError(message, param=f"tools[{i}].type")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _read_format(ask: ResponsesRequest) -> Any:
    form = ask.text.format if ask.text else None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


# ---- what is answered ----


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message(text: str, status: str = "completed") -> dict[str, Any]:
    content = [_text_part(text)]
    item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": content}
    return item | {"status": status}


def _reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    content = [_reasoning_part(text)]
    item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": content}
    return item | {"status": status}


def _call(call: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"]}
    return {**item, **call["function"], "status": status}


def items_of(reply: Reply) -> list[dict[str, Any]]:
    """The output items of a complete answer."""
    message = reply.message()
    status = "incomplete" if reply.reason == "length" else "completed"
    items = []
    if "reasoning_content" in message:
        items.append(_reasoning(message["reasoning_content"]))
    if message["content"] or "tool_calls" not in message:
        items.append(_message(message["content"] or ""))
    items += [_call(call) for call in message.get("tool_calls", [])]
    items[-1]["status"] = status
    return items


class Response:
    """The response object: a whole answer, and part of events."""

    def __init__(self, ask: ResponsesRequest, model: str, temperature: float, top_p: float) -> None:
        self._fields = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": ask.instructions,
            "metadata": ask.metadata or {},
            "max_output_tokens": ask.max_output_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "tools": ask.tools,
            "tool_choice": ask.tool_choice,
            "parallel_tool_calls": ask.parallel_tool_calls,
            "text": {"format": (ask.text and ask.text.format) or {"type": "text"}},
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }

    def begun(self) -> dict[str, Any]:
        return self._as_json("in_progress", [])

    def ended(
        self, reply: Reply, items: list[dict[str, Any]], generation: Generation
    ) -> dict[str, Any]:
        status = "incomplete" if reply.reason == "length" else "completed"
        return self._as_json(status, items, usage=_usage(generation))

    def failed(self, items: list[dict[str, Any]], cause: RequestError) -> dict[str, Any]:
        """A failed response. OpenAI defines few codes, so the message starts with ours."""
        code = "invalid_prompt" if cause.status < 500 else "server_error"
        error = {"code": code, "message": f"{cause.code}: {cause}"}
        return self._as_json("failed", items, error=error)

    def _as_json(
        self, status: str, items: list[dict[str, Any]], *, usage: Any = None, error: Any = None
    ) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        more = {"status": status, "output": items, "usage": usage, "error": error}
        return self._fields | more | {"incomplete_details": details}


def _usage(generation: Generation) -> dict[str, Any]:
    n_in, n_out = generation.n_prompt, generation.n_completion
    return {
        "input_tokens": n_in,
        "input_tokens_details": {"cached_tokens": generation.n_cached, "cache_write_tokens": 0},
        "output_tokens": n_out,
        "output_tokens_details": {"reasoning_tokens": generation.n_reasoning},
        "total_tokens": n_in + n_out,
    }


class EventWriter:
    """The events of a stream. Each run of text, run of reasoning and call is an item."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._n = 0
        self._is_open = False  # whether the last item may still grow

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._n} | fields
        self._n += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(data))

    def add(self, delta: dict[str, Any]) -> Iterator[bytes]:
        """Events for one delta of a chat."""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin(_call(call, "in_progress"))
            if piece := call["function"]["arguments"]:
                self.items[-1]["arguments"] += piece
                yield self._on_item("response.function_call_arguments.delta", delta=piece)
        if "reasoning_content" in delta:
            yield from self._write("reasoning", delta["reasoning_content"])
        if "content" in delta:
            yield from self._write("message", delta["content"])

    def _write(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self.items[-1]["type"] != kind:
            new = _message if kind == "message" else _reasoning
            yield from self._begin(new("", "in_progress"))
        self.items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._on_part(f"{self._text_kind}.delta", delta=text, **more)

    def _begin(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        self.items.append(item)
        self._is_open = True
        if item["type"] == "function_call":
            yield self._of_item("response.output_item.added")
            return
        part = item["content"].pop()
        yield self._of_item("response.output_item.added")
        item["content"].append(part)
        yield self._on_part("response.content_part.added", part=part)

    def close(self, status: str = "completed") -> Iterator[bytes]:
        """Events that end the open item, if there is one."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open, item["status"] = False, status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._on_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._on_part(f"{self._text_kind}.done", text=part["text"], **more)
            yield self._on_part("response.content_part.done", part=part)
        yield self._of_item("response.output_item.done")

    @property
    def _text_kind(self) -> str:
        is_message = self.items[-1]["type"] == "message"
        return "response.output_text" if is_message else "response.reasoning_text"

    def _of_item(self, kind: str) -> bytes:
        return self.event(kind, output_index=len(self.items) - 1, item=self.items[-1])

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        item = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self.event(kind, **item, **fields)

    def _on_part(self, kind: str, **fields: Any) -> bytes:
        return self._on_item(kind, content_index=0, **fields)
