"""Constraints: numbers in JSON end, whatever the model prefers."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from cflow.engine.base.messages import SamplingParams, Submit
from cflow.engine.text.dialect import HERMES, QWEN_CODER, CallSyntax, Dialect, Form, grammar_of
from cflow.engine.text.grammar import Vocabulary, combine, from_json_schema, from_regex
from cflow.engine.worker.constraint import Compiled, Grammars
from harness.fake_engine import EOS, SPECIALS, ByteTokenizer

MOST = 300  # tokens of an answer
Write = Callable[..., str]


class Digits(ByteTokenizer):
    """Bytes, and tokens of several digits."""

    def __init__(self) -> None:
        super().__init__(None, *("7" * n for n in (16, 7, 3, 2)))

    def is_special(self, token: int) -> bool:
        return token in SPECIALS


TOKENIZER = Digits()


@pytest.fixture(scope="module")
def write() -> Write:
    """write(grammar, then=...): the answer of a model that likes digits most, then these characters,
    then to end; the tokens of digits are longest first."""
    grammars = Grammars(Vocabulary(TOKENIZER))  # type: ignore[arg-type]

    def answer(grammar: str, then: str = "") -> str:
        found: Future[Compiled] = Future()
        submit = Submit(0, (), 1, SamplingParams(max_tokens=MOST, grammar=grammar))
        grammars.compile(submit, found.set_result)
        (constraint,) = found.result(60).constraints
        liked = [
            *range(258, TOKENIZER.n_tokens),
            *(b"7" + then.encode()),
            EOS,
            *b'}]"',
            *range(256),
        ]
        text = b""
        for _ in range(MOST):
            mask = constraint.mask()
            token = next(t for t in liked if mask[t // 32] >> (t % 32) & 1)
            if token == EOS:
                return text.decode()
            text += TOKENIZER.token_bytes(token)
            if constraint.append(token):
                return text.decode()
        return text.decode()

    return answer


D = "7" * 20  # the longest run


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "number"},
        {"type": ["number", "string"]},
        {"minimum": 0},
        {"properties": {"a": {"type": "string"}}},
        {"$id": "https://example.org/n", "type": "number"},
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}},
        {"anyOf": [{"type": "integer"}, {"type": "number"}]},
    ],
)
def test_f23_numbers_end(write: Write, schema: Any) -> None:
    grammar = from_json_schema(schema)
    assert write(grammar) == D
    if "minimum" not in schema:  # llguidance has no exponents beside bounds
        assert write(grammar, ".e") == f"{D}.{D}e777"
        assert write(grammar, "e") == f"{D}e777"


def test_f23_numbers_end_within_json(write: Write) -> None:
    item = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    array = {"type": "array", "items": item | {"additionalProperties": False}, "minItems": 2}
    text = write(from_json_schema(array | {"maxItems": 2}))
    assert re.sub(r"\s", "", text) == f'[{{"n":{D}}},{{"n":{D}}}]'


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 10**30}, "1" + "0" * 30),
        ({"enum": [2 * 10**24]}, "2" + "0" * 24),
        ({"type": "string", "pattern": "^7{64}$"}, '"' + "7" * 64 + '"'),
        ({"type": "integer", "maximum": 800}, "777"),
    ],
)
def test_f23_what_the_schema_says_of_numbers_counts(write: Write, schema: Any, text: str) -> None:
    assert write(from_json_schema(schema)) == text


def test_f23_strings_and_other_grammars_have_numbers_of_any_length(write: Write) -> None:
    assert len(write(from_json_schema({"type": "string"}), '"')) > 16 * (MOST - 2)
    assert write(from_regex("7{50}")) == "7" * 50
    both = combine("start: @a @b", {"a": from_regex("7{50} "), "b": from_json_schema({})})
    assert write(both) == "7" * 50 + " " + D


@pytest.mark.parametrize("syntax", [HERMES, QWEN_CODER])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_f23_numbers_end_in_arguments_of_calls(write: Write, syntax: CallSyntax, kind: str) -> None:
    tool = {"type": "object", "properties": {"n": {"type": kind}}, "required": ["n"]}
    form = Form(None, {"f": tool | {"additionalProperties": False}}, False, "no")
    text = write(grammar_of(form, Dialect(syntax), {}))
    assert re.findall("7+", text) == [D]
    assert text.endswith("</tool_call>")
