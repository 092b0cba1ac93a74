"""Tools, reasoning and continued messages in /v1/chat/completions, over recorded answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cflow.engine.text.dialect import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_CODER, Dialect
from cflow.engine.text.grammar import Vocabulary
from cflow.engine.text.template import Rendered
from harness.fake_engine import EOS, ByteTokenizer, FakeEngine, all_own
from harness.live import Live, error_of, events
from harness.scripts import CALL, CALL_2, Template, say

Serve = Callable[..., Live]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
VOCABULARY = Vocabulary(ByteTokenizer())  # type: ignore[arg-type]


@pytest.fixture
def tell(serve: Serve) -> Callable[..., Live]:
    """tell(text, ...): a server whose model says that."""

    def start(
        *texts: str, dialect: Dialect | None = None, reason: str = "stop", end: str = ""
    ) -> Live:
        return serve(
            FakeEngine(
                script=say(*texts, reason=reason),
                dialect=dialect or Dialect(HERMES, False),
                template=Template(end),
            )
        )  # fmt: skip

    return start


def whole(live: Live, **fields: Any) -> dict[str, Any]:
    response = live.chat(**fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def joined(live: Live, **fields: Any) -> dict[str, Any]:
    """What a client makes of the stream: the choice as a whole answer has it."""
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in events(live.chat(stream=True, **fields)):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = (
                message.get("reasoning_content", "") + delta["reasoning_content"]
            )
        for piece in delta.get("tool_calls", []):
            index = piece.pop("index")
            if index == len(calls):
                assert set(piece) == {"id", "type", "function"}
                calls.append(piece)
            else:
                assert index == len(calls) - 1
                assert set(piece) == {"function"}
                assert set(piece["function"]) == {"arguments"}
                calls[index]["function"]["arguments"] += piece["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {"message": message, "finish_reason": reason}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    if "tool_calls" in message:
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == len(ids)
        message["tool_calls"] = [
            {k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]
        ]
    return {"message": message, "finish_reason": choice["finish_reason"]}


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TAGGED = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n"
    "</tool_call>"
)
WEATHER_CALL = called("get_weather", '{"city": "Zürich"}')


@pytest.mark.parametrize(
    ("text", "dialect", "content", "calls"),
    [
        (CALL, Dialect(HERMES), None, [WEATHER_CALL]),
        ("I look.\n" + CALL + "\n" + CALL_2, Dialect(HERMES), "I look.",
         [WEATHER_CALL, called("clock", "{}")]),
        ('{"name": "get_weather", "parameters": {"city": "Zürich"}}', Dialect(LLAMA), None,
         [WEATHER_CALL]),
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}}]', Dialect(MISTRAL),
         None, [WEATHER_CALL]),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}', Dialect(MISTRAL_NAMED), None, [WEATHER_CALL]),
        (TAGGED, Dialect(QWEN_CODER), None, [WEATHER_CALL]),
        ("It is cold in Zürich.", Dialect(HERMES), "It is cold in Zürich.", []),
        (CALL.replace("get_weather", "get_wether"), Dialect(HERMES),
         CALL.replace("get_weather", "get_wether"), []),
    ],
)  # fmt: skip
def test_calls_whole_and_streamed(
    tell: Any, text: str, dialect: Dialect, content: str | None, calls: list[dict[str, Any]]
) -> None:
    live = tell(text, dialect=dialect)
    message = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls  # type: ignore[assignment]
    expected = {"message": message, "finish_reason": "tool_calls" if calls else "stop"}
    fields = {"tools": [WEATHER, CLOCK]}
    assert without_ids(whole(live, **fields)) == expected
    assert without_ids(joined(live, **fields)) == expected


def test_ids_are_what_the_template_takes(tell: Any) -> None:
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    mistral = whole(tell(text, dialect=Dialect(MISTRAL)), tools=[CLOCK])
    assert re.fullmatch("[a-zA-Z0-9]{9}", mistral["message"]["tool_calls"][0]["id"])
    hermes = whole(tell(CALL_2), tools=[CLOCK])
    assert re.fullmatch("call_[a-zA-Z0-9]{24}", hermes["message"]["tool_calls"][0]["id"])


def test_one_call_where_several_are_not_wanted(tell: Any) -> None:
    live = tell(CALL + "\n" + CALL_2)
    choice = whole(live, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]


def test_a_call_that_breaks_or_is_cut_stays_one(tell: Any) -> None:
    """A stream has sent it before it broke, and a whole answer is what its stream is."""
    broken = '<tool_call>{"name": "clock", "arguments": {x}}</tool_call>'
    message = {"role": "assistant", "content": None, "refusal": None}
    message["tool_calls"] = [called("clock", "{x}")]  # type: ignore[assignment]
    live, expected = tell(broken), {"message": message, "finish_reason": "tool_calls"}
    assert without_ids(whole(live, tools=[CLOCK])) == expected
    assert without_ids(joined(live, tools=[CLOCK])) == expected
    cut = whole(tell(CALL[:60], reason="length"), tools=[WEATHER])
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == CALL[CALL.index('{"c') : 60]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("dialect", [HERMES, QWEN_CODER])
def test_f18_a_cut_answer_has_no_marks(tell: Any, choice: str, dialect: Any) -> None:
    text = CALL + "\n" + CALL_2 if dialect is HERMES else TAGGED
    live = tell("", dialect=Dialect(dialect))
    for end in range(1, len(text)):
        live.engine.script = say(text[:end], reason="length")
        answer = without_ids(whole(live, tools=[WEATHER, CLOCK], tool_choice=choice))
        assert answer["finish_reason"] == "length"
        calls = answer["message"].get("tool_calls", [])
        is_begun = choice == "auto" and text[:end] == "<"
        assert answer["message"]["content"] == ("<" if is_begun else None if calls else "")
        if end % 5 == 0:
            assert without_ids(joined(live, tools=[WEATHER, CLOCK], tool_choice=choice)) == answer


def test_the_template_gets_the_tools_and_their_turns(tell: Any) -> None:
    live = tell("ok")
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]  # fmt: skip
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    whole(live, messages=turns, tools=[strict, CLOCK])
    seen = live.engine.card.template.seen
    assert seen["tools"] == [WEATHER, CLOCK]
    assert seen["messages"][1]["reasoning_content"] == "hm"
    assert seen["messages"][1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {}}
    assert seen["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    whole(live, tools=[WEATHER], tool_choice="none")
    assert live.engine.card.template.seen["tools"] is None


def accepts(live: Live, text: str) -> bool:
    """Whether the grammar the engine got takes the whole text."""
    grammar = live.engine.calls[-1].sampling.grammar
    assert grammar is not None
    matcher, raw = VOCABULARY.compile(grammar), list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


def test_required_and_named_calls_are_forced(tell: Any) -> None:
    live = tell(CALL)
    tools = [WEATHER, CLOCK]
    whole(live, tools=tools)
    assert live.engine.calls[-1].sampling.grammar is None
    whole(live, tools=tools, tool_choice="required")
    assert accepts(live, CALL)
    assert accepts(live, CALL + "\n" + CALL_2)
    assert not accepts(live, "No.")
    assert not accepts(live, CALL.replace('"Zürich"', "8"))
    named = {"type": "function", "function": {"name": "clock"}}
    whole(live, tools=tools, tool_choice=named)
    assert accepts(live, CALL_2)
    assert not accepts(live, CALL)
    assert not accepts(live, CALL_2 + "\n" + CALL_2)
    whole(live, tools=tools, response_format={"type": "json_object"})
    assert accepts(live, CALL)
    assert accepts(live, "{}")
    assert not accepts(live, "No.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {
            "properties": {"x": {"type": "wizard"}}}}}], "tool_choice": "required"}, "tools"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_and_named(tell: Any, fields: dict[str, Any], param: str) -> None:
    response = tell("x").chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_a_model_without_tools_says_so(live: Live) -> None:
    error = error_of(live.chat(tools=[CLOCK]))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")


THINKS = Dialect(HERMES, True)


@pytest.mark.parametrize(
    ("text", "end", "reasoning", "content", "n"),
    [
        ("<think>\nHm.\n</think>\n\nTwo.", "", "Hm.", "Two.", len("<think>\nHm.\n</think>")),
        ("Hm.</think>Two.", "<think>\n", "Hm.", "Two.", len("Hm.</think>")),
        ("Two.", "<think>\n\n</think>\n\n", None, "Two.", 0),
        ("Two <think>.", "", None, "Two <think>.", 0),
    ],
)
def test_reasoning_is_told_apart(
    tell: Any, text: str, end: str, reasoning: str | None, content: str, n: int
) -> None:
    live = tell(text, dialect=THINKS, end=end)
    message = {"role": "assistant", "content": content, "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    expected = {"message": message, "finish_reason": "stop"}
    assert without_ids(whole(live)) == expected
    assert without_ids(joined(live)) == expected
    usage = live.chat().json()["usage"]
    begun = len("<think>") - 1 if text.startswith("<think>\n") else 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == max(n - begun, 0)


def test_a_form_comes_after_the_reasoning(tell: Any) -> None:
    live = tell("{}", dialect=THINKS)
    whole(live, response_format={"type": "json_object"})
    assert accepts(live, "<think>\nHm {.</think>\n\n{}")
    assert accepts(live, "{}")
    assert not accepts(live, "Hm {}")


def test_every_choice_is_read_by_itself(tell: Any) -> None:
    live = tell(CALL, "No call.", CALL_2)
    choices = live.chat(tools=[WEATHER, CLOCK], n=3).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[1]["message"]["content"] == "No call."


def test_every_token_has_its_log_probability(tell: Any) -> None:
    """Those of calls too, which give no content."""
    live = tell("Hm. " + CALL)
    fields = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    choice = whole(live, **fields)
    expected = [*("Hm. " + CALL).encode(), EOS]
    assert choice["token_ids"] == expected
    assert len(choice["logprobs"]["content"]) == len(expected)
    logprobs, ids = [], []
    for chunk in events(live.chat(stream=True, **fields)):
        logprobs += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ids += chunk["choices"][0].get("token_ids", [])
    assert ids == expected
    assert logprobs == choice["logprobs"]["content"]


def test_a_message_is_continued_where_it_ends(tell: Any) -> None:
    live = tell("x")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is "}]

    def prompt(**fields: Any) -> str:
        whole(live, messages=turns, **fields)
        return bytes(live.engine.calls[-1].prompt).decode()

    assert prompt(continue_final_message=True) == "user:q|assistant:It is "
    assert prompt(add_generation_prompt=False) == "user:q|assistant:It is |end"
    assert prompt() == "user:q|assistant:It is |"


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        ("<think>\nLet me", " see.</think>Two.", " see.", "Two."),
        ("<think>\nLet me", " see", " see", ""),
        ("<think>Hm.</think>\n\nIt", " is <think>.", None, " is <think>."),
        ("It", " is", None, " is"),
        ("", "<think>Hm.</think>Two.", "Hm.", "Two."),
    ],
)
def test_reasoning_goes_on_where_the_message_ends(
    tell: Any, begun: str, text: str, reasoning: str | None, content: str
) -> None:
    live = tell(text, dialect=THINKS, reason="length")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": begun}]
    fields = {"messages": turns, "continue_final_message": True}
    message = {"role": "assistant", "content": content, "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    for choice in (whole(live, **fields), joined(live, **fields)):
        assert without_ids(choice)["message"] == message


def test_a_turn_that_ends_with_calls_cannot_go_on(tell: Any) -> None:
    calls = [{"id": "1", "function": {"name": "clock", "arguments": "{}"}}]
    turns = [{"role": "assistant", "content": "Hm.", "tool_calls": calls}]
    response = tell("x").chat(messages=turns, continue_final_message=True)
    assert response.status_code == 400
    assert error_of(response)["param"] == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_go_on(serve: Serve) -> None:
    class Silent:
        def render(self, messages: Any, **_: Any) -> Rendered:
            return all_own("x")

    response = serve(FakeEngine(template=Silent())).chat(continue_final_message=True)
    assert error_of(response)["param"] == "continue_final_message"


def test_arguments_are_streamed_in_pieces(tell: Any) -> None:
    live = tell(CALL)
    pieces = [
        call["function"]["arguments"]
        for chunk in events(live.chat(stream=True, tools=[WEATHER]))
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert pieces[0] == ""
    assert len(pieces) > 10
    assert json.loads("".join(pieces)) == {"city": "Zürich"}


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [("mcp__a/b.c:d-e", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
def test_f15_names_of_tools(tell: Any, name: str, is_taken: bool) -> None:
    live = tell(CALL.replace("get_weather", name))
    tool = {
        "type": "function",
        "function": {"name": name, "parameters": WEATHER["function"]["parameters"]},
    }
    response = live.chat(tools=[tool])
    if is_taken:
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name
    else:
        assert error_of(response)["param"] == "tools[0].function.name"


def test_f16_the_template_for_tools_renders_requests_with_tools(serve: Serve) -> None:
    class Other:
        def render(self, messages: Any, **_: Any) -> Rendered:
            return all_own("other")

    engine = FakeEngine()
    other = replace(engine.card, template=Other(), dialect=Dialect(calls=HERMES))  # type: ignore[arg-type]
    engine.card = replace(engine.card, tool_card=other)
    live = serve(engine)
    live.chat()
    assert bytes(engine.calls[-1].prompt) == b"user:hi|assistant:"
    assert live.chat(tools=[WEATHER]).status_code == 200
    assert bytes(engine.calls[-1].prompt) == b"other"


def test_f14_the_template_for_tools_decides_whether_effort_has_an_effect(serve: Serve) -> None:
    engine = FakeEngine()
    other = replace(engine.card, dialect=Dialect(HERMES, switches=frozenset({"enable_thinking"})))
    engine.card = replace(engine.card, tool_card=other)
    live = serve(engine)
    for path, given, name in (
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "none"},
            "reasoning_effort",
        ),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}}, "reasoning"),
    ):
        tool = WEATHER if "messages" in given else {"type": "function", **WEATHER["function"]}
        assert live.post(path, **given).headers["x-cflow-ignored-params"] == name
        response = live.post(path, **given, tools=[tool])
        assert "x-cflow-ignored-params" not in response.headers
        assert b"enable_thinking=False" in bytes(engine.calls[-1].prompt)


def stream_of(live: Live, **fields: Any) -> tuple[str, list[str], str | None]:
    """Content, names of the calls, and why a stream ended."""
    content, names, reason = "", [], None
    for chunk in events(live.chat(stream=True, **fields)):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        names += [c["function"]["name"] for c in choice["delta"].get("tool_calls", []) if "id" in c]
        reason = choice["finish_reason"] or reason
    return content, names, reason


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
@pytest.mark.parametrize("before", ["", CALL_2])
@pytest.mark.parametrize("cut", [1, 5, 11, 13, 20, 30])
def test_f18_markup_never_reaches_content(serve: Serve, choice: Any, before: str, cut: int) -> None:
    engine = FakeEngine(script=say(before + CALL[:cut], reason="length"), dialect=Dialect(HERMES))
    live = serve(engine)
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": choice}
    (whole,) = live.chat(**fields).json()["choices"]
    content, names, reason = stream_of(live, **fields)
    is_over = bool(before) and isinstance(choice, dict)  # a named tool is called once
    assert content == (whole["message"]["content"] or "") == ""
    assert names == [c["function"]["name"] for c in whole["message"].get("tool_calls", [])]
    assert reason == whole["finish_reason"] == ("tool_calls" if is_over else "length")


def test_f19_a_repeated_call_ends_the_generation(serve: Serve) -> None:
    engine = FakeEngine(script=say(CALL_2 * 17, reason="length"), dialect=Dialect(HERMES))
    live = serve(engine)
    fields = {"tools": [CLOCK], "tool_choice": "required"}
    body = live.chat(**fields).json()
    (choice,) = body["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
    assert choice["finish_reason"] == "tool_calls"
    assert stream_of(live, **fields) == ("", ["clock"], "tool_calls")
    n_read = len(CALL_2 + CALL_2.removesuffix("\n</tool_call>"))
    assert body["usage"]["completion_tokens"] == n_read
    assert engine.answers[0].is_cancelled
    *_, last = events(live.chat(stream=True, **fields))
    assert last["timings"]["predicted_n"] == n_read
    assert [live.metric(ENDED % reason) for reason in ("stop", "length", "abort")] == [3, 0, 0]


ENDED = 'vllm:request_success_total{engine="0",finished_reason="%s",model_name="fake/model"}'


def test_f19_one_choice_ends_and_the_others_go_on(tell: Any) -> None:
    live = tell(CALL_2 * 3, CALL_2 + CALL, "Hm.")
    body = live.chat(tools=[WEATHER, CLOCK], n=3).json()
    assert [c["finish_reason"] for c in body["choices"]] == ["tool_calls", "tool_calls", "stop"]
    assert [len(c["message"].get("tool_calls", [])) for c in body["choices"]] == [1, 2, 0]
    n_first = len(CALL_2 + CALL_2.removesuffix("\n</tool_call>"))
    others = len((CALL_2 + CALL).encode()) + len("Hm.") + 2
    assert body["usage"]["completion_tokens"] == n_first + others
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in events(live.chat(stream=True, tools=[WEATHER, CLOCK], n=3))
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert ends == [(0, "tool_calls"), (1, "tool_calls"), (2, "stop")]
    assert live.metric(ENDED % "stop") == 6


WEATHER_JSON = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
JSON_ANSWERS = [WEATHER_JSON, f"```json\n{WEATHER_JSON}\n```", f"[{WEATHER_JSON}]"]


@pytest.mark.parametrize("text", JSON_ANSWERS)
@pytest.mark.parametrize("dialect", [HERMES, QWEN_CODER, MISTRAL])
def test_f17_bare_json_is_a_call(tell: Any, text: str, dialect: Any) -> None:
    live = tell(text, dialect=Dialect(dialect))
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [WEATHER_CALL]}
    expected = {"message": message, "finish_reason": "tool_calls"}
    assert without_ids(whole(live, tools=[WEATHER, CLOCK])) == expected
    assert without_ids(joined(live, tools=[WEATHER, CLOCK])) == expected


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"json_calls": False}, {"tools": [WEATHER]}),
        ({}, {"tools": [CLOCK]}),
        ({}, {"tools": [WEATHER], "tool_choice": "none"}),
        ({}, {"tools": [WEATHER], "response_format": {"type": "json_object"}}),
        ({}, {"tools": [WEATHER], "continue_final_message": True,
              "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "As JSON: "}]}),
    ],
)  # fmt: skip
def test_f17_json_is_content_where_it_is_asked_for(
    serve: Serve, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    engine = FakeEngine(
        script=say(WEATHER_JSON), dialect=Dialect(HERMES), template=Template(), context=400
    )
    live = serve(engine, **settings)
    message = {"role": "assistant", "content": WEATHER_JSON, "refusal": None}
    expected = {"message": message, "finish_reason": "stop"}
    assert without_ids(whole(live, **fields)) == without_ids(joined(live, **fields)) == expected


def test_f17_one_call_where_several_are_not_wanted(tell: Any) -> None:
    live = tell(f'[{WEATHER_JSON}, {{"name": "clock", "arguments": {{}}}}]')
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK]}
    for parallel, n in ((True, 2), (False, 1)):
        choice = whole(live, parallel_tool_calls=parallel, **fields)
        assert len(choice["message"]["tool_calls"]) == n
        assert choice["message"]["content"] is None
