"""Parsing of answers: texts as models write them, cut anywhere."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflow.engine.text.dialect import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_NAMED,
    QWEN_CODER,
    CallSyntax,
    Thinking,
)
from cflow.engine.text.reply import MAX_CALLS, Part, ReplyReader

TOOLS: dict[str, Any] = {"get_weather": {}, "f": {}}
PARIS = {"city": "Paris", "note": 'a "{" or }'}
Read = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def read(
    pieces: Sequence[str],
    syntax: CallSyntax | None,
    thinking: Thinking = "no",
    max_calls: int = MAX_CALLS,
    tools: Mapping[str, Any] = TOOLS,
    is_cut: bool = False,
    must_call: bool = False,
    json_calls: bool = False,
) -> Read:
    reader = ReplyReader(
        syntax, tools, thinking, max_calls, must_call=must_call, json_calls=json_calls
    )
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.flush(is_cut=is_cut)
    texts: dict[str, str] = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for kind, text, call in parts:
        if kind in ("reasoning", "content"):
            texts[kind] += text
        elif kind == "call":
            assert call == len(calls)
            calls.append((text, ""))
        else:
            assert call == len(calls) - 1
            calls[call] = (calls[call][0], calls[call][1] + text)
    return texts["reasoning"], texts["content"], calls


def hermes(name: str, arguments: object) -> str:
    """A call as Qwen's template writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def tagged(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder's template writes it."""
    told = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


CALL = ("get_weather", json.dumps(PARIS))
CASES: list[tuple[str, CallSyntax | None, Thinking, Read]] = [
    # Hermes and Qwen
    (hermes("get_weather", PARIS), HERMES, "no", ("", "", [CALL])),
    ("I look.\n" + hermes("get_weather", PARIS), HERMES, "no", ("", "I look.", [CALL])),
    (hermes("get_weather", PARIS) + "\n" + hermes("f", {}) + "\n", HERMES, "no",
     ("", "", [CALL, ("f", "{}")])),
    (hermes("f", {}) + "\nDone.", HERMES, "no", ("", "Done.", [("f", "{}")])),
    ('<tool_call>{"arguments": {"x": [1, 2.5]}, "name": "f"}</tool_call>', HERMES, "no",
     ("", "", [("f", '{"x":[1,2.5]}')])),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', HERMES, "no",
     ("", "", [("f", '{"x":1}')])),
    ('<tool_call>{"name": "f"}</tool_call>', HERMES, "no", ("", "", [("f", "{}")])),
    # text that only resembles a call
    ("a < b and <tool_box>", HERMES, "no", ("", "a < b and <tool_box>", [])),
    ("<tool_call>\nno JSON", HERMES, "no", ("", "<tool_call>\nno JSON", [])),
    ("<tool_call>", HERMES, "no", ("", "<tool_call>", [])),
    ("x <tool_", HERMES, "no", ("", "x <tool_", [])),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>!', HERMES, "no",
     ("", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>!', [])),
    ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', HERMES, "no",
     ("", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "f", "arguments": [1]}', HERMES, "no",
     ("", '<tool_call>{"name": "f", "arguments": [1]}', [])),
    ('<tool_call>{"name": "f", "argu', HERMES, "no", ("", '<tool_call>{"name": "f", "argu', [])),
    # a certain call that breaks or is cut off
    ('<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>', HERMES, "no",
     ("", "", [("f", "{x: 1}")])),
    ('<tool_call>{"name": "f", "arguments": {"x": "y', HERMES, "no",
     ("", "", [("f", '{"x": "y')])),
    # Llama
    ('{"name": "f", "parameters": {"x": 1}}', LLAMA, "no", ("", "", [("f", '{"x": 1}')])),
    ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', LLAMA, "no",
     ("", "", [("f", '{"x": 1}')])),
    ('{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "x"}}', LLAMA,
     "no", ("", "", [("f", "{}"), ("get_weather", '{"city": "x"}')])),
    ('{"type": "function", "name": "f", "parameters": {"x": 1}}', LLAMA, "no",
     ("", "", [("f", '{"x":1}')])),
    ('{"answer": 42}', LLAMA, "no", ("", '{"answer": 42}', [])),
    ('{"name": "Ada", "age": 36}', LLAMA, "no", ("", '{"name": "Ada", "age": 36}', [])),
    ('It is {"name": "f", "parameters": {}}', LLAMA, "no",
     ("", 'It is {"name": "f", "parameters": {}}', [])),
    ('<|python_tag|>print("hi")', LLAMA, "no", ("", '<|python_tag|>print("hi")', [])),
    # Mistral
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {}}]', MISTRAL,
     "no", ("", "", [("f", '{"x": 1}'), ("f", "{}")])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "VvvODy9mT"}]', MISTRAL, "no",
     ("", "", [("f", "{}")])),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}[TOOL_CALLS] no', MISTRAL, "no",
     ("", "[TOOL_CALLS] no", [("f", "{}")])),
    ('{"name": "f", "parameters": {}}"{"x": 1} \n', LLAMA, "no", ("", '"{"x": 1} \n', [("f", "{}")])),
    ("Look: [TOOL_CALLS] is a word", MISTRAL, "no", ("", "Look: [TOOL_CALLS] is a word", [])),
    ('[TOOL_CALLS]get_weather[ARGS]' + json.dumps(PARIS), MISTRAL_NAMED, "no", ("", "", [CALL])),
    ('Look.[TOOL_CALLS]f[ARGS]{"x": {"y": []}}[TOOL_CALLS]f[ARGS] {}', MISTRAL_NAMED, "no",
     ("", "Look.", [("f", '{"x": {"y": []}}'), ("f", "{}")])),
    ("[TOOL_CALLS]f[ARGS]{}\nDone.", MISTRAL_NAMED, "no", ("", "Done.", [("f", "{}")])),
    ('[TOOL_CALLS]f[ARGS]{"x": "y', MISTRAL_NAMED, "no",
     ("", "", [("f", '{"x": "y')])),
    ("[TOOL_CALLS]f[ARGS]{x}!", MISTRAL_NAMED, "no",
     ("", "!", [("f", "{x}")])),
    ("[TOOL_CALLS]f[ARGS][1]", MISTRAL_NAMED, "no", ("", "[TOOL_CALLS]f[ARGS][1]", [])),
    ("[TOOL_CALLS]other[ARGS]{}", MISTRAL_NAMED, "no", ("", "[TOOL_CALLS]other[ARGS]{}", [])),
    ("[TOOL_CALLS]f[ARG", MISTRAL_NAMED, "no", ("", "[TOOL_CALLS]f[ARG", [])),
    ("[TOOL_CALLS]f or g", MISTRAL_NAMED, "no", ("", "[TOOL_CALLS]f or g", [])),
    ("[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]" + json.dumps(PARIS), MISTRAL_IDS, "no",
     ("", "", [CALL])),
    ('I.[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}[TOOL_CALLS]f[ARGS]{"a":1}', MISTRAL_IDS, "no",
     ("", "I.", [("f", "{}"), ("f", '{"a":1}')])),
    ("[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}", MISTRAL_IDS, "no",
     ("", "[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}", [])),
    ("[TOOL_CALLS]f[CALL_ID]a1[AR", MISTRAL_IDS, "no", ("", "[TOOL_CALLS]f[CALL_ID]a1[AR", [])),
    ("[TOOL_CALLS]other[CALL_ID]a1[ARGS]{}", MISTRAL_IDS, "no",
     ("", "[TOOL_CALLS]other[CALL_ID]a1[ARGS]{}", [])),
    # Qwen3-Coder
    (tagged("f", x="1", note="a <b>\n</b>"), QWEN_CODER, "no",
     ("", "", [("f", '{"x": 1, "note": "a <b>\\n</b>"}')])),
    ("I look.\n\n" + tagged("f") + "\n" + tagged("get_weather", city="Paris") + "\nDone.", QWEN_CODER, "no",
     ("", "I look.Done.", [("f", "{}"), ("get_weather", '{"city": "Paris"}')])),
    ("<tool_call><function=f></function></tool_call>", QWEN_CODER, "no", ("", "", [("f", "{}")])),
    ("<tool_call>\n<function=f>\n<parameter=x>\n1", QWEN_CODER, "no",
     ("", "", [("f", "")])),
    ("<tool_call>\n<function=f>\nand", QWEN_CODER, "no",
     ("", "<tool_call>\n<function=f>\nand", [])),
    (tagged("other", x="1"), QWEN_CODER, "no", ("", tagged("other", x="1"), [])),
    (hermes("f", {}), QWEN_CODER, "no", ("", hermes("f", {}), [])),
    # reasoning
    ("<think>\nHm, 2.\n</think>\n\nTwo.", None, "maybe", ("Hm, 2.", "Two.", [])),
    ("Hm, 2.\n</think>\n\nTwo.", None, "begun", ("Hm, 2.", "Two.", [])),
    ("Hm, no end", None, "begun", ("Hm, no end", "", [])),
    ("Two <think>", None, "maybe", ("", "Two <think>", [])),
    ("<think", None, "maybe", ("", "<think", [])),
    (" \n", None, "maybe", ("", " \n", [])),
    ("<think>\n<tool_call> it is\n</think>\n" + hermes("f", {}), HERMES, "maybe",
     ("<tool_call> it is", "", [("f", "{}")])),
    ("<think></think>" + hermes("f", {}), HERMES, "maybe", ("", "", [("f", "{}")])),
    ("no thoughts </think>", None, "no", ("", "no thoughts </think>", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "syntax", "thinking", "expected"), CASES)
def test_texts_however_they_are_cut(
    text: str, syntax: CallSyntax | None, thinking: Thinking, expected: Read
) -> None:
    assert read([text], syntax, thinking) == expected
    assert read(list(text), syntax, thinking) == expected
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], syntax, thinking) == expected


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, hermes("get_weather", PARIS) + "\n" + hermes("f", {"x": 1})),
        (LLAMA, '{"name": "get_weather", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}'),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {}}]'),
        (MISTRAL_NAMED, '[TOOL_CALLS]get_weather[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{}'),
        (MISTRAL_IDS, '[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{"x": 1}[TOOL_CALLS]f[CALL_ID]a2[ARGS]{}'),
        (QWEN_CODER, tagged("get_weather", city="Paris") + "\n" + tagged("f", x="1")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thinks", [False, True])
def test_f18_marks_of_a_cut_answer_are_no_content(
    syntax: CallSyntax, text: str, thinks: bool
) -> None:
    """Of the whole answer and of a stream, wherever it is cut."""
    before = "<think>\nHm.\n</think>\n" if thinks else ""
    thinking: Thinking = "maybe" if thinks else "no"
    told = read([before + text], syntax, thinking)[2]
    for end in range(len(before + text) + 1):
        cut = (before + text)[:end]
        for pieces in ([cut], list(cut)):
            forced = read(pieces, syntax, thinking, is_cut=True, must_call=True)
            assert forced[1] == ""
            for (name, arguments), (whole_name, whole) in zip(forced[2], told, strict=False):
                assert name == whole_name
                assert whole.startswith(arguments)
            free = read(pieces, syntax, thinking, is_cut=True)
            assert free[2] == forced[2]
            if text[0] != "{" or free[2]:  # bare JSON has no mark
                assert free[1] in ("", "<", "[")


def test_f18_text_that_only_resembles_a_call_stays_in_a_cut_answer() -> None:
    for text in ("a < b and <tool_box>", "<tool_call>\nno JSON", "1 <", '{"answer": 4'):
        assert read(list(text), HERMES, is_cut=True) == ("", text, [])
    assert read(["I look.\n<tool_"], HERMES, is_cut=True) == ("", "I look.", [])
    assert read(['I look.\n<tool_call>{"na'], HERMES, is_cut=True) == ("", "I look.", [])
    assert read(['{"type": "object", "x'], LLAMA, is_cut=True) == ("", '{"type": "object", "x', [])


def test_arguments_come_while_they_are_written() -> None:
    reader = ReplyReader(HERMES, TOOLS, "no")
    text = hermes("f", {"code": "line " * 20})
    given = [part for char in text for part in reader.push(char)]
    assert given[0] == Part("call", "f", 0)
    pieces = [part.text for part in given if part.kind == "arguments"]
    assert len(pieces) > 100
    assert json.loads("".join(pieces)) == {"code": "line " * 20}


@pytest.mark.parametrize(
    ("schema", "value", "json_value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "\n two\n", "\n two\n"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, '["a",\n 1]', ["a", 1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", "1"),
        (None, '{"a": 1}', {"a": 1}),
        (None, "some text", "some text"),
    ],
)
def test_values_in_tags_are_what_their_schema_means(
    schema: Any, value: str, json_value: object
) -> None:
    tools = {"f": {"type": "object", "properties": {"x": schema} if schema else {}}}
    ((name, arguments),) = read([tagged("f", x=value)], QWEN_CODER, tools=tools)[2]
    assert (name, json.loads(arguments)) == ("f", {"x": json_value})


def test_calls_beyond_the_bound_are_dropped() -> None:
    text = hermes("f", {"x": 1}) + "\n" + hermes("f", {"x": 2}) + "\n" + hermes("f", {"x": 3})
    assert read(list(text), HERMES, max_calls=1) == ("", "", [("f", '{"x": 1}')])


def test_without_tools_nothing_is_a_call() -> None:
    text = hermes("f", {})
    assert read(list(text), HERMES, tools={}) == ("", text, [])


def test_content_is_not_held_back_longer_than_needed() -> None:
    reader = ReplyReader(HERMES, TOOLS, "no")
    assert reader.push("one <") == [Part("content", "one")]
    assert reader.push("b") == [Part("content", " <b")]
    bare = ReplyReader(LLAMA, TOOLS, "no")
    assert bare.push('{"answer": ') == [Part("content", '{"answer": ')]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", '{"name": "f", "arguments": ', '{"x": 1}', '"', "\\",
     "\n", " ", "text", "[TOOL_CALLS]", "[", "]", ",", ";", "<|python_tag|>", "<think>", "</think>",
     '{"name": "f", "parameters": {}}', "<", "é",
     "f[ARGS]", "f[CALL_ID]", "a1", "[ARGS]", "<function=f>", "</function>", "<parameter=x>", "</parameter>"]
)  # fmt: skip


@given(
    st.lists(PIECES, max_size=12),
    st.sampled_from([None, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, MISTRAL_IDS, QWEN_CODER]),
    st.sampled_from(["no", "maybe", "begun"]),
    st.data(),
)
def test_cuts_never_matter_and_nothing_is_lost(
    pieces: list[str], syntax: CallSyntax | None, thinking: Thinking, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    ends = [0, *cuts, len(text)]
    cut = [text[a:b] for a, b in pairwise(ends)]
    reasoning, content, calls = read(cut, syntax, thinking)
    assert read([text], syntax, thinking) == (reasoning, content, calls)
    if not calls and thinking == "no":
        assert content == text


SYNTAXES = {
    "hermes": (HERMES, hermes("f", {"a": 1}), hermes("f", {"a": 12}), hermes("get_weather", {})),
    "tagged": (QWEN_CODER, tagged("f", a="1"), tagged("f", a="12"), tagged("get_weather")),
    "named": (
        MISTRAL_NAMED,
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        '[TOOL_CALLS]f[ARGS]{"a": 12}',
        "[TOOL_CALLS]get_weather[ARGS]{}",
    ),
}


@pytest.mark.parametrize("kind", SYNTAXES)
def test_f19_a_repeated_call_ends_the_answer(kind: str) -> None:
    syntax, call, other, third = SYNTAXES[kind]
    once = read([call], syntax)[2]
    for text, expected in (
        (call + call, once),
        (call + "\n" + call + "more", once),
        (call + other + call + call + other, [*once, *read([other], syntax)[2], *once]),
        (call + third + call, [*once, *read([third], syntax)[2], *once]),
    ):
        for pieces in ([text], list(text)):
            assert read(pieces, syntax)[1:3] == ("", expected)


def test_f19_an_answer_has_a_bounded_number_of_calls() -> None:
    text = "".join(hermes("f", {"n": n}) for n in range(MAX_CALLS + 5))
    assert len(read([text], HERMES)[2]) == len(read(list(text), HERMES)[2]) == MAX_CALLS
    assert len(read([text], HERMES, max_calls=1)[2]) == 1


@pytest.mark.parametrize("kind", SYNTAXES)
def test_f18_a_cut_call_is_no_content(kind: str) -> None:
    syntax, call, *_ = SYNTAXES[kind]
    for before, n_before in (("", 0), (call.replace("1", "0"), 1), ("Text ", 0)):
        for at in range(len(call)):
            reader = ReplyReader(syntax, TOOLS, "no", must_call=not before.startswith("Text"))
            parts = reader.push(before + call[:at]) + reader.flush(is_cut=True)
            content = "".join(part.text for part in parts if part.kind == "content")
            if at >= len(syntax.open):  # a shorter piece of the mark may be text
                assert content == before.strip() if n_before == 0 else content == ""
            assert n_before <= sum(part.kind == "call" for part in parts) <= n_before + 1


F = '{"name": "f", "arguments": {"x": 1}}'
PRETTY = json.dumps({"name": "get_weather", "arguments": PARIS}, indent=4)
F_CALL = ("f", '{"x": 1}')
PRETTY_CALL = ("get_weather", json.dumps(PARIS, indent=4).replace("\n", "\n    "))
JSON_CALLS: list[tuple[str, Read]] = [
    (F, ("", "", [F_CALL])),
    (f"\n  {F}\n\n", ("", "", [F_CALL])),
    (f"```json\n{PRETTY}\n```", ("", "", [PRETTY_CALL])),
    (f"```\n{F}```\n", ("", "", [F_CALL])),
    (f"[{F}, {PRETTY}]", ("", "", [F_CALL, PRETTY_CALL])),
    (f"```json\n[\n{F}\n]\n```", ("", "", [F_CALL])),
    ('{"arguments": {"x": 1}, "name": "f"}', ("", "", [F_CALL])),
    ('{"name": "f", "arguments": {}}', ("", "", [("f", "{}")])),
    ('{"name":"f","arguments":{"a":"```\\n<tool_call>{}"}}', ("", "", [("f", '{"a":"```\\n<tool_call>{}"}')])),
    (f"<think>\nHm.\n</think>\n\n{F}", ("Hm.", "", [F_CALL])),
    # what repeats, and marks of the syntax
    (f"[{F}, {F}]", ("", "", [F_CALL])),
    (hermes("f", {"x": 1}), ("", "", [F_CALL])),
    (f"{F}\n" + hermes("get_weather", {}), ("", F, [("get_weather", "{}")])),
    # anything else is content, unchanged
    *((text, ("", text, [])) for text in (
        "It is cold.", f"I call it: {F}", f"{F}\nDone.", f"{F}\n{F}", f"```json\n{F}\n```\nDone.", f"```python\n{F}\n```",
        '{"name": "unknown", "arguments": {}}', '{"name": "f"}', '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": {}, "id": 1}', '{"name": "f", "arguments": {x}}',
        '{"name": "f", "parameters": {}}', '{"answer": 42}', "[]", f"[{F}, 1]", F[:-1], f"```json\n{F}", "```", " ", "{",
        '{"name": "f", "arguments": {"x": ' + "[" * 1200 + "]" * 1200 + "}}",
    )),
]  # fmt: skip


@pytest.mark.parametrize("syntax", [HERMES, QWEN_CODER, MISTRAL])
@pytest.mark.parametrize(("text", "expected"), JSON_CALLS)
def test_f17_bare_json_is_a_call(text: str, expected: Read, syntax: CallSyntax) -> None:
    if "<tool_call>\n" in text and syntax is not HERMES:
        return
    thinking: Thinking = "maybe" if text.startswith("<think>") else "no"
    for pieces in ([text], list(text)):
        assert read(pieces, syntax, thinking, json_calls=True) == expected
    for at in range(1, min(len(text), 200)):
        pieces = [text[:at], text[at:]]
        assert read(pieces, syntax, thinking, json_calls=True) == expected


@pytest.mark.parametrize(("syntax", "is_call"), [(HERMES, False), (LLAMA, True), (None, False)])
def test_f17_bare_json_stays_what_it_is(syntax: CallSyntax | None, is_call: bool) -> None:
    """Where it is switched off, is the syntax of the model, or there is no tool."""
    text = '{"name": "f", "parameters": {"x": 1}}' if is_call else F
    expected = ("", "", [F_CALL]) if is_call else ("", text, [])
    assert read(list(text), syntax, json_calls=syntax is not HERMES) == expected
    assert read(list(text), syntax, json_calls=True, tools={})[1] == text


def test_f17_an_answer_is_held_back_only_while_it_may_be_a_call() -> None:
    for text, at in (
        ("It is", 0),
        ("```python", 3),
        ('{"answer": 1}', 3),
        ('{"name": "fx"}', 11),
        ('{"name": "f", "arguments": 1}', 27),
        (F + "\n\nSo", len(F) + 2),
    ):
        reader = ReplyReader(HERMES, TOOLS, "no", json_calls=True)
        given = ["".join(part.text for part in reader.push(char)) for char in text]
        assert next(i for i, piece in enumerate(given) if piece) == at
        assert "".join(given) == text


JSON_PIECES = st.sampled_from(
    ["```json\n", "```", F, "\n", " ", "[", "]", ",", "{", "}", '"', '{"name": "f", ', '"arguments": {}', "x",
     "<tool_call>", "<think>", "</think>", hermes("f", {})]
)  # fmt: skip


@given(
    st.lists(JSON_PIECES, max_size=6), st.sampled_from(["no", "maybe"]), st.booleans(), st.data()
)
def test_f17_cuts_never_matter_and_nothing_is_lost(
    pieces: list[str], thinking: Thinking, is_cut: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    cut = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    found = read(cut, HERMES, thinking, is_cut=is_cut, json_calls=True)
    assert read([text], HERMES, thinking, is_cut=is_cut, json_calls=True) == found
    if not found[2]:
        assert read([text], HERMES, thinking, is_cut=is_cut) == found
