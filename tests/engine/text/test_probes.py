"""Syntaxes of calls, derived from llama.cpp's 70 templates: what a template renders is read and forced."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base.errors import TemplateError
from cflow.engine.text.dialect import Dialect, Form, grammar_of
from cflow.engine.text.grammar import Vocabulary
from cflow.engine.text.probes import derive, dialect_of
from cflow.engine.text.renderer import Renderer
from cflow.engine.text.reply import ReplyReader
from cflow.engine.text.template import ChatTemplate
from engine.text.test_dialect import MarkTokenizer
from oracles import llama_cpp

# Templates that write calls which no derived syntax expresses, or refuse all probes.
NOT_DERIVED = set(
    [
        "Cohere2MoE",
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "GigaChat3-10B-A1.8B",
        "HuggingFaceTB-SmolLM3-3B",
        "Kimi-K2-Instruct",
        "Kimi-K2-Thinking",
        "Kimi-K3",
        "LFM2-8B-A1B",
        "LFM2.5-8B-A1B",
        "LFM2.5-Instruct",
        "MiniMax-M3",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "fireworks-ai-llama-3-firefunction-v2",
        "google-gemma-2-2b-it",
        "google-gemma-4-31B-it",
        "google-gemma-4-31B-it-interleaved",
        "ibm-granite-granite-3.3-2B-Instruct",
        "llama-cpp-deepseek-r1",
        "llama-cpp-rwkv-world",
        "meetkai-functionary-medium-v3.2",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "microsoft-Phi-3.5-mini-instruct",
        "muse-glimmer",
        "openai-gpt-oss-120b",
        "upstage-Solar-Open-100B",
    ]
)
IDS = re.compile(r', "id": "\w+"|"tool_call_id": "\w+", ')
CALLS = [
    ("get_weather", {"city": "Sao [x] {y} 'z'", "days": 3}),
    ("find-it", {"what": "a b", "n": -1}),
]
SCHEMAS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {
            key: {"type": "integer" if isinstance(value, int) else "string", "description": "d"}
            for key, value in arguments.items()
        },
        "required": [*arguments],
    }
    for name, arguments in CALLS
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


class Here:
    """A renderer without its process, as 70 of these take long to start."""

    def __init__(self, source: str) -> None:
        self.run = Renderer(source.encode()).answer

    def close(self) -> None: ...


def template_of(source: str) -> ChatTemplate:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template._jail = Here(source)  # type: ignore[assignment]
    return template


def turns(template: ChatTemplate, id_length: int) -> Iterator[tuple[str, int]]:
    """The part of prompts with an assistant's calls, and how many calls it has."""
    for content in ("", "I look."):
        for n in (2, 1):
            calls = [
                {"type": "function", "id": "a" * (id_length - 1) + str(i),
                 "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(CALLS[:n])
            ]  # fmt: skip
            answer = {"role": "assistant", "content": content, "tool_calls": calls}
            try:
                text = template.render(
                    [{"role": "user", "content": "QUESTION"}, answer], TOOLS, False
                ).text
            except TemplateError:
                continue
            text = text[text.rfind("QUESTION") :]
            yield text, sum(name in text for name, _ in CALLS)


def calls_in(pieces: list[str], dialect: Dialect) -> list[tuple[str, Any]]:
    reader = ReplyReader(dialect.calls, SCHEMAS, "no")
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
    names = [part.text for part in parts if part.kind == "call"]
    given = [
        "".join(p.text for p in parts if p.kind == "arguments" and p.call == i)
        for i in range(len(names))
    ]
    return [(name, json.loads(text)) for name, text in zip(names, given, strict=True)]


@pytest.mark.parametrize("path", llama_cpp.templates(), ids=lambda path: path.stem)
def test_what_a_template_renders_is_read_and_forced(path: Path) -> None:
    template = template_of(path.read_text())
    syntax = derive(template)
    assert (syntax is None) == (path.stem in NOT_DERIVED)
    if syntax is None:
        return
    dialect = dialect_of(template)
    assert dialect.calls is not None
    n_most = 0
    for text, n_calls in turns(template, dialect.calls.id_length):
        answer = text[max(text.find(dialect.calls.open), 0) :]
        if n_calls == 0 or n_calls < n_most:
            continue
        n_most = n_calls
        for cut in range(len(answer)):
            assert calls_in([answer[:cut], answer[cut:]], dialect) == CALLS[:n_calls]
        assert calls_in([*answer], dialect) == CALLS[:n_calls]
        for both in (False, True):
            tokenizer: Any = MarkTokenizer(both)
            form = Form(None, SCHEMAS, n_calls > 1, "no")
            grammar = grammar_of(form, Dialect(syntax), Dialect(syntax).special_ids(tokenizer))
            matcher = Vocabulary(tokenizer).compile(grammar)
            ids = tokenizer.encode(IDS.sub("", answer))  # forced objects have no ids
            n = 0
            for i, id in enumerate(ids, 1):
                if not matcher.try_consume_tokens([id]):
                    break
                n = i if matcher.is_accepting() else n
            forced = b"".join(map(tokenizer.token_bytes, ids[:n])).decode()
            assert calls_in([forced], Dialect(syntax)) == CALLS[:n_calls]
    assert n_most


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.tool_calls[0].function.name * 99999 }}{% endfor %}",
        "{{ messages[1].tool_calls }}",
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ '{' * 400 }}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}",
        "{% if",
        "{{ raise_exception('no') }}",
        "{{ messages[1].tool_calls[0].function.name ~ 'zaz' ~ '{' * 5000 }}",
    ],
)
def test_a_hostile_template_has_no_syntax(source: str) -> None:
    assert derive(template_of(source)) is None
