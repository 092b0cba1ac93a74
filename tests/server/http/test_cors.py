"""Pages of other origins: let in where the operator says so, and only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.fake_engine import FakeEngine
from harness.live import Live

UI = "http://ui.test"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture
def live(serve: Any, tmp_path: Path) -> Live:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    live: Live = serve(FakeEngine(), api_keys=keys, cors_origins=(UI, "https://b.test:8443"))
    return live


def preflight(live: Live, origin: str) -> Any:
    headers = PREFLIGHT | {"Origin": origin}
    return live.client.options("/v1/chat/completions", headers=headers)


def test_a_preflight_needs_no_key(live: Live) -> None:
    response = preflight(live, UI)
    assert response.status_code in (200, 204)
    assert response.headers["access-control-allow-origin"] == UI
    allowed = response.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "content-type" in allowed
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("stream", [True, False])
def test_answers_and_refusals_say_so_too(live: Live, stream: bool) -> None:
    ask = {"prompt": "a", "stream": stream}
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {"Origin": UI, "Authorization": f"Bearer {key}"}
        response = live.client.post("/v1/completions", json=ask, headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == UI


@pytest.mark.parametrize("origin", ["http://evil.test", "http://ui.test.evil", "null", "*"])
def test_other_origins_get_nothing(live: Live, origin: str) -> None:
    headers = {"Origin": origin, "Authorization": "Bearer k"}
    answer = live.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    for response in (preflight(live, origin), answer):
        assert "access-control-allow-origin" not in response.headers


def test_all_origins(serve: Any) -> None:
    live: Live = serve(FakeEngine(), cors_origins=("*",))
    response = live.client.get("/v1/models", headers={"Origin": "http://any.test"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers


def test_off_by_default(serve: Any) -> None:
    live: Live = serve()
    assert preflight(live, UI).status_code == 405
    response = live.client.get("/v1/models", headers={"Origin": UI})
    assert "access-control-allow-origin" not in response.headers
