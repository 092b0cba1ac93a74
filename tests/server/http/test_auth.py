"""API keys: who gets in, and that nothing odd in the header is more than a 401."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base.errors import CflowError
from cflow.server.http.auth import ApiKeys
from harness.live import Live, error_of, read_all


@pytest.fixture
def live(serve: Any, tmp_path: Path) -> Live:
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nplain\n alice : s3cret \nclé\n", encoding="utf-8")
    live: Live = serve(api_keys=keys)
    return live


def ask(live: Live, *values: bytes) -> bytes:
    """The status line's code for GET /v1/models with these Authorization headers."""
    lines = b"".join(b"Authorization: " + value + b"\r\n" for value in values)
    sock = live.raw(
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n"
    )
    answer = read_all(sock)
    sock.close()
    return answer.split(b" ")[1]


@pytest.mark.parametrize(
    "value",
    [b"Bearer plain", b"bearer plain", b"BEARER s3cret", b"Bearer plain ", b"Bearer  plain",
     "Bearer clé".encode(), "Bearer clé".encode("latin-1")],
)  # fmt: skip
def test_right_keys(live: Live, value: bytes) -> None:
    assert ask(live, value) == b"200"


@pytest.mark.parametrize(
    "values",
    [(), (b"",), (b"Bearer",), (b"Bearer ",), (b"Bearer caf\xe9",), (b"Bearer \xff\xfe",),
     (b"Bearer wrong",), (b"Basic plain",), (b"plain",), (b"Bearer plain, Bearer s3cret",),
     (b"A" * 60_000,), (b"Bearer plain", b"Bearer plain"), (b"Bearer alice",), (b"Bearer plai",)],
    ids=range(14),
)  # fmt: skip
def test_everything_else(live: Live, values: tuple[bytes, ...]) -> None:
    assert ask(live, *values) == b"401"


def test_refusal(live: Live) -> None:
    for response in (
        live.complete(prompt="a"),
        live.client.get("/v1/nope"),
        live.client.get("/openapi.json"),
    ):
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path", ["/live", "/health", "/ready", "/metrics", "/version", "/status", "/", "/web/page.js"]
)
def test_probes_and_the_page_need_no_key(live: Live, path: str) -> None:
    assert live.client.get(path).status_code == 200


def test_the_keys_name_reaches_the_scheduler(live: Live) -> None:
    for key in ("s3cret", "plain"):
        headers = {"Authorization": f"Bearer {key}"}
        live.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert [call.request.key for call in live.engine.calls] == ["alice", "key-3"]


def test_several_keys_share_the_queue_and_one_has_it_alone(serve: Any, tmp_path: Path) -> None:
    for text, is_shared in (("alice: k\nbob: l\n", True), ("alice: k\n", False)):
        keys = tmp_path / "keys"
        keys.write_text(text)
        live: Live = serve(api_keys=keys)
        live.client.headers["Authorization"] = "Bearer k"
        assert live.complete(prompt="a").status_code == 200
        (request,) = live.engine.requests
        assert (request.key, request.shares_queue) == ("alice", is_shared)


def test_with_keys_nobody_overtakes(live: Live) -> None:
    headers = {"Authorization": "Bearer plain"}
    for path, ask in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        refused = live.client.post(path, json=ask | {"priority": -1}, headers=headers)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "priority")
        taken = live.client.post(path, json=ask | {"priority": 5}, headers=headers)
        assert taken.status_code == 200


def test_a_refused_body_is_not_waited_for(live: Live) -> None:
    sock = live.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n")
    assert sock.recv(12) == b"HTTP/1.1 401"
    sock.close()


def test_keys_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "keys"
    path.write_text("alice: s3cret\nbob: t0psecret\n")
    keys = ApiKeys(path)
    path.write_text("alice: n3wsecret\n")
    keys.reload()
    found = [keys.find(key) for key in (b"s3cret", b"t0psecret", b"n3wsecret")]
    assert found == [None, None, "alice"]
    path.write_text("")
    with pytest.raises(CflowError, match="no key"):
        keys.reload()
    assert keys.find(b"n3wsecret") == "alice"
    assert "alice" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "no key"), ("# x\n", "no key"), ("a: 1\na: 2\n", "line 2"), ("a:\n", "line 1")],
)
def test_bad_files(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(CflowError, match=named):
        ApiKeys(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CflowError, match="cannot read"):
        ApiKeys(tmp_path / "nope")
