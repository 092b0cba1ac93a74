"""The syntax of calls that a chat template writes, found by rendering probes.

A probe is an assistant's turn with calls whose names and arguments are unlike any other text. What the
template writes around these is the syntax: no list of known syntaxes is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cflow.engine.base.errors import TemplateError
from cflow.engine.text.dialect import THOUGHT, CallSyntax, Dialect
from cflow.engine.text.tagged_call import Tags
from cflow.engine.text.template import ChatTemplate

ID_LENGTHS = (24, 9)  # of calls, as some templates accept nine characters only
MAX_TURN = 6000  # characters
MAX_CHARS = 500  # of a text between names, keys and values: a longer one is no syntax
NAMES = ("zfirstz", "zsecondz")
TEXT, NUMBER = "zwordz", 70707
# Arguments of the two calls: all keys differ, so that each is found where it belongs.
KEYS = (("zaz", "zbz"), ("zcz", "zdz"))
ID = "zidabcdefghijklmnopqrstuvwx"
USER, CONTENT = "zquestionz", "zanswerz"
_TOKENS = re.compile(r"\s+|</?[^<>\s]+>|\[[A-Z_/]+\]|\w+|.", re.DOTALL)
_OBJECT = re.compile(r'\{[^{}]*"(\w+)":\s*"\Z')  # ends where the name begins
_OBJECT_INFIX = re.compile(r'",\s*"(\w+)":\s*')
_OBJECT_END = re.compile(r"[^{}]*\}")
_OPEN_TAG = re.compile(r"<[^<>]*\Z")


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call as rendered: text[start:end], from its name on, or as a whole if it is a JSON object.

    keys: of name and arguments in that object. infix: between a name and arguments in JSON. pieces:
    for tags, what stands between name, keys and values, in order.
    """

    start: int
    end: int
    keys: tuple[str, str] | None = None
    infix: str = ""
    pieces: tuple[str, ...] = ()


def dialect_of(template: ChatTemplate) -> Dialect:
    """How the model of this template writes calls and reasoning.

    A syntax with a name allows more than its template shows, such as ids and marks that models leave
    out, so it stands where the template begins calls with its mark or writes none.
    """
    dialect, calls = Dialect.of(template.source), derive(template)
    if calls is None or (dialect.calls is not None and dialect.calls.open == calls.open):
        return dialect
    return replace(dialect, calls=calls)


def derive(template: ChatTemplate) -> CallSyntax | None:
    """The syntax, None if the template writes no calls or in a form that CallSyntax cannot express."""
    try:
        for length in ID_LENGTHS:
            if (answer := _turn(template, CONTENT, 0, length)) is None:
                return None
            for content, n in product((CONTENT, ""), (2, 1)):
                text = _turn(template, content, n, length)
                if text is None or NAMES[0] not in text:
                    continue
                syntax = _syntax(_without_turn(text, answer), length)
                if syntax is not None and not _is_mixed(syntax, answer):
                    return syntax
    except TimeoutError:
        pass
    return None


def _is_mixed(syntax: CallSyntax, answer: str) -> bool:
    """Whether the syntax has parts of a probe, of reasoning or of another turn, or begins with a
    common word."""
    texts = " ".join(syntax.texts())
    after = answer.partition(CONTENT)[2].split()
    words = ("assistant", "THINK", *NAMES, TEXT, *sum(KEYS, ()), USER, CONTENT, ID[:6])
    return (
        syntax.open in after
        or not re.search(r"[<\[{|]", syntax.open)
        or any(word in texts for word in words)
    )


def _turn(template: ChatTemplate, content: str, n_calls: int, id_length: int) -> str | None:
    """An assistant's turn as rendered, with what comes behind it; None if the template refuses it."""
    user = {"role": "user", "content": USER}
    calls = [_call(i, id_length) for i in range(n_calls)]
    answer = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    tools = [_tool(i) for i in range(2)]
    try:
        text = template.render([user, answer], tools, add_generation_prompt=False).text
    except TemplateError as error:
        if error.is_limit:
            raise TimeoutError from None
        return None
    text = text[text.rfind(USER) + len(USER) :]
    return text if len(text) <= MAX_TURN else None


def _call(i: int, id_length: int) -> dict[str, Any]:
    arguments = dict(zip(KEYS[i], (TEXT, NUMBER), strict=True))
    id = f"{ID[: id_length - 1]}{i}"
    return {
        "type": "function",
        "id": id,
        "function": {"name": NAMES[i], "arguments": arguments},
    }


def _tool(i: int) -> dict[str, Any]:
    kinds = {key: {"type": kind, "description": "d"} for key, kind in zip(KEYS[i], ("string", "integer"), strict=True)}  # fmt: skip
    parameters = {"type": "object", "properties": kinds, "required": [*KEYS[i]]}
    function = {"name": NAMES[i], "description": "d", "parameters": parameters}
    return {"type": "function", "function": function}


def _without_turn(text: str, answer: str) -> str:
    """A turn's calls, without what an answer of plain content has around that."""
    before, _, after = answer.partition(CONTENT)
    if CONTENT in text and text.index(CONTENT) < text.index(NAMES[0]):
        text = text[text.index(CONTENT) + len(CONTENT) :]
    else:
        text = text[len(_common(text, before)) :]
    head, thought, rest = text.partition(THOUGHT)
    if thought and NAMES[0] not in head:
        text = rest
    text = text.removesuffix(after)
    stop = _TOKENS.match(after.strip())
    if stop and len(stop[0]) > 1:  # a turn may go on behind its end
        ends = text.find(stop[0], text.rfind(NAMES[0]))
        text = text[:ends] if ends >= 0 else text
    return text


def _syntax(text: str, id_length: int) -> CallSyntax | None:
    first = _seen(text, 0, 0)
    second = None if first is None else _seen(text, 1, first.end)
    if first is None or (NAMES[1] in text and second is None):
        return None
    last = second or first
    lead, tail = text[: first.start], text[last.end :]
    between = "" if second is None else text[first.end : second.start]
    if max(map(len, (lead, between, tail, *first.pieces, first.infix))) > MAX_CHARS:
        return None
    if second is None:
        open, close, around = lead, tail, ("", "", "")
    else:
        close = _common(between, tail)
        open = _common(lead[::-1], between[len(close) :][::-1], is_reversed=True)[::-1]
        separator = between[len(close) : len(between) - len(open)]
        around = (lead[: len(lead) - len(open)], separator, tail[len(close) :])
    if first.pieces:
        return _tagged(first, second, open, close, around)
    return _json(first, second, open, close, around, id_length)


def _seen(text: str, i: int, start: int) -> _Seen | None:
    """The call number i, looked for from `start` on."""
    at = text.find(NAMES[i], start)
    key = text.find(KEYS[i][0], at)
    if at < 0 or key < 0:
        return None
    name_end = at + len(NAMES[i])
    brace = text.rfind("{", name_end, key)
    if brace >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace)
        except (ValueError, RecursionError):
            return None
        if value != dict(zip(KEYS[i], (TEXT, NUMBER), strict=True)):
            return None
        infix = text[name_end:brace]
        head = _OBJECT.search(text[max(start, at - MAX_CHARS) : at])
        whole, rest = _OBJECT_INFIX.fullmatch(infix), _OBJECT_END.match(text, end)
        if head and whole and rest:
            return _Seen(at - len(head[0]), rest.end(), (head[1], whole[1]))
        return _Seen(at, end, infix=infix)
    pieces, at_piece = [], name_end
    for word in (KEYS[i][0], TEXT, KEYS[i][1], str(NUMBER)):
        found = text.find(word, at_piece)
        if found < 0:
            return None
        pieces.append(text[at_piece:found])
        at_piece = found + len(word)
    return _Seen(at, at_piece, pieces=tuple(pieces))


def _common(one: str, other: str, *, is_reversed: bool = False) -> str:
    """The longest beginning that two texts share and that cuts no tag or word of either."""
    same = _prefix(one, other)
    ends = [_ends(text[::-1] if is_reversed else text, is_reversed) for text in (one, other)]
    return same[: max(n for n in ends[0] & ends[1] if n <= len(same))]


def _prefix(one: str, other: str) -> str:
    """The longest beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _ends(text: str, is_reversed: bool) -> set[int]:
    """The offsets between tokens, from the end if reversed."""
    ends = {0, *(token.end() for token in _TOKENS.finditer(text))}
    return {len(text) - end for end in ends} if is_reversed else ends


def _json(
    first: _Seen,
    second: _Seen | None,
    open: str,
    close: str,
    around: Sequence[str],
    id_length: int,
) -> CallSyntax | None:
    infix, id_mark, is_numbered = first.infix, "", False
    name_key, key = first.keys or ("name", "")
    if second is not None and second.infix != infix:
        same = _prefix(infix, second.infix).removesuffix(ID[: id_length - 1])
        back = _prefix(infix[::-1], second.infix[::-1])[::-1]
        written = infix[len(same) : len(infix) - len(back)]
        id_mark, infix, is_numbered = same.strip(), back, written.isdecimal()
        if not id_mark or not (is_numbered or len(written) == id_length):
            return None
    if not (infix.strip() or key):
        return None
    call = f"{_quote(open)} call {_quote(close)}"
    return _made(call, open, close, around, second is not None, key=key, name_key=name_key,
        infix=infix, id_mark=id_mark, is_numbered=is_numbered, id_length=id_length)  # fmt: skip


def _tagged(
    first: _Seen, second: _Seen | None, open: str, close: str, around: Sequence[str]
) -> CallSyntax | None:
    before, text_infix, middle, infix = first.pieces
    key = _common(before[::-1], middle[::-1], is_reversed=True)[::-1]
    value_end = middle[: len(middle) - len(key)]
    if not (key.strip() and value_end.strip() and infix.strip() and close.startswith(value_end)):
        return None
    close = close[len(value_end) :]
    end = close[: close.find(">") + 1]
    head = _OPEN_TAG.search(open)
    begun = head[0] if head else ""
    mark = open.removesuffix(begun)
    if not (around[0].strip() or mark.strip()):
        begun, mark = "", open
    if not end.strip():
        return None
    tags = Tags(begun, before[: len(before) - len(key)], key, infix, value_end, end,
        "" if text_infix == infix else text_infix)  # fmt: skip
    call = f"{_quote(mark)} call {_quote(close[len(end) :])}"
    return _made(call, mark, close[len(end) :], around, second is not None, tags=tags)


def _made(
    call: str, open: str, close: str, around: Sequence[str], has_more: bool, **fields: Any
) -> CallSyntax | None:
    begin, separator, end = around
    begin, end, first = begin.lstrip(), end.rstrip(), call
    if not begin:
        first = call.replace(_quote(open), _quote(open.lstrip()), 1)
    single = f"{_quote(begin)} {first} {_quote(end)}"
    more = f"({_quote(separator)} {call})* " if has_more else ""
    several = f"{_quote(begin)} {first} {more}{_quote(end)}"
    marks = [*_marks(begin), *_marks(open)]
    if not marks:
        return None
    rest = dict.fromkeys([*marks[1:], *_marks(close), *_marks(separator), *_marks(end)])
    return CallSyntax(
        open=marks[0],
        between=tuple(mark for mark in rest if mark != marks[0]),
        filling="[,]" if {*marks[1:], *_marks(end), *_marks(separator)} & {*"[,]"} else "",
        single=single,
        several=several,
        **({"key": ""} | fields),
    )


def _marks(text: str) -> list[str]:
    """The words of a text, without the brackets of a list around calls."""
    return [
        mark
        for word in text.split()
        for mark in re.split(r"(?<=.)(\[)\Z|\A(\])(?=.)", word)
        if mark
    ]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
