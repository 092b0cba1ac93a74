"""/v1/responses in terms of a chat: requests become chat requests, replies become items.

An answer is written once, as events of a stream; a whole answer has the items of these events.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any
from uuid import uuid4

from cflow.server.api.generation import Generation
from cflow.server.api.replies import Reply
from cflow.server.api.schemas import MAX_TOOLS, ChatRequest, ResponsesRequest, Sampling, parse
from cflow.server.api.stored import ResponseStore, not_stored
from cflow.server.api.wire import encode
from cflow.server.errors import RequestError, shorten

LOGPROBS = "message.output_text.logprobs"  # in `include`
# Items that tell what a provider's own tool did; the answer after them has what came of it.
HOSTED = {
    "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_call", "mcp_list_tools",
    "tool_search_call", "web_search_call",
}  # fmt: skip
# Parameters of a chat request, and their names here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True)
class Tools:
    """functions: as a chat has them. params: the parameter that each comes from. origins: name and
    namespace of each, by its name there. ignored: `tools.TYPE` of the other tools, which this server
    cannot run."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    origins: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def shown(self, name: Any, namespace: Any) -> Any:
        """The name in the chat of a call that is sent back."""
        if namespace is None:
            return name
        ours = (shown for shown, origin in self.origins.items() if origin == (name, namespace))
        return next(ours, name)

    def add(
        self,
        where: str,
        tool: dict[str, Any],
        namespace: str | None = None,
        plain: frozenset[str] = frozenset(),
    ) -> None:
        """plain: names of the functions outside of namespaces, which stay as they are."""
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        name = function.get("name")
        if isinstance(name, str):
            is_taken = name in self.origins or name in plain
            shown = f"{namespace}.{name}" if namespace and is_taken else name
            if shown in self.origins:
                raise RequestError(f"{where}.name: there are two {name!r}.", param=f"{where}.name")
            self.origins[shown] = (name, namespace)
            function["name"] = shown
        self.functions.append({"type": "function", "function": function})
        self.params.append(where)


def read_tools(ask: ResponsesRequest) -> Tools:
    """The functions of a request, those in namespaces too. Raises RequestError."""
    tools = Tools()
    names = (tool.get("name") for tool in ask.tools if tool.get("type") == "function")
    plain = frozenset(name for name in names if isinstance(name, str))
    for i, tool in enumerate(ask.tools):
        if tool.get("type") == "function":
            tools.add(f"tools[{i}]", tool)
        elif tool.get("type") == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list) or not isinstance(tool.get("name"), str):
                message = f"tools[{i}]: a namespace needs a name and a list of tools."
                raise RequestError(message, param=f"tools[{i}]")
            for j, function in enumerate(inner):
                if isinstance(function, dict) and function.get("type") == "function":
                    tools.add(f"tools[{i}].tools[{j}]", function, tool["name"], plain)
                else:
                    kind = function.get("type") if isinstance(function, dict) else function
                    tools.ignored.append(f"tools.{kind}")
        elif isinstance(tool.get("type"), str):
            tools.ignored.append(f"tools.{tool['type']}")
        else:
            message = f"tools[{i}].type is {shorten(tool.get('type'))}; it must be a text."
            raise RequestError(message, param=f"tools[{i}].type")
    if len(tools.functions) > MAX_TOOLS:
        message = f"tools: {len(tools.functions)} functions; at most {MAX_TOOLS} are allowed."
        raise RequestError(message, param="tools")
    return tools


def to_chat(ask: ResponsesRequest, tools: Tools, turns: list[dict[str, Any]]) -> ChatRequest:
    """The chat request. turns: the messages, from read_input."""
    body: dict[str, Any] = ask.model_dump(
        include=set(Sampling.model_fields) - {"response_format"}, exclude_unset=True, by_alias=True
    )
    body |= {
        "messages": turns,
        "tools": tools.functions,
        "tool_choice": _read_choice(ask.tool_choice, tools),
        "parallel_tool_calls": ask.parallel_tool_calls,
        "chat_template_kwargs": ask.chat_template_kwargs,
        "reasoning_effort": ask.reasoning_effort,
        "max_completion_tokens": ask.max_output_tokens,
        "response_format": _read_format(ask),
        "logprobs": LOGPROBS in ask.include or ask.top_logprobs > 0,
        "top_logprobs": ask.top_logprobs or None,
    }
    return parse(ChatRequest, {key: item for key, item in body.items() if item is not None})


def renamed(error: RequestError, origins: list[str], tools: Tools) -> RequestError:
    """A chat's error with its parameter renamed. origins: the parameter each turn comes from."""
    param = error.param or ""
    turn, tool = re.match(r"messages\[(\d+)\]", param), re.match(r"tools\[(\d+)\]", param)
    if turn:
        param = origins[int(turn[1])] + param[turn.end() :]
    elif param == "messages":
        param = "input"
    elif tool:
        param = tools.params[int(tool[1])] + param[tool.end() :].replace(".function", "", 1)
    else:
        for theirs, ours in NAMES.items():
            if param.startswith(theirs):
                param = ours + param[len(theirs) :]
                break
    message = str(error).replace(error.param, param, 1) if error.param else str(error)
    return RequestError(
        message, code=error.code, param=param or None, status=error.status, headers=error.headers
    )


# ---- what is asked ----


def read_items(ask: ResponsesRequest, store: ResponseStore, key: str) -> tuple[list[Any], int]:
    """The items of the conversation, references resolved, and how many of them are stored ones.
    Raises RequestError, also a 404."""
    before: list[Any] = []
    if ask.previous_response_id is not None:
        if not store.is_on:
            message = "previous_response_id: this server keeps no responses (response_memory = 0)."
            raise RequestError(message, code="unsupported_parameter", param="previous_response_id")
        before = store.get(key, ask.previous_response_id, param="previous_response_id").items
    is_text = isinstance(ask.input, str)
    items = [{"role": "user", "content": ask.input}] if is_text else ask.input or []
    if not items and not before and ask.instructions is None:
        message = (
            "input has no item; without instructions or previous_response_id it must have one."
        )
        raise RequestError(message, param="input")
    return [*before, *_resolved(items, store, key)], len(before)


def _resolved(items: list[Any], store: ResponseStore, key: str) -> list[Any]:
    """The items, with those that references name in their place."""
    known: dict[str, dict[str, Any]] | None = None  # looked up once, however many references
    resolved = []
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            known = store.items(key) if known is None else known
            id = item.get("id")
            if not isinstance(id, str) or id not in known:
                raise not_stored("item", id, f"input[{i}].id")
            item = known[id]
        resolved.append(item)
    return resolved


def read_input(
    ask: ResponsesRequest, items: list[Any], n_stored: int, tools: Tools
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The turns of a conversation, the parameter that each comes from, and `input.TYPE` of the items
    that are left out. n_stored: items at the front that come from a stored response."""
    turns: list[dict[str, Any]] = []
    origins: list[str] = []
    ignored: list[str] = []
    if ask.instructions is not None:
        turns.append({"role": "system", "content": ask.instructions})
        origins.append("instructions")
    for i, item in enumerate(items, -n_stored):
        if _says_nothing(item):
            ignored.append(f"input.{item['type']}")
            continue
        where = f"input[{i}]" if i >= 0 else "previous_response_id"
        turn = _read_item(where, item, tools)
        if turns and turn["role"] == "assistant" and turns[-1].get("_open"):
            _join(turns[-1], turn)
        else:
            turns.append(turn)
            origins.append(where)
    for turn in turns:
        turn.pop("_open", None)
    return turns, origins, ignored


def _says_nothing(item: Any) -> bool:
    """Whether an item has nothing that the model can read, such as reasoning without its text."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind in HOSTED or (kind == "reasoning" and not item.get("content"))


def _read_item(where: str, item: Any, tools: Tools) -> dict[str, Any]:
    """The turn of one item.

    `_open` marks a turn that later items may extend: reasoning, text and calls of one answer are
    separate items."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        content = _read_content(f"{where}.content", item.get("content"))
        turn = {"role": role, "content": content}
        return turn | {"_open": True} if role == "assistant" else turn
    if kind in ("function_call", "custom_tool_call"):
        name = tools.shown(item.get("name"), item.get("namespace"))
        arguments = item.get("arguments", "{}")
        if kind == "custom_tool_call":  # its input is a text
            arguments = encode({"input": item.get("input")}).decode()
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call], "_open": True}
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = _read_content(f"{where}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "reasoning":
        text = _read_content(f"{where}.content", item.get("content") or "")
        return {"role": "assistant", "reasoning_content": text, "_open": True}
    message = f"{where} is {shorten(item)}; items of type {shorten(kind)} are not supported."
    raise RequestError(message, param=f"{where}.type")


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


def _read_choice(choice: Any, tools: Tools) -> Any:
    """tool_choice as a chat has it. Raises RequestError if it forces a tool that cannot run here."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(choice, tools)
    if kind == "allowed_tools":
        return _read_allowed(choice, tools)
    if isinstance(kind, str):
        message = (
            f"tool_choice forces a tool of type {shorten(kind)}, which this server cannot run."
        )
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    if choice == "required" and tools.ignored and not tools.functions:
        raise _none_usable(kind.removeprefix("tools.") for kind in tools.ignored)
    return choice if tools.functions or choice != "auto" else None


def _read_allowed(choice: dict[str, Any], tools: Tools) -> Any:
    """The functions of a choice of allowed_tools; also in the form that a chat has."""
    inner = choice.get("allowed_tools")
    inner = inner if isinstance(inner, dict) else choice
    mode, listed = inner.get("mode"), inner.get("tools")
    allowed = listed if isinstance(listed, list) else []
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in allowed]
    if kinds and all(isinstance(kind, str) and kind != "function" for kind in kinds):
        if mode == "required":
            raise _none_usable(kinds)
        if mode == "auto":
            return "none"
    functions = compress(allowed, (kind == "function" for kind in kinds))
    named = [_named(tool, tools) for tool in functions]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _none_usable(kinds: Iterable[Any]) -> RequestError:
    told = ", ".join(kind[:64] for kind in islice(kinds, 5))
    message = f"tool_choice is required, but this server can run none of the tools: {told}."
    return RequestError(message, code="unsupported_parameter", param="tool_choice")


def _named(choice: dict[str, Any], tools: Tools) -> dict[str, Any]:
    """A choice of one function; also in the form that a chat has."""
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    name = tools.shown(name, choice.get("namespace"))
    return {"type": "function", "function": {"name": name}}


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


def _message() -> dict[str, Any]:
    content = [_text_part("")]
    item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": content}
    return item | {"status": "in_progress"}


def _reasoning() -> dict[str, Any]:
    content = [_reasoning_part("")]
    item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": content}
    return item | {"status": "in_progress"}


def _call(call: dict[str, Any], tools: Tools) -> dict[str, Any]:
    item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"]}
    name, namespace = tools.origins[call["function"]["name"]]
    more = {} if namespace is None else {"namespace": namespace}
    return {**item, **call["function"], "name": name, **more, "status": "in_progress"}


class Response:
    """The response object: a whole answer, and part of events."""

    def __init__(
        self,
        ask: ResponsesRequest,
        model: str,
        temperature: float,
        top_p: float,
        is_stored: bool,
    ) -> None:
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
            "previous_response_id": ask.previous_response_id,
            "background": False,
            "store": is_stored,
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

    def __init__(self, tools: Tools) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._n = 0
        self._is_open = False  # whether the last item may still grow

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._n} | fields
        self._n += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(data))

    def add(self, delta: dict[str, Any], logprobs: list[Any]) -> Iterator[bytes]:
        """Events for one delta of a chat. logprobs: of its tokens, if it is text."""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin(_call(call, self._tools))
            if piece := call["function"]["arguments"]:
                self.items[-1]["arguments"] += piece
                yield self._on_item("response.function_call_arguments.delta", delta=piece)
        if "reasoning_content" in delta:
            yield from self._write("reasoning", delta["reasoning_content"])
        if "content" in delta:
            yield from self._write("message", delta["content"], logprobs=logprobs)

    def _write(self, kind: str, text: str, **more: list[Any]) -> Iterator[bytes]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._begin(_message() if kind == "message" else _reasoning())
        part = self.items[-1]["content"][0]
        part["text"] += text
        if "logprobs" in more:
            part["logprobs"] += more["logprobs"]
        yield self._on_part(f"{self._text_kind}.delta", delta=text, **more)

    def end(self, status: str) -> Iterator[bytes]:
        """Events that end the answer, which has at least one item."""
        if not self.items:
            yield from self._begin(_message())
        yield from self.close(status)

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
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
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
