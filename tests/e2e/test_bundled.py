"""`cflow serve` with neither network nor cache: the bundled model answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cflow.engine.files.hub import BUNDLED_FILE
from harness.servers import Server
from oracles.forward import Forward
from oracles.model_file import ModelFile

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = tmp_path_factory.mktemp("cache")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(cache)}
    server = Server(None, "--precision", "f32", environment=environment).ready()
    yield server
    server.stop()


def test_the_default_model_gives_way_and_says_so(offline: Server) -> None:
    assert "cannot fetch smollm2-135m" in offline.log
    assert "serving tinystories instead" in offline.log
    (model,) = offline.http.get("/v1/models").json()["data"]
    assert model["id"] == "tinystories"


def test_a_story_streams_and_is_what_the_oracle_tells(offline: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24}
    events = list(offline.events("/v1/completions", body))
    assert events[-1] == {"done": True}
    text = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
    assert text == offline.complete(PROMPT, max_tokens=24)["choices"][0]["text"]

    file = ModelFile(BUNDLED_FILE)
    ids = offline.post("/tokenize", {"content": PROMPT})["tokens"]
    told = offline.post("/tokenize", {"content": PROMPT + text})["tokens"]
    for n in range(len(ids), len(ids) + 6):
        assert told[n] == int(Forward(file, told[:n]).logits[-1].argmax())
