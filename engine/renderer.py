"""The process that renders chat templates: `python -m cflow.engine.renderer`.

A template comes with the model file and is a program. It runs in jinja2's immutable sandbox, and in
a process of its own with bounds that no template can get around: CPU and wall time by an alarm that
kills, memory by a limit of the operating system. Jobs come on stdin, results go to stdout, each a
frame of u32 length and msgpack.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

TIME_S = 3.0
MEMORY_BYTES = 512 << 20  # of address space beyond what the process starts with
MAX_OUTPUT_CHARS = 16 << 20
LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """variables: the template's; source: None for the one of the last job."""

    source: str | None
    variables: dict[str, Any]


class Result(msgspec.Struct, frozen=True, array_like=True):
    text: str
    error: str | None = None


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a training loss counts; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As transformers' apply_chat_template sets it up."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
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
    """Without jinja2's HTML escapes."""
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
    def __init__(self) -> None:
        self._source = ""
        self._template: jinja2.Template | None = None

    def render(self, job: Job) -> Result:
        if job.source is not None:
            self._source, self._template = job.source, None
        try:
            if self._template is None:
                self._template = environment().from_string(self._source)
            text = self._template.render(job.variables)
        except jinja2.TemplateSyntaxError as error:
            return Result("", f"line {error.lineno}: {error.message}")
        except MemoryError:
            return Result("", "it takes too much memory")
        except Exception as error:  # whatever a template does
            return Result("", f"{error}"[:500] or type(error).__name__)
        if len(text) > MAX_OUTPUT_CHARS:
            return Result("", f"its output has {len(text)} characters, at most {MAX_OUTPUT_CHARS}")
        return Result(text)


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (n,) = LENGTH.unpack(head)
    body = stream.read(n)
    return body if len(body) == n else None


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    renderer = Renderer()
    while (body := read_frame(sys.stdin.buffer)) is not None:
        job = msgspec.msgpack.decode(body, type=Job)
        signal.setitimer(signal.ITIMER_REAL, TIME_S)  # nobody handles it: the process ends
        result = renderer.render(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(result))


if __name__ == "__main__":
    main()
