"""response_format and its relatives, as one grammar that the answers must follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from cflow.engine.text import grammar
from cflow.engine.text.grammar import GrammarChecker, GrammarError
from cflow.server.api.schemas import Sampling
from cflow.server.errors import RequestError

ANY_OBJECT = {"type": "object"}


def _from_schema(schema: Any) -> str:
    """A grammar from a schema: an object, a boolean, or its JSON text (which vLLM accepts too)."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any] | bool)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise GrammarError(f"not the JSON text of a schema: {error}") from None
    return grammar.from_json_schema(schema)


Wish = tuple[str, Callable[[Any], str], Any]  # parameter, function that makes the grammar, value


def _wishes(ask: Sampling) -> list[Wish]:
    wishes: list[Wish] = []
    form = ask.response_format
    if form is not None and form.type == "json_object":
        wishes.append(("response_format", _from_schema, ANY_OBJECT))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            message = "response_format.json_schema is required for type json_schema."
            raise RequestError(message, param="response_format.json_schema")
        where = "response_format.json_schema.schema"
        wishes.append((where, _from_schema, form.json_schema.schema_))
    if (outputs := ask.structured_outputs) is not None:
        wishes += [
            ("structured_outputs.json", _from_schema, outputs.json_),
            (
                "structured_outputs.json_object",
                _from_schema,
                ANY_OBJECT if outputs.json_object else None,
            ),
            ("structured_outputs.regex", grammar.from_regex, outputs.regex),
            ("structured_outputs.choice", grammar.from_choice, outputs.choice),
            ("structured_outputs.grammar", grammar.from_text, outputs.grammar),
        ]
    wishes += [
        ("guided_json", _from_schema, ask.guided_json),
        ("guided_regex", grammar.from_regex, ask.guided_regex),
        ("guided_choice", grammar.from_choice, ask.guided_choice),
        ("guided_grammar", grammar.from_text, ask.guided_grammar),
    ]
    return [wish for wish in wishes if wish[2] is not None]


async def grammar_of(ask: Sampling, checker: GrammarChecker) -> str | None:
    """The checked grammar of a request, None if it has none. Raises RequestError that names the
    parameter."""
    wishes = _wishes(ask)
    if not wishes:
        return None
    if len(wishes) > 1:
        names = ", ".join(name for name, _, _ in wishes)
        raise RequestError(f"Only one of {names} is allowed.", param=wishes[1][0])
    ((param, make, value),) = wishes
    try:
        return await checker.make(make, value)
    except GrammarError as error:
        message = f"{param} cannot be used: {error}."
        raise RequestError(message, code="invalid_grammar", param=param) from None
