"""Streaming parser of an answer's text: reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec

from cflow.engine.text.dialect import THINK, THOUGHT, CallSyntax, Thinking
from cflow.engine.text.json_calls import JsonCalls
from cflow.engine.text.tagged_call import TaggedCall

Kind = Literal["reasoning", "content", "call", "arguments"]

MAX_CALLS = 32  # of one answer
_SPACE = " \t\r\n"
_STRING = r'("(?:[^"\\]|\\.)*")'
_ID = re.compile(r"[a-zA-Z0-9]{0,64}")
_KEYS = ("name", "arguments", "parameters", "id", "tool_call_id", "type")
_FIRST_KEY = re.compile(r"\{\s*" + _STRING)


@cache
def _patterns(name_key: str, key: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The beginnings of a call in JSON: up to its tool's name, and up to its arguments."""
    name = rf'\{{\s*"{re.escape(name_key)}"\s*:\s*' + _STRING
    keys = "|".join(map(re.escape, sorted({"arguments", "parameters", key} - {""})))
    return re.compile(name), re.compile(rf'{name}\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)')


class Part(NamedTuple):
    """A piece of an answer.

    text: for "call" the tool's name, for "arguments" a piece of their JSON. call: the number of the
    call, -1 for reasoning and content.
    """

    kind: Kind
    text: str
    call: int = -1


class ReplyReader:
    """Parser of one answer, whose text may be cut anywhere.

    A call is given out once its name is a tool's and its arguments have begun; these may still turn
    out to be malformed or cut. Text that only resembles a call is content. White space next to calls
    and reasoning is dropped.
    """

    def __init__(
        self,
        syntax: CallSyntax | None,
        tools: Mapping[str, Any],
        thinking: Thinking,
        max_calls: int = MAX_CALLS,
        *,
        must_call: bool = False,
        json_calls: bool = False,
    ) -> None:
        """tools: schemas of the arguments, by tool name. max_calls: the answer is over after them.
        must_call: the answer has no content, as a grammar forces calls. json_calls: an answer that
        is calls in JSON as a whole is calls, though the syntax has other marks."""
        self._syntax = syntax if tools else None
        self._tools = tools
        self._max_calls = max_calls
        self._must_call = must_call
        is_bare = self._syntax is None or self._syntax.is_bare
        may_be_json = json_calls and not (must_call or is_bare)
        self._json = JsonCalls(tuple(tools)) if may_be_json else None  # the content so far
        self.n_calls = 0
        self.is_over = False  # the answer ends here, whatever the model goes on with
        self._last: tuple[str, str] | None = None  # name and arguments of the last call
        self._call = ("", "")  # of the call that is being read
        self._copy: list[Part] | None = None  # its parts, while it may repeat the last one
        self.is_thinking = thinking in ("begun", "within")
        self._may_think = thinking == "maybe"
        self._held = ""  # received and not parsed yet
        self._is_trimming = thinking == "begun"  # white space that comes next is dropped
        self._is_first = True  # nothing but reasoning so far
        self._in_section = False  # a section of calls
        self._raw = ""  # text of the section since its last call
        self._is_after_call = False
        self._object: _Object | TaggedCall | None = None

    def push(self, text: str) -> list[Part]:
        """Parse more text; return the parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._held and not self.is_over and self._advance(parts):
            pass
        return self._settled(parts)

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts, at the end of the answer. is_cut: not the model ended it, so
        what begins a mark or a call is neither content nor reasoning."""
        parts: list[Part] = []
        if self.is_over:
            return parts
        if is_cut:
            self._drop_begun()
        if self._object is not None:
            self._end_object(parts)
        elif self._in_section:
            self._end_section(parts)
        kind: Kind = "reasoning" if self.is_thinking else "content"
        is_counting = not (self._is_trimming or self.is_thinking)
        if self._held and (is_counting or self._held.strip(_SPACE)):
            parts.append(Part(kind, self._held))
        self._held = ""
        self._release(parts)
        parts = self._settled(parts)
        if self._json is not None:
            self._end_json(parts, self._json)
        return parts

    def _settled(self, parts: list[Part]) -> list[Part]:
        if self._must_call:
            parts = [part for part in parts if part.kind != "content"]
        if self._json is not None:
            parts = self._without_json(parts, self._json)
        return _merged(parts)

    def _without_json(self, parts: list[Part], json: JsonCalls) -> list[Part]:
        """The parts without content that may become calls, or with all of it once it cannot."""
        out = []
        for part in parts:
            if self._json is not None and part.kind != "reasoning":
                if part.kind == "content" and json.take(part.text):
                    continue
                self._json = None
                if json.text:
                    out.append(Part("content", json.text))
                if part.kind == "content":
                    continue
            out.append(part)
        return out

    def _end_json(self, parts: list[Part], json: JsonCalls) -> None:
        """Turn the whole content into calls, or give it out."""
        calls = json.calls()
        for name, arguments in calls:
            if not self.is_over:
                self._open_call(parts, name)
                self._give(parts, "arguments", arguments)
                self._end_call(parts)
        if json.text and not calls:
            parts.append(Part("content", json.text))
        self._json = None

    def _drop_begun(self) -> None:
        """Drop the beginning of a call behind its mark, or more than one character of a mark."""
        if self._in_section and (self._raw.strip(_SPACE) or self._is_after_call):
            self._raw = self._held = ""
            self._object, self._in_section = None, False
            return
        mark = THINK if self._may_think else THOUGHT if self.is_thinking else ""
        if not mark and self._syntax is not None:
            mark = self._syntax.open
        if mark and (n := _n_begun(self._held, mark)) > 1:
            self._held = self._held[:-n].rstrip(_SPACE)

    # ---- each method parses the front of _held; it returns False if it needs more text ----

    def _advance(self, parts: list[Part]) -> bool:
        if self._is_trimming:
            self._held = self._held.lstrip(_SPACE)
            self._is_trimming = not self._held
            return not self._is_trimming
        if self._may_think:
            return self._look_for_reasoning()
        if self.is_thinking:
            return self._read_reasoning(parts)
        if self._object is not None:
            return self._read_object(parts, self._object)
        if self._in_section:
            return self._read_section(parts)
        return self._read_content(parts)

    def _look_for_reasoning(self) -> bool:
        text = self._held.lstrip(_SPACE)
        if THINK.startswith(text) and text != THINK:
            return False
        self._may_think = False
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self.is_thinking = self._is_trimming = True
        return True

    def _read_reasoning(self, parts: list[Part]) -> bool:
        is_over = self._give_until(THOUGHT, "reasoning", parts)
        if is_over:
            self._held = self._held.lstrip(_SPACE)[len(THOUGHT) :]
            self.is_thinking, self._is_trimming = False, True
        return is_over

    def _read_content(self, parts: list[Part]) -> bool:
        syntax = self._syntax
        if syntax is None:
            parts.append(Part("content", self._held))
            self._held = ""
            return False
        start = self._held.lstrip(_SPACE)
        if not start:
            return False
        is_bare = syntax.is_bare and self._is_first and start[0] == "{"
        if not (is_bare or self._give_until(syntax.open, "content", parts)):
            return False
        text = self._held.lstrip(_SPACE)
        self._raw, self._held = self._held[: len(self._held) - len(text)], text
        self._is_first = self._is_after_call = False
        self._in_section = True
        return True

    def _give_until(self, mark: str, kind: Kind, parts: list[Part]) -> bool:
        """Give out the text before a mark, without trailing white space.

        Returns whether the mark is the next text besides white space.
        """
        at = self._held.find(mark)
        end = at if at >= 0 else len(self._held) - _n_begun(self._held, mark)
        text = self._held[:end].rstrip(_SPACE)
        if text:
            parts.append(Part(kind, text))
            self._held = self._held[len(text) :]
            self._is_first = self._is_first and kind == "reasoning"
        return at >= 0

    def _read_section(self, parts: list[Part]) -> bool:
        """Parse what stands between calls."""
        syntax = self._syntax
        assert syntax is not None
        marks = sorted({syntax.open, syntax.close, *syntax.between} - {""}, key=len, reverse=True)
        mark = next((mark for mark in marks if self._held.startswith(mark)), "")
        if mark:
            self._is_after_call = self._is_after_call and mark != syntax.open
            self._skip(len(mark))
        elif any(mark.startswith(self._held) for mark in marks):
            return False
        elif self._held[0] in _SPACE + syntax.filling:
            self._skip(1)
        elif syntax.tags is not None and self._begins_tagged(syntax.tags.head):
            self._object = TaggedCall(self._tools, syntax.tags)
        elif syntax.infix:
            return self._read_name(parts, syntax)
        elif self._held[0] == "{" and syntax.tags is None:
            self._object = _Object(keys=(syntax.name_key, syntax.key))
        else:
            self._end_section(parts)
        return True

    def _read_name(self, parts: list[Part], syntax: CallSyntax) -> bool:
        """Parse a call's head: the tool's name, perhaps an id, and the infix."""
        head, infix, rest = self._held.partition(syntax.infix)
        arguments = rest.lstrip(_SPACE)
        may_be_head = _is_head if infix else _begins_head
        if not may_be_head(head, syntax, self._tools) or arguments[:1] not in ("", "{"):
            self._end_section(parts)
            return True
        if not arguments:
            return False
        name, _id = _split_head(head, syntax)
        self._raw += self._held.removesuffix(arguments)
        self._held, self._object = arguments, _Object(name)
        return True

    def _begins_tagged(self, head: str) -> bool:
        if head:
            return self._held[0] == head[0]
        return any(self._held.startswith(name[: len(self._held)]) for name in self._tools)

    def _skip(self, n: int) -> None:
        """Consume n characters: they may be content, unless they follow a call."""
        if not self._is_after_call:
            self._raw += self._held[:n]
        self._held = self._held[n:]

    def _end_section(self, parts: list[Part]) -> None:
        """Leave the section; its text since the last call is content."""
        if self._raw:
            parts.append(Part("content", self._raw))
        self._raw, self._in_section = "", False

    def _read_object(self, parts: list[Part], found: _Object | TaggedCall) -> bool:
        self._held = found.take(self._held)
        if not found.is_certain and (name := found.begin_call(self._tools)):
            self._open_call(parts, name)
        if piece := found.arguments():
            self._give(parts, "arguments", piece)
        if found.is_over or found.is_no_call(self._tools):
            self._end_object(parts)
            return True
        return False

    def _end_object(self, parts: list[Part]) -> None:
        """Leave an object that is complete, is cut off, or cannot be a call."""
        found, self._object = self._object, None
        assert found is not None
        call = found.call(self._tools)
        if call is None and not found.is_certain:
            self._raw += found.text
            self._end_section(parts)
            return
        if call is not None and not found.is_certain:
            self._open_call(parts, call[0])
            self._give(parts, "arguments", call[1])
        self._end_call(parts)
        self._raw, self._is_after_call = "", True

    def _open_call(self, parts: list[Part], name: str) -> None:
        self.n_calls += 1
        self._call = (name, "")
        self._copy = [] if self._last is not None and self._last[0] == name else None
        self._give(parts, "call", name)

    def _give(self, parts: list[Part], kind: Kind, text: str) -> None:
        """Give a piece of a call out, or keep it while the call repeats the one before it."""
        part = Part(kind, text, self.n_calls - 1)
        if kind == "arguments":
            self._call = (self._call[0], self._call[1] + text)
        if self._copy is None:
            parts.append(part)
            return
        self._copy.append(part)
        assert self._last is not None
        if not self._last[1].startswith(self._call[1]):
            self._release(parts)

    def _release(self, parts: list[Part]) -> None:
        parts += self._copy or []
        self._copy = None

    def _end_call(self, parts: list[Part]) -> None:
        """A call that equals the one before it ends the answer and is dropped: a model that repeats
        itself does not stop by itself."""
        if self._copy is not None and self._call == self._last:
            self.n_calls -= 1
            self._copy, self.is_over = None, True
        self._release(parts)
        self._last = self._call
        self.is_over = self.is_over or self.n_calls >= self._max_calls


class _Object:
    """A JSON object that arrives in pieces and may be a call."""

    def __init__(self, name: str = "", keys: tuple[str, str] = ("name", "arguments")) -> None:
        """name: the tool whose arguments the object is; "" if the object is to be the whole call.
        keys: those of a call's name and arguments."""
        self._name = name
        self._keys = keys
        self.text = ""
        self.is_over = False
        self.is_certain = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._ends: list[int] = []  # of what may be the arguments: this object, or a member of it
        self._first = self._sent = 0  # offsets: start of the arguments, start of their next piece

    def take(self, text: str) -> str:
        """Consume text; return what follows the object."""
        for i, char in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == (0 if self._name else 1):
                    self._ends.append(len(self.text) + i)
                if self._depth <= 0:
                    self.text += text[:i]
                    self.is_over = True
                    return text[i:]
        self.text += text
        return ""

    def begin_call(self, tools: Collection[str]) -> str | None:
        """The tool's name, once the object is certain to be a call."""
        if self._name:
            self.is_certain = True
            return self._name
        head = _patterns(*self._keys)[1].match(self.text)
        if head is None or (name := _unquote(head[1])) not in tools:
            return None
        self.is_certain = True
        self._first = self._sent = head.end()
        return name

    def is_no_call(self, tools: Collection[str]) -> bool:
        """Whether this cannot be a call: decided early, so that an answer in JSON is not held back."""
        inside = self.text[1:].lstrip(_SPACE)
        key = _FIRST_KEY.match(self.text)
        name = _patterns(*self._keys)[0].match(self.text)
        return not self._name and (
            inside[:1] not in ("", '"')
            or (key is not None and _unquote(key[1]) not in (*_KEYS, *self._keys))
            or (name is not None and _unquote(name[1]) not in tools)
        )

    def arguments(self) -> str:
        """The next piece of the arguments."""
        if not self.is_certain:
            return ""
        end = next((end for end in self._ends if end > self._first), len(self.text))
        piece, self._sent = self.text[self._sent : end], max(end, self._sent)
        return piece

    def call(self, tools: Collection[str]) -> tuple[str, str] | None:
        """Name and arguments, in JSON, if the object is a complete and valid call."""
        found = _decode(self.text)
        if self._name:
            return (self._name, _encode(found)) if isinstance(found, dict) else None
        name = found.get(self._keys[0]) if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in tools:
            return None
        arguments: Any = next(
            (found[key] for key in (self._keys[1], "arguments", "parameters") if key in found), {}
        )
        if isinstance(arguments, str):
            arguments = _decode(arguments)
        if not isinstance(arguments, dict):
            return None
        return name, _encode(arguments)


def _split_head(head: str, syntax: CallSyntax) -> tuple[str, str]:
    """A head without its infix, as name and id; the id is "" if there is none."""
    name, _, id = head.partition(syntax.id_mark) if syntax.id_mark else (head, "", "")
    return name, id


def _is_head(head: str, syntax: CallSyntax, tools: Collection[str]) -> bool:
    """Whether a head without its infix names a tool."""
    name, id = _split_head(head, syntax)
    return name in tools and _ID.fullmatch(id) is not None


def _begins_head(text: str, syntax: CallSyntax, tools: Collection[str]) -> bool:
    """Whether more text may complete this to a head that names a tool."""
    if any(
        (name + mark).startswith(text) for name in tools for mark in (syntax.infix, syntax.id_mark)
    ):
        return True
    head = text[: len(text) - _n_begun(text, syntax.infix)]
    return _is_head(head, syntax, tools)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _unquote(text: str) -> str | None:
    value = _decode(text)
    return value if isinstance(value, str) else None


def _n_begun(text: str, mark: str) -> int:
    """Length of the longest suffix of text that more text may complete to the mark."""
    return next(
        n
        for n in range(min(len(mark) - 1, len(text)), -1, -1)
        if mark.startswith(text[len(text) - n :])
    )


def _merged(parts: list[Part]) -> list[Part]:
    """The parts, with neighbours of one kind and call joined."""
    return [
        Part(kind, "".join(part.text for part in group), call)
        for (kind, call), group in groupby(parts, key=lambda part: (part.kind, part.call))
    ]
