"""POST /v1/chat/completions. The template writes role:content| and the model shouts it back."""

from __future__ import annotations

from typing import Any

import pytest

from cflow.engine.base.errors import TemplateError
from cflow.engine.text.dialect import Dialect
from cflow.engine.text.template import Rendered
from cflow.server.api.schemas import ChatRequest
from harness.fake_engine import BOS, FakeEngine, all_own
from harness.live import Live, error_of, events


def prompt_of(live: Live, messages: list[dict[str, Any]], **fields: Any) -> str:
    """What the model was asked to continue."""
    response = live.chat(messages=messages, **fields)
    assert response.status_code == 200, response.text
    return bytes(live.engine.calls[-1].prompt).decode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_answer(live: Live) -> None:
    body = live.chat(messages=user("hi"), max_tokens=4).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "USER", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len("user:hi|assistant:")


def test_stream_begins_with_the_role_and_ends_with_the_reason(live: Live) -> None:
    chunks = events(live.chat(messages=user("é"), stream=True, max_tokens=8))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert deltas[-1] == {}
    assert "".join(d.get("content", "") for d in deltas) == "USER:é|"[:8]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("n", [1, 3])
def test_stream_and_whole_answer_are_equal(live: Live, n: int) -> None:
    fields: dict[str, Any] = {"messages": user("ü 漢"), "n": n, "seed": 1}
    whole = live.chat(**fields).json()
    chunks = events(live.chat(stream=True, stream_options={"include_usage": True}, **fields))
    texts, reasons = [""] * n, [""] * n
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"] or ""
    assert texts == [c["message"]["content"] for c in whole["choices"]]
    assert reasons == [c["finish_reason"] for c in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_joined_in_order(live: Live, role: str) -> None:
    parts = [{"type": "text", "text": "AAA "}, {"type": "text", "text": "BBB"}]
    plain = prompt_of(live, [{"role": role, "content": "AAA BBB"}])
    assert prompt_of(live, [{"role": role, "content": parts}]) == plain
    shown = "system" if role == "developer" else role
    assert plain == f"{shown}:AAA BBB|assistant:"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "input_text", "text": "x"}], "input_text"),
        ([None], "None"),
        ([{"type": "text"}], "text"),
        (["x"], "None"),
        (5, "5"),
        ({}, "object"),
    ],
)
def test_other_content_is_refused(live: Live, content: Any, named: str) -> None:
    response = live.chat(messages=user(content))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages[0].content"
    assert named in error["message"]


def test_content_beside_tool_calls_may_be_missing(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompts = {
        prompt_of(
            live,
            [
                *user("q"),
                {"role": "assistant", "tool_calls": [call], **content},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ],
        )
        for content in ({"content": None}, {}, {"content": ""})
    }
    assert prompts == {"user:q|assistant:|tool:42|assistant:"}


def test_call_arguments_reach_the_template_as_objects(live: Live) -> None:
    seen: list[dict[str, Any]] = []

    class Template:
        def render(self, messages: list[dict[str, Any]], **_: Any) -> Rendered:
            seen.extend(messages)
            return all_own("x")

    object.__setattr__(live.engine.card, "template", Template())
    function = {"name": "f", "arguments": '{"a": 1}'}
    live.chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}])
    assert seen[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    function["arguments"] = '{"a": '  # as an answer that was cut off has it
    live.chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}])
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"a": '}


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_other_roles_need_content(live: Live, role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        error = error_of(live.chat(messages=[message]))
        assert error["param"] == "messages[0].content"


@pytest.mark.parametrize(
    ("messages", "param"),
    [([], "messages"), ({}, "messages"), (None, "messages"), ("hi", "messages"),
     ([5], "messages[0]"), ([{"content": "x"}], "messages[0].role"),
     ([{"role": "wizard", "content": "x"}], "messages[0].role")],
)  # fmt: skip
def test_bad_messages_are_refused_and_named(live: Live, messages: Any, param: str) -> None:
    response = live.chat(messages=messages)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_empty_content_works(live: Live) -> None:
    assert prompt_of(live, user("")) == "user:|assistant:"


def test_null_is_absent(live: Live) -> None:
    names = [name for name in ChatRequest.model_fields if name != "messages"]
    nulls = live.chat(**dict.fromkeys(names)).json()
    assert nulls["choices"] == live.chat().json()["choices"]


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 3),
        ({}, 64 - len("user:hi|assistant:")),
        ({"max_tokens": 2**40}, 64 - len("user:hi|assistant:")),
    ],
)
def test_how_many_tokens(live: Live, fields: dict[str, int], given: int) -> None:
    assert live.chat(**fields).status_code == 200
    assert live.engine.calls[0].sampling.max_tokens == given


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_conversation(live: Live, stream: bool) -> None:
    response = live.chat(messages=user("seven grey boats " * 9), max_tokens=32, stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"stream_options": {}}, "stream_options"), ({"temperature": 3}, "temperature"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_and_named(live: Live, fields: dict[str, Any], param: str) -> None:
    response = live.chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_harmless_values_of_what_is_not_built(live: Live) -> None:
    fields: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "user": "u", "store": False,
        "metadata": {}, "service_tier": "auto",
    }  # fmt: skip
    response = live.chat(**fields)
    assert response.status_code == 200
    assert "x-cflow-ignored-params" not in response.headers


@pytest.mark.parametrize("n_top", [None, 0, 3, 20])
def test_logprobs(live: Live, n_top: int | None) -> None:
    fields = {"logprobs": True, "top_logprobs": n_top, "max_tokens": 2, "messages": user("é")}
    content = live.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["U", "S"]
    assert content[0]["bytes"] == [ord("U")]
    assert content[0]["logprob"] == -1.0
    assert [len(entry["top_logprobs"]) for entry in content] == [n_top or 0] * 2
    joined: list[Any] = []
    for chunk in events(live.chat(stream=True, **fields)):
        joined += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert joined == content


def test_bos_is_written_once(serve: Any) -> None:
    class Template:
        def render(self, messages: Any, **_: Any) -> Rendered:
            return all_own("<s>x")

    live: Live = serve(FakeEngine(bos_id=BOS, template=Template()))
    live.chat()
    assert live.engine.calls[0].prompt == (BOS, ord("x"))


def test_template_arguments(live: Live) -> None:
    prompt = prompt_of(live, user("q"), chat_template_kwargs={"thinking": True})
    assert "thinking=True|" in prompt


def test_template_that_refuses(serve: Any) -> None:
    class Template:
        def render(self, messages: Any, **_: Any) -> Rendered:
            raise TemplateError("roles must alternate")

    response = serve(FakeEngine(template=Template())).chat()
    assert response.status_code == 400
    assert "alternate" in error_of(response)["message"]


def test_model_without_a_template(serve: Any) -> None:
    error = error_of(serve(FakeEngine(template=None)).chat())
    assert error["code"] == "no_chat_template"
    assert "/v1/completions" in error["message"]


def test_f11_an_empty_list_of_parts_is_empty_content(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for more in ({}, {"tool_calls": [call]}):
        turns = [*user("q"), {"role": "assistant", "content": [], **more}, *user([])]
        assert prompt_of(live, turns) == "user:q|assistant:|user:|assistant:"


class Strict:
    """Takes system messages as `allowed` says: a function of the roles."""

    def __init__(self, allowed: Any) -> None:
        self.allowed = allowed

    def render(self, messages: list[dict[str, Any]], **_: Any) -> Rendered:
        if not self.allowed("".join(m["role"][0] for m in messages)):
            raise TemplateError("the order of roles is not supported")
        return all_own("".join(f"{m['role']}:{m['content']}|" for m in messages))


def alternate(roles: str) -> bool:
    """No system messages; user and assistant in turn."""
    return roles == ("ua" * len(roles))[: len(roles)]


@pytest.mark.parametrize(
    ("allowed", "roles", "expected"),
    [
        (lambda roles: True, "ssusu", "system:0|system:1|user:2|system:3|user:4|"),
        (lambda roles: "ss" not in roles, "ssusu", "system:0\n\n1|user:2|system:3|user:4|"),
        (lambda roles: "s" not in roles[1:], "ssusu", "system:0\n\n1|user:2|user:3\n\n4|"),
        (lambda roles: "s" not in roles[1:], "suas", "system:0|user:1|assistant:2|user:3|"),
        (lambda roles: "s" not in roles, "ssua", "user:0\n\n1\n\n2|assistant:3|"),
        (lambda roles: "s" not in roles, "usu", "user:0|user:1\n\n2|"),
        (alternate, "uaus", "user:0|assistant:1|user:2\n\n3|"),
    ],
)
def test_f13_system_messages_go_where_the_template_takes_them(
    serve: Any, allowed: Any, roles: str, expected: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    turns = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    live: Live = serve(FakeEngine(template=Strict(allowed)))
    assert prompt_of(live, turns) == expected


def test_f13_instructions_and_a_developer_item_are_one_system_message(serve: Any) -> None:
    live: Live = serve(FakeEngine(template=Strict(lambda roles: "s" not in roles[1:])))
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    live.post("/v1/responses", instructions="a", input=items)
    assert bytes(live.engine.calls[-1].prompt) == b"system:a\n\nb|user:c|"


def test_f13_a_refusal_names_the_messages(serve: Any) -> None:
    live: Live = serve(FakeEngine(template=Strict(lambda roles: False)))
    error = error_of(live.chat(messages=user("q")))
    assert (error["code"], error["param"]) == ("template_error", "messages")
    assert error_of(live.post("/v1/responses", input="q"))["param"] == "input"


@pytest.mark.parametrize(
    ("roles", "param"),
    [
        ("uauaa", "messages[4]"),
        ("uuaua", "messages[1]"),
        ("susaaua", "messages[4]"),
        ("au", "messages"),
    ],
)
def test_f13_a_refusal_names_the_message(serve: Any, roles: str, param: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    turns = [{"role": names[role], "content": "q"} for role in roles]
    error = error_of(serve(FakeEngine(template=Strict(alternate))).chat(messages=turns))
    assert (error["code"], error["param"]) == ("template_error", param)
    assert error["message"].startswith(f"{param}: ")


def test_f13_a_conversation_beyond_the_limits_is_rendered_once(serve: Any) -> None:
    class Slow:
        n_calls = 0

        def render(self, messages: Any, **_: Any) -> Rendered:
            self.n_calls += 1
            raise TemplateError("rendering took too long", is_limit=True)

    slow = Slow()
    turns = [{"role": "system", "content": "s"}, {"role": "system", "content": "s"}, *user("q")]
    error = error_of(serve(FakeEngine(template=slow)).chat(messages=turns))
    assert (error["code"], error["param"], slow.n_calls) == ("template_error", "messages", 1)


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{% if enable_thinking %}", "none", {"enable_thinking": False}),
        ("{% if enable_thinking %}", "low", {"enable_thinking": True}),
        ("{{ 'x' if thinking }}", "none", {"thinking": False}),
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        (
            "{{ reasoning_effort if enable_thinking }}",
            "none",
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ("{{ message.thinking }} thinking {{ 'thinking' }}", "none", None),
    ],
)
def test_f14_effort_reaches_the_template(
    serve: Any, template: str, effort: str, expected: dict[str, Any] | None
) -> None:
    live: Live = serve(FakeEngine(dialect=Dialect.of(template)))
    shown = "".join(f"{key}={value}|" for key, value in (expected or {}).items())
    for path, fields in (
        ("/v1/chat/completions", {"messages": user("q"), "reasoning_effort": effort}),
        ("/v1/responses", {"input": "q", "reasoning": {"effort": effort}}),
    ):
        response = live.post(path, **fields)
        assert bytes(live.engine.calls[-1].prompt).decode() == f"user:q|{shown}assistant:"
        ignored = response.headers.get("x-cflow-ignored-params")
        assert ignored == (None if expected else list(fields)[-1])


def test_f14_the_template_s_own_arguments_win(serve: Any) -> None:
    live: Live = serve(FakeEngine(dialect=Dialect.of("{% if enable_thinking %}")))
    given = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert "enable_thinking=True|" in prompt_of(live, user("q"), **given)


def test_f14_an_unknown_effort_is_refused(live: Live) -> None:
    error = error_of(live.chat(messages=user("q"), reasoning_effort="lots"))
    assert error["param"] == "reasoning_effort"
    error = error_of(live.post("/v1/responses", input="q", reasoning={"effort": "lots"}))
    assert error["param"] == "reasoning.effort"


def test_f27_content_comes_with_the_first_text(live: Live) -> None:
    chunks = events(live.chat(messages=user("q"), stream=True, max_tokens=2))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert all(delta["content"] for delta in deltas[1:-1])
