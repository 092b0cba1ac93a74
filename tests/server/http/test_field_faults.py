"""Connections as programs in the field make them: old versions, proxies, pools, several addresses."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from cflow.server.http.listen import listen
from harness.fake_engine import FakeEngine
from harness.live import Live, read_all, request
from harness.scripts import say

BODY = b'{"prompt": "abc", "stream": true}'


def test_f40_a_stream_in_http_1_0_ends_with_the_connection(live: Live) -> None:
    ask = request("POST", "/v1/completions", BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    with live.raw(ask) as sock:
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = [line for line in body.split(b"\n\n") if line]
    assert all(event.startswith(b"data: ") for event in events)
    assert events[-1] == b"data: [DONE]"


def test_f40_a_whole_answer_in_http_1_0_keeps_its_length(live: Live) -> None:
    ask = request("POST", "/v1/completions", b'{"prompt": "abc"}')
    with live.raw(ask.replace(b"HTTP/1.1", b"HTTP/1.0")) as sock:
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["object"] == "text_completion"


def test_f40_http_1_0_knows_no_continue(live: Live) -> None:
    ask = request("POST", "/v1/completions", BODY, "Expect: 100-continue")
    with live.raw(ask.replace(b"HTTP/1.1", b"HTTP/1.0")) as sock:
        assert b"100 Continue" not in read_all(sock)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
def test_f41_events_have_no_other_ends_of_lines(
    serve: Any, path: str, fields: dict[str, Any]
) -> None:
    text = "a\u2028b\u2029c\u0085d"
    live: Live = serve(FakeEngine(script=say(text)))
    answer = live.post(path, fields | {"stream": True})
    assert not set("\u2028\u2029\u0085") & set(answer.text)
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line]
    told = "".join(map(_text, (json.loads(line) for line in data if line != "[DONE]")))
    assert told == text


def _text(event: dict[str, Any]) -> str:
    """The text that an event of any of the APIs adds."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    choices = event.get("choices") or [{}]
    return str(choices[0].get("text") or choices[0].get("delta", {}).get("content") or "")


def test_f42_idle_connections_outlive_those_of_pools(live: Live, serve: Any) -> None:
    assert live.timeout_keep_alive > 90
    assert serve(keep_alive=7.0).timeout_keep_alive == 7


def test_f42_while_draining_answers_close_the_connection(live: Live) -> None:
    live.engine.put(state="draining")
    assert live.client.get("/live").headers["connection"] == "close"
    assert live.complete(prompt="x").headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_f43_a_body_that_never_comes_is_not_the_next_request(
    serve: Any, tmp_path: Path, path: str
) -> None:
    (tmp_path / "keys").write_text("secret\n")
    live: Live = serve(api_keys=tmp_path / "keys")
    waiting = request("POST", path, b"", "Expect: 100-continue", f"Content-Length: {len(BODY)}")
    with live.raw(waiting.replace(b"Content-Length: 0\r\n", b"")) as sock:
        head = read_all(sock)
    assert b" 401 " in head.split(b"\r\n")[0]
    assert b"connection: close" in head.lower()
    assert b"100 Continue" not in head


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("hosts", [("::",), ("localhost",), ("127.0.0.1", "::1")])
def test_f44_both_families_answer(hosts: tuple[str, ...]) -> None:
    sockets = listen(hosts, 0)
    port = sockets[0].getsockname()[1]
    addresses: tuple[str, ...] = ("127.0.0.1", "::1")
    if hosts == ("localhost",):
        found = socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
        addresses = tuple(str(address[0]) for *_, address in found)
    for address in addresses:
        socket.create_connection((address, port)).close()
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(
    ("settings", "headers", "path"),
    [
        ({"root_path": "/llm"}, {}, "/llm/v1/models"),  # the proxy leaves it there
        ({"root_path": "/llm"}, {}, "/v1/models"),  # the proxy takes it off
        ({}, {"X-Forwarded-Prefix": "/a/llm/"}, "/v1/models"),
        ({}, {"X-Forwarded-Prefix": "/a/llm"}, "/a/llm/v1/models"),
    ],
)
def test_f45_a_sub_path_is_served(
    serve: Any, settings: dict[str, Any], headers: dict[str, str], path: str
) -> None:
    live: Live = serve(**settings)
    assert live.client.get(path, headers=headers).status_code == 200
    root = settings.get("root_path") or headers["X-Forwarded-Prefix"].rstrip("/")
    listed = live.client.get("/", headers=headers).json()
    assert listed["openapi"] == f"{root}/openapi.json"


@pytest.mark.parametrize("prefix", ["//evil.example", "/a b", "/a\u00e9", "x", "/../x?y"])
def test_f45_a_prefix_is_a_path(live: Live, prefix: str) -> None:
    headers = httpx.Headers([("X-Forwarded-Prefix", prefix)], encoding="utf-8")
    assert live.client.get("/", headers=headers).json()["openapi"] == "/openapi.json"


def test_f45_a_stranger_s_prefix_does_not_count(serve: Any) -> None:
    live: Live = serve(trusted_proxies=("10.0.0.0/8",))
    headers = {"X-Forwarded-Prefix": "/llm"}
    assert live.client.get("/", headers=headers).json()["openapi"] == "/openapi.json"
    assert live.client.get("/llm/v1/models", headers=headers).status_code == 404


def test_f45_the_page_names_nothing_from_the_root(live: Live) -> None:
    page = live.client.get("/", headers={"Accept": "text/html"}).text
    script = live.client.get("/web/page.js").text
    assert 'href="/' not in page
    assert 'src="/' not in page
    assert 'fetch("/' not in script
    assert '"/v1' not in script
