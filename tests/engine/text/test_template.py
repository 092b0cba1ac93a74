"""Chat templates: equal to transformers, tolerant of clients, and harmless."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import TemplateError
from cflow.engine.client.card import read_card
from cflow.engine.text.template import ChatTemplate
from oracles.real_models import RealModel

Message = dict[str, Any]

CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": "é<b>"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "a\n<b>&\"'"},
        {"role": "assistant", "content": "😸 {{ not code }}"},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "43"},
    ],
}
LOOP = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes templates whose processes end with the test."""
    made: list[ChatTemplate] = []

    def new(source: str, **special_tokens: str) -> ChatTemplate:
        made.append(ChatTemplate(source, special_tokens))
        return made[-1]

    yield new
    for template in made:
        template.close()


def oracle(source: str, messages: list[Message], **variables: Any) -> str:
    rendered = render_jinja_template([messages], chat_template=source, **variables)
    return str(rendered[0][0])


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_templates_render_as_in_transformers(name: str) -> None:
    card = read_card(EngineConfig(model=str(RealModel.fetch(name).cflow)))
    template, source = card.template, card.metadata["chat_template"]
    assert template is not None
    try:
        for messages in CONVERSATIONS.values():
            for tools in (None, [TOOL]):
                for prompt in (True, False):
                    expected = oracle(source, messages, tools=tools, add_generation_prompt=prompt)
                    assert template.render(messages, tools, prompt).text == expected
    finally:
        template.close()


FEATURES = [
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "  {% if true %}\n  kept\n  {% endif %}\n{%- if true -%} x {%- endif %}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0]['content'] | trim) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[0].content.split('i')[0] }}{{ bos_token }}{{ missing }}{{ tools is none }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_what_templates_use_works_as_in_transformers(make: Any, source: str) -> None:
    messages = CONVERSATIONS["turns"]
    expected = oracle(source, messages, bos_token="<s>", add_generation_prompt=True)
    assert make(source, bos_token="<s>").render(messages).text == expected


def test_the_date_is_there(make: Any) -> None:
    assert make("{{ strftime_now('%Y') }}").render(USER).text == time.strftime("%Y")


def test_variables_of_the_request_reach_the_template(make: Any) -> None:
    assert make("{{ enable_thinking }}").render(USER, enable_thinking=False).text == "False"


# ---- what clients send ----

NULL_CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_missing_content_is_empty(make: Any, content: Message) -> None:
    message = {"role": "assistant", **content, "tool_calls": [NULL_CALL]}
    assert make(LOOP).render([message]).text == "[assistant:]"


def test_a_developer_is_the_system(make: Any) -> None:
    assert make(LOOP).render([{"role": "developer", "content": "x"}]).text == "[system:x]"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": ', '{"arguments": "{\\"a\\": "}'),
        ("7", '{"arguments": 7}'),
        ("null", "{}"),
        ("", "{}"),
        ('{"a": 100000000000000000000000}', '{"a": 100000000000000000000000}'),  # beyond 64 bits
        ("[" * 99999, None),
    ],
)
def test_f12_call_arguments_are_objects(make: Any, arguments: str, shown: str | None) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    template = make("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    text = template.render([{"role": "assistant", "tool_calls": [call]}]).text
    assert text == (shown or f'{{"arguments": "{arguments}"}}')


def test_what_the_template_refuses_is_said(make: Any) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        make("{{ raise_exception('roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% for %}", "line 2"),
        ("{{ messages.x.y }}", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_broken_template_fails_every_time_and_says_why(
    make: Any, source: str, message: str
) -> None:
    template = make(source)
    for _ in range(2):
        with pytest.raises(TemplateError, match=message):
            template.render(USER)


@pytest.mark.parametrize("content", ["\ud800", object()], ids=["surrogate", "object"])
def test_content_that_is_no_json_is_refused(make: Any, content: Any) -> None:
    template = make(LOOP)
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": content}])
    assert template.render(USER).text == "[user:hi]"


# ---- what hostile files hold ----

CODE = [
    "{{ lipsum.__globals__['os'].popen('touch PWNED').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}",
    "{{ (''|attr('__class__')).x }}",
    "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__.x}'.format(1) }}",
    "{% include '/etc/passwd' %}",
]
LOADS = [
    "{% for i in range(999999999) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa' | wordwrap(1) | replace('a', 'a' * 10**8) }}",
]


@pytest.mark.parametrize("source", CODE)
def test_a_template_cannot_run_code(
    make: Any, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TemplateError):
        make(source).render(USER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", LOADS, ids=range(len(LOADS)))
def test_a_template_cannot_take_all_time_or_memory(make: Any, source: str) -> None:
    template = make(source)
    with pytest.raises(TemplateError):
        template.render(USER)


def children() -> set[int]:
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def test_a_process_killed_between_two_jobs_is_started_again(make: Any) -> None:
    before = children()
    template = make(LOOP)
    assert template.render(USER).text == "[user:hi]"
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(USER).text == "[user:hi]"


def test_a_template_that_lost_its_process_works_again(make: Any) -> None:
    source = "{% if burn %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    template = make(source + "{% endfor %}{% endif %}done")
    assert template.render(USER).text == "done"
    with pytest.raises(TemplateError, match="more than"):
        template.render(USER, burn=True)
    assert template.render(USER).text == "done"
