"""What comes in as HTTP: every refusal in one shape, bodies bounded, connections kept usable."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Delta, Progress
from cflow.server.api.schemas import CompletionRequest, Message
from harness.fake_engine import Call
from harness.live import Live, error_of, read_all, request

GENERATING = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"[]", b"{", b"5", b'"x"', b"null", b'{"a":}', b'{"prompt":"\xff"}',
        b"\xef\xbb\xbf{}", b'{"a":NaN}', b'{"a":1e999}', b"[" * 20000, b'{"a":' * 20000,
        b'{"a":' + b"9" * 5000 + b"}", b"{} {}",
    ],
    ids=range(16),
)  # fmt: skip
def test_bodies_that_are_no_json_object(live: Live, path: str, body: bytes) -> None:
    response = live.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ('{"prompt":"a%s"}', "prompt"),
        ('{"prompt":["ok","%s"]}', "prompt[1]"),
        ('{"prompt":"a","stop":["%s"]}', "stop[0]"),
        ('{"prompt":"a","x":{"y":[1,{"z":"%s"}]}}', "x.y[1].z"),
        ('{"prompt":"a","k%s":1}', "the body"),
    ],
)
@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair(live: Live, template: str, named: str, half: str) -> None:
    body = (template % half).encode()
    response = live.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("invalid_unicode", named)
    good = (template % "\\ud83d\\ude00").encode()
    assert live.client.post("/v1/completions", content=good, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ('{"messages":[{"role":"user","content":"%s"}]}', "messages[0].content"),
        ('{"messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}',
         "messages[0].content[0].text"),
        ('{"messages":[],"tools":[{"type":"function","function":{"name":"%s"}}]}',
         "tools[0].function.name"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", ["true", "false"])
def test_half_a_surrogate_pair_in_chat(live: Live, template: str, named: str, stream: str) -> None:
    body = (f'{{"stream":{stream},' + (template % "a\\ud83d")[1:]).encode()
    response = live.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert error_of(response)["param"] == named


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "-1e400", "9" * 5000])
@pytest.mark.parametrize(
    ("template", "named"),
    [
        ('{"prompt":"a","temperature":%s}', "temperature"),
        ('{"prompt":"a","logit_bias":{"5":%s}}', "logit_bias.5"),
        ('{"prompt":[[1,2],[3,%s]]}', "prompt[1][1]"),
        ('{"prompt":"a","unknown":{"x":[%s]}}', "unknown.x[0]"),
    ],
)
def test_numbers_that_are_none_are_named(live: Live, template: str, named: str, value: str) -> None:
    body = (template % value).encode()
    response = live.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == named


@pytest.mark.parametrize("key", ["tools", "response_format", "prompt", "unknown"])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_too_deeply_is_named(live: Live, key: str, left: str, right: str) -> None:
    deep = left * 5000 + "1" + right * 5000
    body = f'{{"x":{{"y":["[{{\\"",{{}}]}},"{key}":{deep},"z":1}}'.encode()
    response = live.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == key


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_other_content_types(live: Live, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    response = live.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_content_type"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_type_with_trimmings(live: Live, kind: str) -> None:
    headers = {"content-type": kind}
    response = live.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 200


def test_routes_and_methods_that_are_not_there(live: Live) -> None:
    for response, status in (
        (live.client.get("/v1/nope"), 404),
        (live.post("/v1/nope"), 404),
        (live.client.get("/v1/models/"), 404),
        (live.client.get("/v1/completions"), 405),
        (live.client.delete("/v1/models"), 405),
        (live.client.request("PATCH", "/v1/models"), 405),
    ):
        assert response.status_code == status
        error_of(response)
    assert live.client.get("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize("path", GENERATING)
def test_unknown_model(live: Live, path: str) -> None:
    known: dict[str, Any] = {
        "prompt": "a", "messages": [{"role": "user", "content": "x"}], "tokens": [1],
    }  # fmt: skip
    body = {"model": "nope", **known}
    response = live.post(path, body)
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_errors_do_not_amplify(live: Live) -> None:
    for fields in (
        {"model": "x" * 500_000},
        {"stop": ["y"] * 100_000},
        {"temperature": "z" * 500_000},
    ):
        response = live.complete(prompt="a", **fields)
        assert 400 <= response.status_code < 500
        assert len(response.content) < 1000
    ignored = live.complete(prompt="a", **{f"field-{'q' * 500}-{i}": 1 for i in range(1000)})
    assert ignored.status_code == 200
    assert len(ignored.headers["x-cflow-ignored-params"]) < 2000


def test_every_answer_has_an_id_and_repeats_the_clients(
    serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cflow.access"), "disabled", False)
    caplog.set_level("INFO", logger="cflow.access")
    live: Live = serve()
    for stream in (False, True):
        headers = {"x-request-id": "job-7/3"}
        ask = {"prompt": "a", "stream": stream}
        answer = live.client.post("/v1/completions", json=ask, headers=headers)
        assert answer.headers["x-request-id"] == "job-7/3"
    assert "/v1/completions 200" in caplog.text
    assert "job-7/3" in caplog.text
    made = [live.complete(prompt="a", n=n).headers["x-request-id"] for n in (0, 1)]
    odd = ("x" * 129, "a b", "\u00e9")
    for value in odd:
        given = {b"x-request-id": value.encode("latin-1")}
        made.append(live.client.get("/live", headers=given).headers["x-request-id"])
    assert len(set(made)) == 5
    assert all(len(value) == 32 for value in made)


class TestBodySize:
    @pytest.fixture
    def live(self, serve: Any) -> Live:
        live: Live = serve(max_body=100_000)
        return live

    def refused(self, live: Live, head: str, body: bytes, status: bytes = b"413") -> None:
        sock = live.raw(request("POST", "/v1/completions", body, head))
        answer = read_all(sock)
        sock.close()
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] in ("body_too_large", "unsupported_encoding")

    def test_announced(self, live: Live) -> None:
        self.refused(live, "Content-Length: 1073741824", b"x" * 50_000)

    def test_chunked(self, live: Live) -> None:
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        self.refused(live, "Transfer-Encoding: chunked", chunk * 20)

    def test_compressed(self, live: Live) -> None:
        body = gzip.compress(b"0" * 1_000_000)
        sock = live.raw(request("POST", "/v1/completions", body, "Content-Encoding: gzip"))
        assert sock.recv(12) == b"HTTP/1.1 415"
        sock.close()

    def test_waiting_for_100_continue(self, live: Live) -> None:
        head = request(
            "POST", "/v1/completions", b"", "Content-Length: 200000", "Expect: 100-continue"
        )
        sock = live.raw(head)
        answer = read_all(sock)
        sock.close()
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.count(b"HTTP/1.1") == 1

    def test_just_below(self, live: Live) -> None:
        body = json.dumps({"prompt": "a", "x": "y" * 99_000}).encode()
        assert live.client.post("/v1/completions", content=body, headers=JSON).status_code == 200
        long = json.dumps({"prompt": "a" * 99_000}).encode()
        refused = live.client.post("/v1/completions", content=long, headers=JSON)
        assert error_of(refused)["code"] == "context_length_exceeded"


class TestKeepAlive:
    """After a refusal the next request on the socket is answered, or the socket is closed."""

    @pytest.mark.parametrize("body", [b"{bad", b'{"prompt":5}', b"x" * 70_000, b""])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/nope", "/live"])
    def test_two_requests_in_one_write(self, live: Live, body: bytes, path: str) -> None:
        sock = live.raw(
            request("POST", path, body) + request("GET", "/health", b"", "Connection: close")
        )
        answer = read_all(sock)
        sock.close()
        first, _, rest = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 4")
        if b"connection: close" in first.lower():
            assert answer.count(b"HTTP/1.1") == 1
        else:
            assert rest.count(b"HTTP/1.1 200") == 1
        assert b"Invalid HTTP request" not in answer

    def test_after_an_unread_body(self, serve: Any, tmp_path: Any) -> None:
        keys = tmp_path / "keys"
        keys.write_text("secret\n")
        live: Live = serve(api_keys=keys)
        for body in (b'{"prompt":"a"}', b"x" * 5_000_000):
            sock = live.raw(
                request("POST", "/v1/completions", body)
                + request("GET", "/health", b"", "Connection: close")
            )
            answer = read_all(sock)
            sock.close()
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"Invalid HTTP request" not in answer
            assert answer.count(b"HTTP/1.1 200") == (1 if len(body) < 100 else 0)

    def test_after_a_body_that_is_too_large(self, serve: Any) -> None:
        live: Live = serve(max_body=100_000)
        sock = live.raw(
            request("POST", "/v1/completions", b"x" * 5_000_000)
            + request("GET", "/health", b"", "Connection: close")
        )
        answer = read_all(sock)
        sock.close()
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.count(b"HTTP/1.1") == 1

    def test_after_a_stream_that_failed(self, live: Live) -> None:
        async def failing(_: Call) -> AsyncIterator[Delta | Progress]:
            raise EngineError("worker_died", "the engine ended")
            yield

        live.engine.script = failing
        sock = live.raw(
            request("POST", "/v1/completions", b'{"prompt":"a","stream":true}')
            + request("GET", "/health", b"", "Connection: close")
        )
        answer = read_all(sock)
        sock.close()
        assert [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")] == [
            b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK",
        ]  # fmt: skip
        assert b"worker_died" in answer


def test_openapi_describes_the_bodies(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert set(fields) == set(CompletionRequest.model_fields)
    message = document["components"]["schemas"]["Message"]["properties"]
    assert set(message) == set(Message.model_fields)
    assert "$ref" in json.dumps(document["paths"]["/v1/chat/completions"])


def test_a_fault_of_ours_is_a_500_without_details(live: Live) -> None:
    object.__setattr__(live.engine.card, "tokenizer", None)
    response = live.complete(prompt="a")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal"
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["connection"] == "close"
    assert "Traceback" not in response.text


CALLS = [{"function": {"name": "f"}}] * 100
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}] * 150_000},
    ),
    "messages ": ("/v1/chat/completions", {"messages": [5] * 2_000_000}),
    "messages  ": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": CALLS}] * 1500},
    ),
    "logit_bias": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(400_000)}},
    ),
    "stop[0]": ("/v1/completions", {"prompt": "a", "stop": [5] * 2_000_000}),
    "stop_token_ids[0]": ("/v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * 1_500_000}),
    "tokens": ("/detokenize", {"tokens": [5] * 2_000_000}),
    "tokens[0]": ("/detokenize", {"tokens": ["x"] * 1_500_000}),
    "content": ("/tokenize", {"content": "a" * 2_000_000}),
    "prompt": ("/tokenize", {"prompt": "a" * 2_000_000}),
}


@pytest.mark.parametrize("param", FAULTS)
def test_long_lists_are_refused_by_one_short_fault(live: Live, param: str) -> None:
    path, body = FAULTS[param]
    content = json.dumps(body, separators=(",", ":")).encode()
    response = live.client.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == param.strip()
    assert len(response.content) < 500
