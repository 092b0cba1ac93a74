"""cflow batch: each line is done once, and what cannot be done is told."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError, EngineError
from cflow.engine.base.messages import Delta, Progress
from cflow.engine.files.hub import BUNDLED_FILE
from cflow.server.commands import batch_file
from harness.fake_engine import Call, FakeEngine
from harness.live import Live


def line(id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"prompt": id} | body}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({answer["custom_id"] for answer in found}) == len(found)
    return {answer["custom_id"]: answer for answer in found}


def run(live: Live, source: Path, target: Path, parallel: int = 2) -> None:
    url = f"http://127.0.0.1:{live.port}"
    batch_file.send(batch_file.read(source, target), target, url, None, parallel)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_line_gets_an_answer(live: Live, files: tuple[Path, Path]) -> None:
    source, target = files
    messages = [{"role": "user", "content": "x"}]
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": messages}}  # fmt: skip
    write(source, line("a"), line("b", temperature=9), "", chat)
    run(live, source, target)
    found = answers(target)
    assert found.keys() == {"a", "b", "c"}
    assert found["a"]["response"]["status_code"] == 200
    assert found["a"]["response"]["body"]["choices"][0]["text"]
    assert found["a"]["response"]["request_id"]
    assert found["a"]["error"] is None
    assert found["b"]["response"]["status_code"] == 400
    assert found["b"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["c"]["response"]["body"]["object"] == "chat.completion"
    assert {request.priority for request in live.engine.requests} == {batch_file.LOWEST}


def test_no_line_is_done_twice(live: Live, files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, line("a"), line("b"))
    run(live, source, target)
    write(source, line("a"), line("b"), line("c"))
    with open(target, "a") as file:
        file.write('{"custom_id": "c", "resp')  # the writer was killed here
    run(live, source, target)
    assert answers(target).keys() == {"a", "b", "c"}
    assert len(live.engine.requests) == 3
    run(live, source, target)
    assert len(live.engine.requests) == 3


def test_what_the_server_could_not_answer_is_done_by_the_next_run(
    serve: Any, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(call: Call) -> AsyncIterator[Delta | Progress]:
        raise EngineError("io_error", "the disk")
        yield

    monkeypatch.setattr(batch_file, "MAX_WAIT_S", 0.0)
    source, target = files
    write(source, line("a"))
    engine = FakeEngine(script=fail)
    with pytest.raises(CflowError, match="1 requests got no answer"):
        run(serve(engine), source, target)
    assert len(engine.requests) == batch_file.TRIES
    assert answers(target)["a"]["error"]["code"] == "500"
    run(serve(), source, target)
    assert answers(target)["a"]["response"]["status_code"] == 200


def test_a_full_queue_is_waited_for(
    live: Live, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Semaphore(0)

    def sleep(seconds: float) -> None:
        assert seconds >= 1
        waited.release()
        if waited._value > batch_file.TRIES:
            live.engine.put(state="ready")

    source, target = files
    write(source, line("a"))
    monkeypatch.setattr(batch_file, "_post", _full_first(batch_file._post, 7))
    monkeypatch.setattr("time.sleep", sleep)
    run(live, source, target)
    assert answers(target)["a"]["response"]["status_code"] == 200
    assert waited._value == 7


def _full_first(post: Any, n: int) -> Any:
    """post(), after n answers that the queue is full."""
    left = [n]

    def full(request: Any) -> Any:
        left[0] -= 1
        return (429, {"body": "full"}, 3.0) if left[0] >= 0 else post(request)

    return full


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
        (json.dumps(line("a")), "is that of line 1 too"),
        (json.dumps(line("b") | {"custom_id": 5}), "custom_id must be a text"),
        (json.dumps(line("b", "/v1/files")), "method and url must be"),
        (json.dumps(line("b") | {"method": "GET"}), "method and url must be"),
        (json.dumps(line("b") | {"body": []}), "body must be an object"),
        (json.dumps(line("b", stream=True)), "stream must be left out"),
        ("[" * 99999, "line 2 is not JSON"),
    ],
)
def test_a_faulty_line_is_named_before_any_is_sent(
    files: tuple[Path, Path], text: str, named: str
) -> None:
    source, target = files
    write(source, line("a"), text)
    with pytest.raises(CflowError, match=named):
        batch_file.read(source, target)
    assert not target.exists()


def test_another_file_is_not_overwritten(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, line("a"))
    target.write_text("my notes\nof today\n")
    with pytest.raises(CflowError, match="line 1 is not JSON"):
        batch_file.read(source, target)
    assert target.read_text() == "my notes\nof today\n"


def test_an_engine_of_its_own(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, line("a", prompt="Once", max_tokens=4, seed=1), line("b", max_tokens=4))
    work = batch_file.read(source, target)
    batch_file.send_to_own_engine(work, target, EngineConfig(model=str(BUNDLED_FILE)), 2)
    found = answers(target)
    assert [found[id]["response"]["body"]["usage"]["completion_tokens"] for id in "ab"] == [4, 4]
