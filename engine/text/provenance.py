"""Text that knows which of its characters a template wrote.

Whoever writes a message must not be able to write a control token (`<|im_end|>`), so the renderer
tells the tokenizer which characters of a prompt are the template's own. Literals of a template are
Text, and so are its outputs. What is joined or cut out of a Text keeps its marks. Every other str is
foreign: an operation that is missing here loses marks and cannot invent them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import sync_do_join
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

OWN, FOREIGN = b"\1", b"\0"


class Text(str):
    """A str with a mark for each character: OWN, or FOREIGN."""

    __slots__ = ("marks",)
    marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> Text:
        """marks: None for foreign text."""
        new = super().__new__(cls, text)
        new.marks = FOREIGN * len(text) if marks is None else marks
        return new

    def spans(self) -> list[tuple[int, int]]:
        """The longest runs of own characters: first, and one past the last."""
        spans, end = [], 0
        while (start := self.marks.find(OWN, end)) >= 0:
            end = self.marks.find(FOREIGN, start)
            end = len(self.marks) if end < 0 else end
            spans.append((start, end))
        return spans

    def __str__(self) -> str:  # str(text) keeps the marks, and jinja2 calls it on all output
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, n: SupportsIndex) -> str:
        return Text(super().__mul__(n), self.marks * n)

    __rmul__ = __mul__

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        marks = (
            self.marks[at] if isinstance(at, slice) else self.marks[at : at.__index__() + 1 or None]
        )
        return Text(super().__getitem__(at), marks)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def join(self, parts: Iterable[str]) -> str:
        joined: list[str] = []
        for part in parts:
            joined += [self, part]
        return concat(joined[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        parts: list[str] = []
        for part in self.split(old, count):
            parts += [new, part]
        return concat(parts[1:])

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().split(sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().rsplit(sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cut(super().splitlines(keepends), 0 if keepends else None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, sep, after = self._cut(super().partition(sep), 0)
        return before, sep, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, sep, after = self._cut(super().rpartition(sep), 0)
        return before, sep, after

    def _cut(self, parts: Iterable[str], gap: int | None) -> list[str]:
        """parts: substrings, in order. gap: characters between two of them; None for white space
        that no part begins with."""
        cut: list[str] = []
        end = 0
        for part in parts:
            start = self.find(part, end) if gap is None else end + gap * bool(cut)
            end = start + len(part)
            cut.append(self[start:end])
        return cut


def own(text: str) -> Text:
    """What a template wrote."""
    return Text(text, OWN * len(text))


def concat(parts: Iterable[str]) -> Text:
    parts = list(parts)
    marks = (part.marks if isinstance(part, Text) else FOREIGN * len(part) for part in parts)
    return Text("".join(parts), b"".join(marks))


class Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates render to Text."""

    own = staticmethod(own)
    concat = staticmethod(concat)

    def __init__(self, **options: Any) -> None:
        # The optimizer folds lists of literals into lists of plain strings.
        super().__init__(**options, optimized=False)
        self.filters["join"] = _join

    @staticmethod
    def join(parts: Iterable[Any]) -> Text:
        return concat(map(str, parts))


class _Generator(CodeGenerator):
    """Compiles literals to Text, and `~` to a concatenation that keeps marks."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(_literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(_literal(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


Environment.code_generator_class = _Generator


def _literal(text: str) -> str:
    return f"environment.own({text!r})"


@pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    return sync_do_join(context, value, Text("") + str(d), attribute)
