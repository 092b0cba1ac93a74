"""Kinds of faults that public bug reports show in such servers, against a real model.

A test's name begins with its case id, such as st07: docs/testing.md lists the topics.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.servers import Server, Stream, serving
from harness.waiting import until
from oracles import tiny

PROMPTS = [
    "Hello", "The sky is", " leading space", "x", "漢字", "def f(x):\n    return", "1 + 1 =", "😸",
    "Привет, как", "What is the capital of France?", "List three fruits:", "\n", "SELECT *",
    "é", "A", "The quick brown fox", "{\"a\": 1,", "한국어", "Dear", "And then",
]  # fmt: skip
UNICODE = "😸漢字é👩\u200d👩\u200d👧𝔘한"


def joined(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Text, finish reason and usage of a stream."""
    text, reason, usage = "", None, None
    options = {"stream_options": {"include_usage": True}}
    for event in server.events(path, body | options):
        for choice in event.get("choices", ()):
            text += choice.get("text", "") or choice.get("delta", {}).get("content", "")
            reason = choice["finish_reason"] or reason
        usage = event.get("usage") or usage
    return {"text": text, "reason": reason, "usage": usage}


def whole(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, {"temperature": 0} | body)
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"text": text, "reason": choice["finish_reason"], "usage": answer["usage"]}


def without_cache(answer: dict[str, Any]) -> dict[str, Any]:
    answer["usage"].pop("prompt_tokens_details")
    return answer


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | fields


@pytest.mark.parametrize("prompt", PROMPTS)
def test_st07_stream_and_whole_answer_are_equal(shared: Server, prompt: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": prompt, "max_tokens": 20}),
        ("/v1/chat/completions", chat_body(prompt, max_tokens=20)),
    ):
        one = without_cache(whole(shared, path, body))
        assert without_cache(joined(shared, path, body)) == one


def test_st01_characters_of_several_tokens_are_whole(shared: Server) -> None:
    """The bytes are forced one token after the other, so every cut there is occurs."""
    ids = shared.post("/tokenize", {"content": UNICODE})["tokens"]
    assert len(ids) > len(UNICODE)  # some characters are several tokens
    pieces = shared.post("/tokenize", {"content": UNICODE, "with_pieces": True})["tokens"]
    assert any(piece["piece"].startswith("bytes:") for piece in pieces)
    half = next(piece["id"] for piece in pieces if piece["piece"].startswith("bytes:"))
    body = {"prompt": "x", "max_tokens": 6, "logit_bias": {str(half): 100}}
    one = whole(shared, "/v1/completions", body)
    assert joined(shared, "/v1/completions", body)["text"] == one["text"]
    prompt = f"Repeat exactly: {UNICODE}"
    for seed in range(4):
        fields = chat_body(prompt, max_tokens=120, temperature=1.5, seed=seed)
        one = whole(shared, "/v1/chat/completions", fields)
        stream = joined(shared, "/v1/chat/completions", fields)
        assert stream["text"] == one["text"]
        for event in shared.events("/v1/chat/completions", fields):
            for choice in event.get("choices", ()):
                if "\ufffd" in choice["delta"].get("content", ""):
                    assert "\ufffd" in one["text"]
    forced = chat_body(prompt, max_tokens=200, guided_choice=[UNICODE])
    assert whole(shared, "/v1/chat/completions", forced)["text"] == UNICODE
    assert joined(shared, "/v1/chat/completions", forced)["text"] == UNICODE


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat_body("hi"))],
)
def test_st03_usage_comes_once_last_and_only_when_asked_for(
    shared: Server, path: str, body: dict[str, Any]
) -> None:
    body = body | {"max_tokens": 3, "n": 2}
    *plain, end = shared.events(path, body)
    assert end == {"done": True}
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in plain)
    *chunks, last, end = shared.events(path, body | {"stream_options": {"include_usage": True}})
    assert end == {"done": True}
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    counts = shared.post(path, body | {"temperature": 0})["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == counts[name]


def test_sp01_stop_strings_over_every_cut(shared: Server) -> None:
    prompt = "Days of the week: Monday, Tuesday,"
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 12}
    answer = shared.complete(**fields, logprobs=0)["choices"][0]
    text, tokens = answer["text"], answer["logprobs"]["tokens"]
    assert "".join(tokens) == text
    for i in range(len(tokens) - 2):
        first, second, third = tokens[i : i + 3]
        stop = first[len(first) // 2 :] + second + third[: (len(third) + 1) // 2]
        expected = text[: text.index(stop)]
        body = fields | {"stop": [stop]}
        for answer in (
            whole(shared, "/v1/completions", body),
            joined(shared, "/v1/completions", body),
        ):
            assert (answer["text"], answer["reason"]) == (expected, "stop")


def test_st02_held_back_text_is_flushed(shared: Server) -> None:
    fields: dict[str, Any] = {"prompt": "Count: 1 2 3 4 5", "max_tokens": 8}
    text = shared.complete(**fields)["choices"][0]["text"]
    body = fields | {"stop": [text[-2:] + "\u2603never"]}
    answer = joined(shared, "/v1/completions", body)
    assert (answer["text"], answer["reason"]) == (text, "length")


def test_sp04_every_end_token_ends_and_none_shows(shared: Server) -> None:
    for name in ("<|im_end|>", "<|endoftext|>"):
        (token,) = shared.post("/tokenize", {"content": name})["tokens"]
        answer = shared.complete("x", max_tokens=20, logit_bias={str(token): 100})
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] <= 1


class TestLp02Scoring:
    PROMPT = "The cat sat on the mat"

    def entries(self, server: Server, **fields: Any) -> dict[str, Any]:
        answer = server.complete(fields.pop("prompt", self.PROMPT), echo=True, logprobs=1, **fields)
        found: dict[str, Any] = answer["choices"][0]
        return found

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_shape(self, shared: Server, max_tokens: int) -> None:
        choice = self.entries(shared, max_tokens=max_tokens)
        n_prompt = len(shared.post("/tokenize", {"content": self.PROMPT})["tokens"])
        arrays = choice["logprobs"]
        assert choice["text"].startswith(self.PROMPT)
        assert choice["finish_reason"] == "length"
        assert {len(v) for v in arrays.values()} == {n_prompt + max_tokens}
        assert arrays["token_logprobs"][0] is None
        assert "".join(arrays["tokens"]) == choice["text"]
        assert all(value <= 0 for value in arrays["token_logprobs"][1:])

    def test_entries_are_what_generation_says(self, shared: Server) -> None:
        ids = shared.post("/tokenize", {"content": self.PROMPT})["tokens"]
        scored = self.entries(shared, prompt=ids, max_tokens=0)["logprobs"]["token_logprobs"]
        n_checked = 0
        for i in range(1, len(ids)):
            step = shared.complete(ids[:i], max_tokens=1, logprobs=20)["choices"][0]["logprobs"]
            name = shared.post("/detokenize", {"tokens": [ids[i]]})["content"]
            if name in step["top_logprobs"][0]:
                assert scored[i] == pytest.approx(step["top_logprobs"][0][name], abs=1e-3)
                n_checked += 1
        assert n_checked >= 2

    def test_stream_and_batches(self, shared: Server) -> None:
        other = "Water is wet"
        both = shared.complete([self.PROMPT, other], echo=True, logprobs=1, max_tokens=0)
        for choice, prompt in zip(both["choices"], (self.PROMPT, other), strict=True):
            assert (
                choice["logprobs"] == self.entries(shared, prompt=prompt, max_tokens=0)["logprobs"]
            )
        fields = {"prompt": self.PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
        events = list(shared.events("/v1/completions", fields))
        assert events[0]["choices"][0]["logprobs"] == both["choices"][0]["logprobs"]

    def test_as_lm_eval_asks(self, shared: Server) -> None:
        ids = shared.post("/tokenize", {"content": self.PROMPT})["tokens"]
        answer = shared.complete([ids, ids], max_tokens=1, logprobs=1, seed=1234, echo=True)
        for choice in answer["choices"]:
            arrays = choice["logprobs"]
            assert len(arrays["token_logprobs"]) == len(ids) + 1
            for token, top in zip(arrays["tokens"][1:], arrays["top_logprobs"][1:], strict=True):
                assert token in top


def test_lp01_values_do_not_depend_on_how_tokens_are_chosen(shared: Server) -> None:
    tops = [
        shared.complete("a b c", max_tokens=3, logprobs=5, **fields)["choices"][0]["logprobs"]
        for fields in ({}, {"top_p": 0.1}, {"temperature": 0.3, "seed": 1, "top_k": 1})
    ]
    assert tops[0] == tops[1] == tops[2]
    assert len(tops[0]["top_logprobs"][0]) == 5


def test_sa03_bias_bans_and_forces(shared: Server) -> None:
    fields: dict[str, Any] = {"prompt": "1 2 3", "max_tokens": 1}
    first = shared.complete(**fields)["choices"][0]["text"]
    (token,) = shared.post("/tokenize", {"content": first})["tokens"]
    (other,) = shared.post("/tokenize", {"content": " cat"})["tokens"]
    banned = shared.complete(**fields, logit_bias={str(token): -100})["choices"][0]["text"]
    assert banned != first
    forced = shared.complete(**fields, logit_bias={str(other): 100})["choices"][0]["text"]
    assert forced == " cat"
    assert shared.complete(**fields, logit_bias={})["choices"][0]["text"] == first


def test_seeds_repeat(shared: Server) -> None:
    fields: dict[str, Any] = {"prompt": "Once", "max_tokens": 24, "temperature": 1.0, "n": 3}
    first, second = (
        [c["text"] for c in shared.complete(**fields, seed=7)["choices"]] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3
    assert [c["text"] for c in shared.complete(**fields, seed=8)["choices"]] != first


def test_ch03_content_beside_calls_may_be_missing(shared: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    counts = {
        shared.post(
            "/v1/chat/completions",
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "tool_calls": [call], **content},
                    {"role": "tool", "tool_call_id": "c1", "content": "42"},
                ],
            },
        )["usage"]["prompt_tokens"]
        for content in ({"content": None}, {}, {"content": ""})
    }
    assert len(counts) == 1
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}]
    ids = shared.post("/tokenize", {"messages": messages})["tokens"]
    assert "None" not in shared.post("/detokenize", {"tokens": ids})["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_lc01_too_long_is_refused_at_once(shared: Server, stream: bool) -> None:
    text = "seven grey boats went by. " * 600
    for path, body in (
        ("/v1/chat/completions", chat_body(text, max_tokens=32)),
        ("/v1/completions", {"prompt": [5] * 2049}),
        ("/v1/completions", {"prompt": ["ok", text]}),
    ):
        response = shared.http.post(path, json=body | {"stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_cc03_the_prefix_cache_cannot_be_seen(shared: Server) -> None:
    words = " ".join(f"word{i}" for i in range(150))

    def ask(prompt: Any) -> tuple[Any, ...]:
        answer = shared.complete(prompt, max_tokens=16, logprobs=1)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached < answer["usage"]["prompt_tokens"]
        return answer["choices"][0], cached

    cold, n_cold = ask(words)
    warm, n_warm = ask(words)
    assert warm == cold
    assert n_cold == 0
    assert n_warm > 300
    ids = shared.post("/tokenize", {"content": words})["tokens"]
    longer, _ = ask(words + " x")
    for event in shared.events("/v1/completions", {"prompt": words, "max_tokens": 100}):
        if event["choices"][0]["text"]:
            break  # leaves
    assert ask(words)[0] == cold
    assert ask(words + " x")[0] == longer
    shorter, _ = ask(ids[:-1])
    assert ask(ids[:-1])[0] == shorter


def test_cc04_a_stream_goes_on_while_a_long_prompt_is_computed(shared: Server) -> None:
    """Each step of the prompt brings the stream a token as well."""
    stream = Stream(shared, max_tokens=300)
    until(lambda: len(stream.events) > 20)
    done: list[int] = []
    said: list[int] = []  # chunks of the stream by then
    prompt = [1000 + 7 * i % 30000 for i in range(1900)]
    fields = {"prompt": prompt, "max_tokens": 1, "return_progress": True}
    for event in shared.events("/v1/completions", fields):
        if "prompt_progress" in event:
            done.append(event["prompt_progress"]["processed"])
            said.append(len(stream.events))
    assert len(done) > 3
    assert done == sorted(set(done))
    # What is on its way does not count, nor what comes while this process stands still.
    assert said[-1] - said[0] >= min(len(done) - 3, len(done) // 2)
    assert [c["finish_reason"] for c in stream.join()[-2]["choices"]] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_cn01_cn02_a_client_that_leaves_frees_the_engine(
    shared: Server, stream: bool, phase: str
) -> None:
    prompt: Any = "Count: 1 2 3" if phase == "decode" else list(range(1000, 2900))
    n = 1900 if phase == "decode" else 100
    body = {"prompt": prompt, "max_tokens": n, "n": 8, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    before = shared.metric("cflow_cancelled_total")
    sock = socket.create_connection(("127.0.0.1", shared.port))
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    until(lambda: shared.metric("vllm:num_requests_running") > 0)
    sock.close()
    shared.complete("x", max_tokens=1)
    until(lambda: shared.metric("vllm:num_requests_running") == 0)
    until(lambda: shared.metric("cflow_cancelled_total") == before + 1)


def test_se05_a_template_of_a_model_file_runs_no_code(tmp_path: Path) -> None:
    """One template has all of them: the first message says which. Rendered at no other time."""
    hostile = [
        f"{{{{ lipsum.__globals__['os'].popen('touch {tmp_path}/pwned').read() }}}}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ x.y }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ messages[0].content * 10**10 }}",
    ]
    branches = "".join(
        f"{{% elif messages[0].content == '{i}' %}}{source}" for i, source in enumerate(hostile)
    )
    template = f"{{% if messages[0].content == 'ok' %}}fine{branches}{{% endif %}}"
    folder = tiny.save(tiny.build("llama"), tmp_path / "hf")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with serving(folder) as server:
        workers = server.workers()
        for i in range(len(hostile)):
            response = server.http.post("/v1/chat/completions", json=chat_body(str(i)))
            assert response.status_code == 400, hostile[i]
            assert response.json()["error"]["code"] == "template_error"
            assert server.chat("ok", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert server.workers() == workers
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        [peak_kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
        assert int(peak_kib) < 1 << 20
    assert not (tmp_path / "pwned").exists()


def test_me03_all_requests_are_accounted_for(shared: Server) -> None:
    until(lambda: shared.metric("vllm:num_requests_running") == 0)
    received = shared.metric("cflow_requests_received_total")
    assert received > 0
    until(lambda: shared.metric("vllm:request_success_total") == received)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], None, " ", "\n", [[], [5]]])
def test_pa01_empty_prompts_never_hang(shared: Server, prompt: Any) -> None:
    response = shared.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert response.status_code in (200, 400)
    if response.status_code == 200:
        assert response.json()["usage"]["prompt_tokens"] >= 1
    assert shared.chat("", max_tokens=1)["usage"]["completion_tokens"] == 1


def nested(n: int) -> str:
    return '{"type":"array","items":' * n + "{}" + "}" * n


@pytest.mark.parametrize(
    "schema",
    [
        nested(60), nested(500), nested(20000),
        json.dumps({"type": "string", "pattern": f"^{'(' * 20000}a{')' * 20000}$"}),
        '{"type":"string","pattern":"^+[a-z]$"}', '{"type":"string","pattern":"(a+)+$"}',
        '{"type":"string","pattern":"(x{1000}){1000}"}', '{"type":"string","maxLength":1000000000}',
        json.dumps({"enum": [f"{i:07}" for i in range(100_000)]}),
        '{"allOf":[{"$ref":"#"}]}', '{"type":"string","format":"nope"}', '{"uniqueItems":true}',
    ],
    ids=range(12),
)  # fmt: skip
def test_se01_hostile_schemas_cost_an_error_at_most(shared: Server, schema: str) -> None:
    form = f'{{"type":"json_schema","json_schema":{{"name":"d","schema":{schema}}}}}'
    message = '"messages":[{"role":"user","content":"x"}],"max_tokens":2'
    body = f'{{{message},"response_format":{form}}}'.encode()
    workers = shared.workers()
    headers = {"content-type": "application/json"}
    response = shared.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]["param"].startswith("response_format")
    assert shared.status("/health") == 200
    assert shared.workers() == workers


TJ03_SCHEMAS: list[dict[str, Any]] = [
    {"$defs": {"C": {"enum": ["red", "blue"]}}, "type": "object", "required": ["c"],
     "properties": {"c": {"$ref": "#/$defs/C"}}, "additionalProperties": False},
    {"type": ["string", "null"], "maxLength": 20},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    {"$defs": {"N": {"type": "object", "required": ["v", "next"], "additionalProperties": False,
                     "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9},
                                    "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}},
     "$ref": "#/$defs/N"},
    {"const": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    {"type": "object", "required": ["a"], "additionalProperties": False,
     "properties": {"a": {"type": "object", "required": ["b"], "additionalProperties": False,
                          "properties": {"b": {"type": "string", "pattern": "^[a-c]{2,4}$"}}}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", TJ03_SCHEMAS, ids=range(len(TJ03_SCHEMAS)))
def test_tj03_every_whole_answer_fits_its_schema(shared: Server, schema: dict[str, Any]) -> None:
    fields = {"guided_json": schema, "n": 10, "temperature": 1, "seed": 5, "max_tokens": 120}
    choices = shared.chat("Answer in JSON.", **fields)["choices"]
    whole = [c["message"]["content"] for c in choices if c["finish_reason"] == "stop"]
    assert whole
    for text in whole:
        jsonschema.validate(json.loads(text), schema)


def test_tj03_a_reference_to_nothing_is_refused(shared: Server) -> None:
    body = chat_body("x", guided_json={"$ref": "#/$defs/nope"})
    response = shared.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "nope" in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["A", ".", " ", "\n", "ab", "=-", "a\u0301"])
def test_un03_long_runs_of_one_thing(shared: Server, text: str) -> None:
    body = {"prompt": text * (131072 // len(text)), "max_tokens": 1}
    response = shared.http.post("/v1/completions", json=body)
    assert response.status_code in (200, 400)
    assert shared.status("/health") == 200
