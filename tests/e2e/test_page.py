"""The page in a real browser: Debian's Chromium, driven by playwright (`make test-page`)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.text.dialect import HERMES, Dialect
from cflow.server.config import server_config
from harness.fake_engine import READY, FakeEngine
from harness.live import Live
from harness.scripts import CALL, Template, say
from harness.servers import Server, serving
from harness.waiting import until

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `page`")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

FLAGS = ("--no-sandbox", "--disable-quic", "--disable-background-networking", "--no-first-run")
SIZES = {"desk": (1280, 800), "phone": (390, 844)}
REFUSED = "Failed to load resource"  # what the console says of a 400
ANSWER_MS = 60_000
SCREENSHOTS = os.environ.get("CFLOW_SCREENSHOTS")


@pytest.fixture(scope="module")
def story() -> Iterator[Server]:
    with serving(BUNDLED_FILE) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """open_page(server, size): whatever the browser complains of fails the test."""
    complaints: list[str] = []
    pages = []

    def make(server: Server | Scripted, size: str = "desk") -> Any:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height})

        def note(text: str, *expected: str) -> None:
            if not text.startswith(expected):
                complaints.append(text)

        page.on("console", lambda m: note(m.text, REFUSED))
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", lambda r: note(r.url, server.url))
        page.goto(server.url)
        sync_api.expect(page.locator("#state")).to_have_text("ready")
        pages.append(page)
        return page

    yield make
    for page in pages:
        page.close()
    assert not complaints


def answered(page: Any, n: int = 1) -> None:
    sync_api.expect(page.locator("#turns small")).to_have_count(n, timeout=ANSWER_MS)


def keep(page: Any, name: str) -> None:
    if SCREENSHOTS:
        page.wait_for_timeout(2500)  # of the curve
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


@pytest.mark.parametrize("size", SIZES)
def test_a_story_by_keyboard_alone(story: Server, open_page: Any, size: str) -> None:
    page = open_page(story, size)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("Once upon a time")
    page.keyboard.press("Enter")
    answered(page)
    text = page.locator("#turns li.assistant").inner_text()
    assert re.search(r"\w.*\n\d+ tokens, (stop|length)$", text, re.DOTALL)
    assert "tokens/s" in page.locator("#speed").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    if size == "phone":
        keep(page, "page-phone")


def test_escape_stops_the_answer_for_the_server_too(shared: Server, open_page: Any) -> None:
    page = open_page(shared)
    before = shared.metric("cflow_cancelled_total")
    page.locator("summary").click()
    page.fill("#max-tokens", "1500")
    page.fill("#temperature", "0")
    page.fill("#text", "Write a long story about a dragon.")
    page.press("#text", "Enter")
    sync_api.expect(page.locator("#turns li.assistant")).not_to_be_empty(timeout=ANSWER_MS)
    page.keyboard.press("Escape")
    answered(page)
    assert page.locator("#turns small").inner_text() == "stopped"
    assert page.locator("#send").is_enabled()
    until(lambda: shared.metric("cflow_cancelled_total") == before + 1)


def test_a_refusal_is_told_and_the_next_message_works(story: Server, open_page: Any) -> None:
    page = open_page(story)
    page.fill("#text", "word " * 400)
    page.press("#text", "Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert "256" in page.locator("#problem").inner_text()
    page.fill("#text", "The cat")
    page.press("#text", "Enter")
    answered(page)
    assert page.locator("#problem").is_hidden()


def test_figures_follow_the_engine(story: Server, open_page: Any) -> None:
    page = open_page(story)
    facts = page.locator("#facts").inner_text()
    assert "8 a layer" in facts
    assert "256 tokens" in facts
    page.fill("#text", "A dog")
    page.press("#text", "Enter")
    answered(page)
    expect = sync_api.expect(page.locator("#line"))
    expect.to_have_attribute("points", re.compile(r"\d,1( |$)"), timeout=ANSWER_MS)


def test_a_chat_of_two_turns_escapes_what_is_said(shared: Server, open_page: Any) -> None:
    page = open_page(shared)
    page.locator("summary").click()
    page.fill("#max-tokens", "16")
    page.fill("#temperature", "0")
    for n, text in enumerate(("<img src=x onerror=alert(1)> hello", "And again?"), 1):
        page.fill("#text", text)
        page.press("#text", "Enter")
        answered(page, n)
    assert page.locator("#turns li.user").first.inner_text().startswith("<img src=x")
    assert page.locator("#turns img").count() == 0
    assert page.evaluate("document.querySelectorAll('#turns li.assistant').length") == 2
    page.locator("summary").click()
    keep(page, "page-chat")


def test_a_key_is_asked_for(model: Path, start: Any, open_page: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: s3cret\n")
    page = open_page(start("--api-keys", str(tmp_path / "keys")).ready())
    page.fill("#text", "Hello")
    page.locator("summary").click()
    page.fill("#max-tokens", "4")
    page.fill("#key", "s3cret")
    page.press("#text", "Enter")
    answered(page)


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Scripted:
    """A server whose model says that, behind a sub-path."""

    def __init__(self, text: str) -> None:
        dialect = Dialect(HERMES, thinks=True)
        engine = FakeEngine(script=say(text), dialect=dialect, template=Template(""))
        engine.put(ready=structs.replace(READY, max_context=4000))
        self.live = Live(engine, server_config({"root_path": "/llm"}))
        self.url = f"http://127.0.0.1:{self.live.port}/llm/"


def test_f45_the_page_works_behind_a_sub_path_and_shows_reasoning_and_calls(open_page: Any) -> None:
    server = Scripted("<think>The user wants the weather.</think>I look." + CALL)
    try:
        page = open_page(server)
        page.locator("summary").click()
        page.fill("#tools", json.dumps([TOOL]))
        page.fill("#text", "Weather?")
        page.press("#text", "Enter")
        answered(page)
        turn = page.locator("#turns li.assistant")
        assert turn.locator(".reasoning").inner_text() == "Reasoning\nThe user wants the weather."
        assert turn.locator(".call").inner_text() == 'get_weather {"city": "Zürich"}'
        assert "I look." in turn.inner_text()
        page.fill("#text", "And now?")
        page.press("#text", "Enter")
        answered(page, 2)
        sent = server.live.engine.template.seen["messages"][1]
        assert sent["reasoning_content"] == "The user wants the weather."
        assert sent["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    finally:
        server.live.close()
