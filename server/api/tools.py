"""Tools of a chat request: those the model sees, may call and must call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cflow.engine.client.card import ModelCard
from cflow.engine.text import dialect
from cflow.engine.text.dialect import Form, Thinking
from cflow.engine.text.grammar import GrammarError
from cflow.server.api.schemas import ChatRequest
from cflow.server.errors import RequestError, shorten

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Calling:
    """shown: tools for the template. schemas: of arguments, by name of tool that may be called.
    must: the answer has to be a call. is_parallel: it may be several calls."""

    shown: list[dict[str, Any]] | None = None
    schemas: dict[str, Any] = field(default_factory=dict)
    must: bool = False
    is_parallel: bool = True


def read_tools(ask: ChatRequest, card: ModelCard) -> Calling:
    choice, allowed = _read_choice(ask)
    if choice == "none" or not ask.tools:
        return Calling()
    tools = [tool for tool in ask.tools if allowed is None or tool.function.name in allowed]
    for name in allowed or ():
        if all(tool.function.name != name for tool in tools):
            raise _unknown(name)
    if card.dialect.calls is None:
        message = (
            "This model's chat template has no tools, or none whose calls this server can read."
        )
        raise RequestError(message, code="unsupported_parameter", param="tools")
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(ask.tools):
        name, where = tool.function.name, f"tools[{i}].function"
        if name in schemas:
            raise RequestError(f"{where}.name: there are two {name!r}.", param=f"{where}.name")
        schema = tool.function.parameters
        if schema is not None and schema.get("type", "object") != "object":
            message = f"{where}.parameters must be a schema of type object."
            raise RequestError(message, param=f"{where}.parameters")
        schemas[name] = NO_ARGUMENTS if not schema else {"type": "object"} | schema
    shown = [
        tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in tools
    ]
    schemas = {tool.function.name: schemas[tool.function.name] for tool in tools}
    if choice in ("auto", "required"):
        return Calling(shown, schemas, choice == "required", ask.parallel_tool_calls)
    name = choice.removeprefix("=")
    if name not in schemas:
        raise _unknown(name)
    # A named tool means one call: a small model may repeat it to the end of its answer.
    return Calling(shown, {name: schemas[name]}, must=True, is_parallel=False)


def _unknown(name: str) -> RequestError:
    message = f"tool_choice names {shorten(name)}, which is none of the tools."
    return RequestError(message, param="tool_choice")


def _read_choice(ask: ChatRequest) -> tuple[str, list[str] | None]:
    """The choice as "none", "auto", "required", or "=NAME"; and the names of the tools that are
    allowed, None if all are."""
    choice, allowed = ask.tool_choice, None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _read_allowed(choice.get("allowed_tools"))
    elif isinstance(choice, dict):
        name = _name_of(choice)
        choice = None if name is None else f"={name}"
    elif choice not in ("none", "auto", "required"):
        choice = None
    if choice is None:
        message = (
            f"tool_choice is {shorten(ask.tool_choice)}; it must be none, auto, required, "
            '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.'
        )
        raise RequestError(message, param="tool_choice")
    if not ask.tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice needs tools to choose from.", param="tool_choice")
    return choice, allowed


def _read_allowed(allowed: Any) -> tuple[str | None, list[str]]:
    """The mode and the names; the mode is None if they are malformed or no tool is allowed."""
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        return None, []
    names = [_name_of(tool) for tool in allowed["tools"]]
    known = [name for name in names if name is not None]
    mode = allowed.get("mode")
    is_right = known and len(known) == len(names) and mode in ("auto", "required")
    return (mode if is_right else None), known


def _name_of(tool: Any) -> str | None:
    """The name in {"type": "function", "function": {"name": NAME}}."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


async def form_of(
    calling: Calling, body: str | None, thinking: Thinking, card: ModelCard
) -> str | None:
    """The grammar of whole answers. body: the checked grammar of their content."""
    schemas = calling.schemas if calling.must or body else {}
    if body is None and not schemas:
        return None
    form = Form(None if calling.must else body, schemas, calling.is_parallel, thinking)
    special = card.dialect.special_ids(card.tokenizer)
    make = partial(dialect.grammar_of, dialect=card.dialect, special=special)
    try:
        return await card.grammars.make(make, form)
    except GrammarError as error:
        message = f"tools cannot be followed as a grammar: {error}."
        raise RequestError(message, code="invalid_grammar", param="tools") from None
