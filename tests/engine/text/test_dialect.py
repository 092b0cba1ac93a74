"""Dialects: how models write calls, and grammars of such calls."""

from typing import Any

import pytest

from cflow.engine.text.dialect import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_NAMED,
    QWEN_CODER,
    CallSyntax,
    Dialect,
    Form,
    grammar_of,
)
from cflow.engine.text.grammar import Vocabulary, from_choice, from_json_schema, from_regex
from cflow.engine.text.reply import ReplyReader
from oracles.toy_model import EOS

TEMPLATES = [
    ("{% if tools %}<tools>{% endif %}<tool_call>{}</tool_call>", HERMES, False),
    ("{% if tools %}<tool_call>{% endif %}{{ content.split('</think>')[-1] }}", HERMES, True),
    ("{{ '[AVAILABLE_TOOLS]' }}{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL, False),
    ("{% if builtin_tools %}{{ '<|python_tag|>' }}{% endif %}{{ tools }}", LLAMA, False),
    ('{{ tools }}Respond in the format {"name": x, "parameters": y}.{{ "<|eot_id|>" }}', LLAMA, False),
    ("{% if tools %}<tool_call>\n<function=f>\n<parameter=x>{% endif %}", QWEN_CODER, False),
    ("{% if tools %}<function=f>{}</function>{% endif %}", None, False),
    ("{% if tools %}<tool_call>f<arg_key>{% endif %}", None, False),
    ("{{ tools }}[TOOL_CALLS]f[ARGS]{}", MISTRAL_NAMED, False),
    ("{{ tools }}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", MISTRAL_IDS, False),
    ("<tool_call>", None, False),
    ("{{ messages }}", None, False),
]  # fmt: skip
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    'g"': {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<think>",
    "</think>",
)


@pytest.mark.parametrize(("template", "calls", "thinks"), TEMPLATES)
def test_a_template_shows_its_dialect(
    template: str, calls: CallSyntax | None, thinks: bool
) -> None:
    assert Dialect.of(template) == Dialect(calls, thinks)


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [("<|im_start|>assistant\n", "maybe"), ("assistant\n<think>\n", "begun"),
     ("<think>\n\n</think>\n\n", "no")],
)  # fmt: skip
def test_the_prompt_says_whether_reasoning_comes(prompt: str, thinking: str) -> None:
    assert Dialect(None, True).thinking(prompt) == thinking
    assert Dialect(None, False).thinking(prompt) == "no"


class MarkTokenizer:
    """A tokenizer of bytes, whose marks may be special tokens."""

    eos_ids = (EOS,)

    def __init__(self, special: bool) -> None:
        self._marks = MARKS if special else ()
        self.n_tokens = EOS + 1 + len(self._marks)

    def token_bytes(self, token: int) -> bytes:
        if token < EOS:
            return bytes([token])
        return self._marks[token - EOS - 1].encode() if token > EOS else b"<eos>"

    def is_special(self, token: int) -> bool:
        return token >= EOS

    def encode(self, text: str, add_bos: bool = True, begins: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((m for m in self._marks if text.startswith(m)), None)
            ids += [EOS + 1 + self._marks.index(mark)] if mark else text[0].encode()
            text = text[len(mark or text[0]) :]
        return ids


@pytest.fixture(params=[False, True], ids=["as text", "as tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return MarkTokenizer(request.param)


def accepts(tokenizer: Any, dialect: Dialect, form: Form, text: str) -> bool:
    grammar = grammar_of(form, dialect, dialect.special_ids(tokenizer))
    matcher = Vocabulary(tokenizer).compile(grammar)
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


WAYS = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 12}}\n</tool_call>',
     '\n<tool_call>\n{"name": "g\\"", "arguments": {}}\n</tool_call>'),
    (LLAMA, '{"name": "f", "parameters": {"x": 12}}', None),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 12}}]',
     '[TOOL_CALLS][{"name": "f", "arguments": {"x": 12}}, {"name": "g\\"", "arguments": {}}]'),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"x": 12}',
     '[TOOL_CALLS]f[ARGS]{"x": 12}[TOOL_CALLS]g"[ARGS]{}'),
    (MISTRAL_IDS, '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"x": 12}',
     '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"x": 12}[TOOL_CALLS]g"[CALL_ID]123456789[ARGS]{}'),
    (QWEN_CODER, '<tool_call>\n<function=f>\n<parameter=x>\n12\n</parameter>\n</function>\n</tool_call>',
     '\n<tool_call>\n<function=g">\n</function>\n</tool_call>'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("syntax", "one", "more"), WAYS, ids=["hermes", "llama", "mistral", "named", "ids", "tagged"]
)
def test_forced_calls_are_what_the_reader_reads(
    tokenizer: Any, syntax: CallSyntax, one: str, more: str | None
) -> None:
    dialect = Dialect(syntax, False)
    two = None if more is None else one + more if syntax.close else more
    single, several = Form(None, TOOLS, False, "no"), Form(None, TOOLS, True, "no")
    assert accepts(tokenizer, dialect, single, one)
    assert accepts(tokenizer, dialect, several, one)
    assert not accepts(tokenizer, dialect, single, "Hello.")
    assert not accepts(tokenizer, dialect, single, one.replace("12", '"12"'))
    assert not accepts(
        tokenizer,
        dialect,
        single,
        one.replace('"f"', '"h"').replace("f[", "h[").replace("=f", "=h"),
    )
    if two is not None:
        assert accepts(tokenizer, dialect, several, two)
        assert not accepts(tokenizer, dialect, single, two)
    reader = ReplyReader(syntax, TOOLS, "no")
    kinds = [(p.kind, p.text) for p in reader.push(two or one) + reader.flush()]
    assert kinds[:2] == [("call", "f"), ("arguments", '{"x": 12}')]
    assert kinds[2:] == ([("call", 'g"'), ("arguments", "{}")] if two else [])


TEXTS: dict[str, tuple[Any, list[str], list[str]]] = {
    "any": ({"type": "string"}, ["", "a\n</p>\n\nb"], []),
    "enum": ({"enum": ["a/b", "c (d)"]}, ["a/b", "c (d)"], ["a", ""]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, ["ab/1"], ["ab1", "ab/12"]),
    "pattern that ends with a sign": (
        {"type": "string", "pattern": r"^[0-9]+\$"},
        ["5$", "5$ or so"],
        ["5", "$"],
    ),
    "loose pattern": ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
    "number": ({"type": "number"}, ["1.5"], ["x"]),
    "reference": ({"$ref": "#/$defs/n"}, ["[1, 2]"], ["1"]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_forced_arguments_in_tags_fit(tokenizer: Any, kind: str) -> None:
    schema, good, bad = TEXTS[kind]
    tool = {
        "type": "object",
        "properties": {"x": schema, "y": {"type": "boolean"}},
        "required": ["x"],
        "$defs": {"n": {"type": "array", "items": {"type": "integer"}}},
    }
    form = Form(None, {"f": tool}, False, "no")

    def call(**arguments: str) -> str:
        told = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function=f>\n{told}</function>\n</tool_call>"

    dialect = Dialect(QWEN_CODER, False)
    for value in good:
        assert accepts(tokenizer, dialect, form, call(x=value)), value
        assert accepts(tokenizer, dialect, form, call(x=value, y="true"))
    for value in bad:
        assert not accepts(tokenizer, dialect, form, call(x=value)), value
    assert not accepts(tokenizer, dialect, form, call())
    assert not accepts(tokenizer, dialect, form, call(x=good[0], y="maybe"))


def test_reasoning_comes_before_what_has_a_form(tokenizer: Any) -> None:
    body, dialect = from_json_schema({"type": "integer"}), Dialect(HERMES, True)
    thought = "I think {\n of 3 </tool_call> "
    if "<tool_call>" in dialect.special_ids(tokenizer):
        thought = "I think {\n of 3 "
    for thinking, good, bad in (
        ("maybe", ["3", f"<think>{thought}</think>\n\n3"], [f"{thought}3", "<think>3"]),
        ("begun", [f"{thought}</think>3"], ["3", f"<think>{thought}3"]),
        ("no", ["3"], ["<think></think>3"]),
    ):
        form = Form(body, {}, True, thinking)  # type: ignore[arg-type]
        for text in good:
            assert accepts(tokenizer, dialect, form, text), (thinking, text)
        for text in bad:
            assert not accepts(tokenizer, dialect, form, text), (thinking, text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (from_choice(["yes"]), "yes"),
        (from_regex("yes"), "yes"),
        (from_json_schema({"const": "yes"}), '"yes"'),
    ],
)
def test_an_answer_with_a_form_may_be_a_call_instead(tokenizer: Any, body: str, text: str) -> None:
    dialect, form = Dialect(HERMES, False), Form(body, TOOLS, True, "no")
    assert accepts(tokenizer, dialect, form, text)
    assert accepts(tokenizer, dialect, form, WAYS[0][1])
    assert not accepts(tokenizer, dialect, form, "no")
