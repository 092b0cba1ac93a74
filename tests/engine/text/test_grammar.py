"""Grammars: checked in a process of their own, from the header that was read at the start."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.client.card import read_header
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.text.grammar import (
    MAX_CHARS,
    GrammarChecker,
    GrammarError,
    Vocabulary,
    combine,
    from_json_schema,
    from_lark,
    from_regex,
    with_short_numbers,
)
from harness.fake_engine import ByteTokenizer
from oracles.real_models import RealModel

pytestmark = pytest.mark.anyio
VOCABULARY = Vocabulary(ByteTokenizer())  # type: ignore[arg-type]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model() -> Path:
    return RealModel.fetch("smollm2-135m").cflow


@pytest.fixture
def checker(model: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(read_header(str(model)))
    yield checker
    checker.close()


async def fault(checker: GrammarChecker, schema: dict[str, object]) -> str:
    try:
        await checker.make(from_json_schema, schema)
    except GrammarError as error:
        return str(error)
    return ""


async def test_a_hostile_schema_takes_neither_the_loop_nor_the_checker(
    checker: GrammarChecker,
) -> None:
    """The compiler copies all of `const` for each entry of `enum`; a fifth of these takes minutes."""
    hostile = {"const": [{}] * 15_000, "enum": [0] * 20_000}
    assert len(from_json_schema(hostile)) < MAX_CHARS
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    task = asyncio.create_task(beat())
    assert "took more than" in await fault(checker, hostile)
    assert beats > 20
    task.cancel()
    assert await fault(checker, {"type": "integer"}) == ""
    assert "wizard" in await fault(checker, {"type": "wizard"})


@pytest.mark.parametrize(
    "bounds", [{"minimum": -1e300, "maximum": 1e300}, {"maximum": 1e19}, {"minimum": 1e18}]
)
async def test_bounds_beyond_what_a_grammar_can_hold_are_named(
    checker: GrammarChecker, bounds: dict[str, float]
) -> None:
    told = await fault(checker, {"type": "number", **bounds})
    assert "no grammar for the float range: min=" in told
    assert "must be within +-1e17" in told
    within = {key: 1e17 if value > 0 else -1e17 for key, value in bounds.items()}
    assert await fault(checker, {"type": "number", **within}) == ""


async def test_special_tokens_are_known_by_their_names(checker: GrammarChecker) -> None:
    await checker.make(from_lark, 'start: <|im_start|> "x"')
    with pytest.raises(GrammarError):
        await checker.make(from_lark, 'start: <|no_such_token|> "x"')


@pytest.mark.parametrize("becomes", ["replaced", "removed"])
async def test_checks_outlive_the_model_file(becomes: str, tmp_path: Path) -> None:
    file = Path(shutil.copy(BUNDLED_FILE, tmp_path))
    checker = GrammarChecker(read_header(str(file)))
    file.unlink()
    if becomes == "replaced":
        file.write_bytes(b"another model")
    try:
        assert await fault(checker, {"type": "integer"}) == ""
        assert "wizard" in await fault(checker, {"type": "wizard"})
    finally:
        checker.close()


def test_combined_grammars_keep_their_parts() -> None:
    text = combine('start: "x" @body', {"body": from_json_schema({"type": "null"})})
    main, body = json.loads(text)["grammars"]
    assert main == {"name": "main", "lark_grammar": 'start: "x" @body'}
    assert (body["name"], body["json_schema"]["type"]) == ("body", "null")


def accepts(schema: Any, text: str) -> bool:
    """Whether the grammar of a schema takes the text as a whole answer."""
    matcher = VOCABULARY.compile(from_json_schema(schema))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, '{"a": [null, true, "x", -1.5, {"b": []}], "c": {}}'),
        ({"type": "number"}, "3.141592653589793"),
        ({"type": "number"}, "-6.02214076e+23"),
        ({"type": "number", "maximum": 7}, "6.5"),
        (
            {
                "type": "object",
                "properties": {"k": {"type": "string"}},
                "anyOf": [
                    {"type": "object", "properties": {key: {"type": "number"}}} for key in "ab"
                ],
            },
            '{"k": "x", "a": 1}',
        ),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {key: {"type": "string"}}} for key in "ab"
                ]
            },
            '{"a": "x", "b": "y"}',
        ),
    ],
)
def test_f23_schemas_mean_what_they_say(schema: Any, text: str) -> None:
    assert accepts(schema, text)


def test_f23_only_json_has_short_numbers() -> None:
    assert with_short_numbers(from_lark("start: /[0-9]+/")) is None
    assert with_short_numbers(from_regex("[0-9]+")) is None
    both = combine("start: @a | @b", {"a": from_json_schema({}), "b": from_regex("[0-9]+")})
    short = with_short_numbers(both)
    assert short is not None
    main, a, b = json.loads(short)["grammars"]
    assert main == json.loads(both)["grammars"][0]
    assert b == json.loads(both)["grammars"][2]
    assert a.keys() == {"name", "lark_grammar"}


def test_f23_blanks_are_few_and_none_is_needed() -> None:
    for n, is_taken in ((0, True), (20, True), (21, False)):
        assert accepts({"type": "object"}, "{" + " " * n + '"a":1}') == is_taken


def test_f24_parts_of_a_one_of_may_overlap() -> None:
    parts = [{"type": "object", "properties": {key: {"type": "string"}}} for key in "ab"]
    assert accepts({"oneOf": parts}, '{"a": "x"}')
    assert not accepts({"oneOf": parts}, '{"a": 1, "b": 2}')
    assert accepts({"oneOf": parts, "x-guidance": {"whitespace_flexible": False}}, '{"a":"x"}')
