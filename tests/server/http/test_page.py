"""The page: its files, what it asks for, and that nothing of it comes from elsewhere."""

import re

import pytest

from cflow.server.http.auth import is_open
from harness.fake_engine import READY, FakeEngine
from harness.live import Live, error_of

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = ("/", "/web/page.css", "/web/page.js", "/web/icon.svg")


def test_root_is_a_page_for_browsers_and_json_for_programs(live: Live) -> None:
    page = live.client.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>cflow</title>" in page.text
    assert live.client.get("/").json()["model"] == "fake/model"


def test_programs_are_told_all_there_is_to_call(live: Live) -> None:
    said = live.client.get("/").json()
    described = set(live.client.get(said["openapi"]).json()["paths"])
    assert set(said["api"]) == {path for path in described if not is_open(path)}
    assert {"/v1/chat/completions", "/v1/responses", "/detokenize"} <= set(said["api"])
    assert len(set(said["api"])) == len(said["api"])


@pytest.mark.parametrize("path", FILES)
def test_nothing_is_allowed_that_is_not_this_server(live: Live, path: str) -> None:
    answer = live.client.get(path, headers=HTML)
    assert answer.status_code == 200
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy.pop("default-src") == policy.pop("frame-ancestors") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    addresses = re.findall(r"(?:https?:)?//[\w.-]+", answer.text.replace("http://www.w3.org", ""))
    assert not [found for found in addresses if found.startswith(("http", "//")) and "." in found]
    assert not re.search(r"""\son\w+=|style=|javascript:|<script(?![^>]*\ssrc=)""", answer.text)


def test_what_the_page_names_is_served(live: Live) -> None:
    text = live.client.get("/", headers=HTML).text
    named = set(re.findall(r'(?:src|href)="([^"]+)"', text))
    assert {f"/{name}" for name in named} >= set(FILES) - {"/"}
    for name in named:
        assert live.client.get(f"/{name}").status_code == 200, name


def test_the_metrics_it_shows_are_exported(live: Live) -> None:
    script = live.client.get("/web/page.js").text
    named = set(re.findall(r'"((?:cflow_|vllm:)\w+)', script))
    exported = set(re.findall(r"^([\w:]+)[{ ]", live.client.get("/metrics").text, re.MULTILINE))
    assert len(named) >= 10
    assert named <= exported


@pytest.mark.parametrize("name", ["nope", "..%2fapp.py", "%2e%2e/app.py", "__init__.py"])
def test_no_other_file(live: Live, name: str) -> None:
    answer = live.client.get(f"/web/{name}")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


def test_status(serve: object) -> None:
    live: Live = serve(FakeEngine(top_k=2))  # type: ignore[operator]
    found = live.client.get("/status").json()
    assert found["state"] == "ready"
    model = found["model"]
    assert (model["name"], model["context"], model["layers"]) == ("fake/model", 64, 2)
    assert (model["experts"], model["top_k"], model["bytes_per_token"]) == (8, 2, 1000)
    assert model["chat"] is True
    assert found["machine"]["threads"] == READY.n_threads
    live.engine.put(state="loading", ready=None)
    found = live.client.get("/status").json()
    assert (found["state"], found["machine"]) == ("loading", None)
