"""Grammars: checked in a process of their own, from the header that was read at the start."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cflow.engine.client.card import read_header
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.text.grammar import (
    MAX_CHARS,
    GrammarChecker,
    GrammarError,
    combine,
    from_json_schema,
    from_lark,
)
from oracles.real_models import RealModel

pytestmark = pytest.mark.anyio


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
