"""How a model writes tool calls and reasoning, as its chat template shows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jinja2

from cflow.engine.text import tagged_call
from cflow.engine.text.grammar import combine, from_json_schema
from cflow.engine.text.tokenizer import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
# Variables by which templates switch reasoning: its effort, and whether there is any.
SWITCHES = ("reasoning_effort", "enable_thinking", "thinking")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')  # a text in Lark

# Whether an answer starts with reasoning. maybe: if the model writes THINK; begun: the prompt ends
# with THINK; within: the prompt ends in the middle of the reasoning.
Thinking = Literal["no", "maybe", "begun", "within"]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls.

    The first of these fields that is set gives the form of a call:

        tags         what tagged_call.py describes
        id_mark      NAME id_mark ID infix ARGUMENTS
        infix        NAME infix ARGUMENTS
        key          {name_key: NAME, key: ARGUMENTS}

    single, several: an answer of one call, and one where more are allowed, in Lark over the rules
    open, close, infix and call.
    between: further texts that stand around calls.
    id_length: characters of a call's id. is_numbered: what stands between id_mark and infix is the
    number of the call.
    """

    key: str
    open: str
    close: str = ""
    infix: str = ""
    id_mark: str = ""
    filling: str = ""  # characters allowed between calls, besides white space
    tags: tagged_call.Tags | None = None
    is_bare: bool = False  # at the start of an answer, a call needs no `open`
    single: str = "call"
    several: str = "call"
    id_length: int = 24
    name_key: str = "name"
    between: tuple[str, ...] = ()
    is_numbered: bool = False

    def texts(self) -> tuple[str, ...]:
        """All texts in which a special token may stand."""
        tags = self.tags.texts() if self.tags is not None else ()
        texts = (self.open, self.close, self.infix, self.id_mark, *self.between, *tags)
        literals = tuple(json.loads(text) for text in _QUOTED.findall(self.several))
        return tuple(filter(None, (*texts, *literals)))


HERMES = CallSyntax(
    "arguments",
    "<tool_call>",
    "</tool_call>",
    single=r'open "\n" call "\n" close',
    several=r'open "\n" call "\n" close ("\n" open "\n" call "\n" close)*',
)
QWEN_CODER = replace(HERMES, key="", tags=tagged_call.QWEN)
LLAMA = CallSyntax("parameters", "<|python_tag|>", filling=";", is_bare=True)
MISTRAL = CallSyntax(
    "arguments",
    "[TOOL_CALLS]",
    filling="[,]",
    single='open "[" call "]"',
    several='open "[" call (", " call)* "]"',
    id_length=9,  # the only length that its templates accept
)
MISTRAL_NAMED = CallSyntax(
    "",
    "[TOOL_CALLS]",
    infix="[ARGS]",
    single="open call",
    several="(open call)+",
    id_length=9,
)
MISTRAL_IDS = replace(MISTRAL_NAMED, id_mark="[CALL_ID]")
OTHER = "<arg_key>"  # shows a syntax that is not supported


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model writes besides content.

    calls: None if the template takes no tools, or has its calls in a syntax that is not supported.
    switches: which of SWITCHES the template reads.
    """

    calls: CallSyntax | None = None
    thinks: bool = False
    switches: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str) -> Dialect:
        return cls(_syntax(template), THOUGHT in template, _variables(template) & {*SWITCHES})

    def effort(self, effort: str | None) -> dict[str, Any]:
        """The template's variables for a reasoning effort; "none" means not to think."""
        if effort is None:
            return {}
        values = {"reasoning_effort": effort} | dict.fromkeys(SWITCHES[1:], effort != "none")
        return {name: values[name] for name in SWITCHES if name in self.switches}

    def thinking(self, prompt: str, begun: str = "") -> Thinking:
        """Whether an answer to this prompt starts with reasoning.

        prompt: the rendered conversation. begun: the start of the answer, if the prompt ends with it.
        """
        end, begun = prompt.rstrip(), begun.strip()
        if begun.startswith(THINK) and THOUGHT not in begun:
            return "within" if self.thinks else "no"
        if not self.thinks or begun or end.endswith(THOUGHT):
            return "no"
        return "begun" if end.endswith(THINK) else "maybe"

    def special_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The ids of those marks that are special tokens of this model."""
        texts = [THINK, THOUGHT] if self.thinks else []
        texts += self.calls.texts() if self.calls is not None else ()
        ids = {id for text in texts for id in tokenizer.encode(text, add_bos=False)}
        marks = {tokenizer.token_bytes(id): id for id in ids if tokenizer.is_special(id)}
        return {mark.decode(errors="replace"): id for mark, id in sorted(marks.items())}


def _variables(template: str) -> frozenset[str]:
    """The names that a template reads or sets, attributes left out; none if it is not a template."""
    try:
        tokens = [t for t in jinja2.Environment().lex(template) if t[1] != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return frozenset()
    before = [(0, "", ""), *tokens]
    return frozenset(
        text
        for (_, kind, text), (_, _, last) in zip(tokens, before, strict=False)
        if kind == "name" and last != "."
    )


def _syntax(template: str) -> CallSyntax | None:
    if "tools" not in template or OTHER in template:
        return None
    if tagged_call.FUNCTION in template:
        is_known = HERMES.open in template and tagged_call.PARAMETER in template
        return QWEN_CODER if is_known else None
    if HERMES.open in template:
        return HERMES
    if MISTRAL.open in template:
        if MISTRAL_NAMED.infix not in template:
            return MISTRAL
        return MISTRAL_IDS if MISTRAL_IDS.id_mark in template else MISTRAL_NAMED
    is_llama = LLAMA.open in template or ("<|eot_id|>" in template and '"parameters"' in template)
    return LLAMA if is_llama else None


# ---- grammars of answers ----


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like.

    body: grammar of an answer that is not a call, None if a call is required. tools: schemas of the
    arguments of the tools that may be called, by name. is_parallel: more than one call is allowed.
    """

    body: str | None
    tools: Mapping[str, Any]
    is_parallel: bool
    thinking: Thinking


def grammar_of(form: Form, dialect: Dialect, special: Mapping[str, int]) -> str:
    """A grammar: reasoning if the model writes any, then calls or the body."""
    parts: dict[str, str] = {}
    ways, rules = [], []
    if form.body is not None:
        parts["body"] = form.body
        ways.append("@body")
    if form.tools and (syntax := dialect.calls) is not None:
        way = syntax.several if form.is_parallel else syntax.single
        ways.append(_QUOTED.sub(lambda text: _mark(json.loads(text[0]), special), way))
        calls = []
        for i, (name, schema) in enumerate(form.tools.items()):
            if syntax.tags is not None:
                spell = partial(_mark, special=special)
                call, more = tagged_call.rules_of(
                    f"tool_{i}", name, schema, parts, syntax.tags, spell
                )
                rules += more
            else:
                parts[f"tool_{i}"] = from_json_schema(schema)
                call = _call(syntax, name, f"@tool_{i}")
            calls.append(call)
        rules.append("call: " + "\n  | ".join(calls))
        for rule in ("open", "close", "infix"):
            rules.append(f"{rule}: {_mark(getattr(syntax, rule), special)}")
        if syntax.id_mark:
            id = "[0-9]+" if syntax.is_numbered else f"[a-zA-Z0-9]{{{syntax.id_length}}}"
            rules.append(f"id: {_mark(syntax.id_mark, special)} /{id}/")
    if form.body is not None and not form.tools and form.thinking == "no":
        return form.body
    start = _before(form.thinking) + "(" + " | ".join(ways) + ")"
    if form.thinking != "no":
        rules += [f"think: {_mark(THINK, special)}", *_thought(special)]
    return combine("\n".join(["start: " + start, *rules]), parts)


def _call(syntax: CallSyntax, name: str, arguments: str) -> str:
    if syntax.infix:
        return f"{_quote(name)} {'id ' if syntax.id_mark else ''}infix {arguments}"
    head = f'{{"{syntax.name_key}": {json.dumps(name)}, "{syntax.key}": '
    return f'{_quote(head)} {arguments} "}}"'


def _before(thinking: Thinking) -> str:
    if thinking == "no":
        return ""
    return r"(think thought /\s*/)? " if thinking == "maybe" else r"thought /\s*/ "


def _thought(special: Mapping[str, int]) -> list[str]:
    if THOUGHT in special:
        return [rf"thought: /(.|\n)*/ {_mark(THOUGHT, special)}"]
    return [r"thought[lazy]: /(.|\n)*<\/think>/"]


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, with special tokens by their ids."""
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    told = [f"<[{special[p]}]>" if p in special else _quote(p) for p in pieces if p]
    return " ".join(told) or _quote("")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
