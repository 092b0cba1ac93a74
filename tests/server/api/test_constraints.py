"""response_format, structured_outputs, guided_*: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cflow.engine.text.grammar import MAX_CHARS, Vocabulary
from harness.fake_engine import ByteTokenizer
from harness.live import Live, error_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
PERSON, NO_PERSON = '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": "36"}'
VOCABULARY = Vocabulary(ByteTokenizer())  # type: ignore[arg-type]


def accepts(grammar: str, text: str) -> bool:
    """The whole text, and that it may end there."""
    matcher = VOCABULARY.compile(grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and (
        matcher.is_accepting()
    )


def grammar_of(live: Live, **fields: Any) -> str:
    """Both APIs must pass on the same one."""
    grammars = []
    for path, base in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        response = live.post(path, base | fields)
        assert response.status_code == 200, response.text
        grammars.append(live.engine.calls[-1].sampling.grammar)
    assert grammars[0] == grammars[1]
    assert grammars[0] is not None
    return grammars[0]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"response_format": NAMED}, PERSON, NO_PERSON),
        ({"structured_outputs": {"json": SCHEMA}}, PERSON, NO_PERSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, PERSON, NO_PERSON),
        ({"structured_outputs": {"json_object": True}}, "{}", "3"),
        ({"guided_json": SCHEMA}, PERSON, NO_PERSON),
        ({"structured_outputs": {"regex": r"\d{2}:\d{2}"}}, "12:45", "1:45"),
        ({"guided_regex": r"[a-z]+@[a-z]+\.com"}, "a@b.com", "a@b.org"),
        ({"structured_outputs": {"choice": ["yes", "no", "né \"e\""]}}, 'né "e"', "maybe"),
        ({"guided_choice": ["yes", "no"]}, "no", "yesno"),
        ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, "aab", "ba"),
        ({"guided_grammar": 'root ::= "a" item*\nitem ::= [0-9] | "-"'}, "a1-2", "1"),
        ({"guided_json": True}, "[]", "nul"),
    ],
)  # fmt: skip
def test_every_spelling(live: Live, fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(live, **fields)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}]
)
def test_without_a_wish_there_is_no_grammar(live: Live, fields: dict[str, Any]) -> None:
    live.chat(**fields)
    assert live.engine.calls[0].sampling.grammar is None


def test_json_cannot_be_white_space_for_ever(live: Live) -> None:
    grammar = grammar_of(live, response_format={"type": "json_object"})
    assert accepts(grammar, '{\n        "a": 1\n}')
    assert not accepts(grammar, "{" + "\n" * 100 + '"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}},
         "response_format.json_schema.schema", "wizard"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"wand": 1}}, "structured_outputs.wand", "not permitted"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", ""),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": False}, "guided_json", ""),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
        ({"guided_json": {"enum": ["x" * MAX_CHARS]}}, "guided_json", "characters"),
        ({"guided_grammar": "x" * (MAX_CHARS + 1)}, "guided_grammar", "characters"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "Only one"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex", "Only one"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(
    live: Live, fields: dict[str, Any], param: str, words: str
) -> None:
    response = live.chat(**fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 600
    assert not live.engine.calls
