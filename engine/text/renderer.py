"""The process that renders chat templates: `python -m cflow.engine.text.renderer`.

A template comes with the model file and is a program, so it runs in jinja2's immutable sandbox,
inside a jail. The first frame is the template's source, then come Jobs, answered by Results, in
msgpack.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec

from cflow.engine.text.jail import answer_jobs
from cflow.engine.text.jobs import TIME_S, Job, Result
from cflow.engine.text.provenance import Environment, Text, own

MAX_OUTPUT_CHARS = 16 << 20

# A role is one of a few words, so it may be part of what the template writes: "<|" + role + "|>".
ROLES = {"system", "developer", "user", "assistant", "tool"}


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks what a training loss counts. Its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> Environment:
    """An environment set up like that of transformers' apply_chat_template."""
    env = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson, without jinja2's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class Renderer:
    def __init__(self, source: bytes) -> None:
        self._source = source.decode()
        self._template: jinja2.Template | None = None

    def answer(self, job: bytes) -> bytes:
        return msgspec.msgpack.encode(self._render(msgspec.msgpack.decode(job, type=Job)))

    def _render(self, job: Job) -> Result:
        try:
            if self._template is None:
                self._template = environment().from_string(self._source)
            text = self._template.render(_marked(job))
        except jinja2.TemplateSyntaxError as error:
            return _failed(f"line {error.lineno}: {error.message}", is_broken=True)
        except MemoryError:
            return _failed("rendering takes too much memory", is_limit=True)
        except Exception as error:  # a template can raise anything
            return _failed(f"{error}"[:500] or type(error).__name__)
        if len(text) > MAX_OUTPUT_CHARS:
            return _failed(f"its output has {len(text)} characters, above {MAX_OUTPUT_CHARS}")
        assert isinstance(text, Text)
        return Result(str.__str__(text), text.spans())


def _marked(job: Job) -> dict[str, Any]:
    variables: dict[str, Any] = _foreign(json.loads(job.variables))
    for message in variables["messages"]:
        if message.get("role") in ROLES:
            message["role"] = own(message["role"])
    return {name: own(text) for name, text in job.special_tokens.items()} | variables


def _foreign(value: Any) -> Any:
    """The value with Text for str, so that what a template puts into it keeps its marks."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, list):
        return [_foreign(item) for item in value]
    if isinstance(value, dict):
        return {key: _foreign(item) for key, item in value.items()}
    return value


def _failed(why: str, *, is_broken: bool = False, is_limit: bool = False) -> Result:
    plain = str.__str__(why)  # a template can raise a Text
    return Result("", error=plain, is_broken=is_broken, is_limit=is_limit)


if __name__ == "__main__":
    answer_jobs(lambda source: Renderer(source).answer, TIME_S)
