"""Probes, admission while the engine cannot serve, models, tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import Loading
from cflow.engine.client.engine import State
from cflow.server.meter import Meter
from harness.fake_engine import BOS, EOS, READY, FakeEngine
from harness.live import Live, error_of

PROBES = {
    # state: status of /live, /health, /ready
    "ready": (200, 200, 200),
    "loading": (200, 503, 503),
    "restarting": (200, 503, 503),
    "stuck": (200, 503, 503),
    "draining": (200, 200, 503),
    "closed": (200, 503, 503),
}


@pytest.mark.parametrize("state", PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes(live: Live, state: State, method: str) -> None:
    live.engine.put(state=state)
    paths = ("/live", "/health", "/ready")
    answers = [live.client.request(method, path) for path in paths]
    assert tuple(a.status_code for a in answers) == PROBES[state]
    if method == "GET":
        assert answers[2].json()["status"] == ("ok" if state == "ready" else state)


def test_a_broken_disk_shows(live: Live) -> None:
    live.engine.put(is_failing=True)
    answers = [live.client.get(path) for path in ("/live", "/health", "/ready")]
    assert [a.status_code for a in answers] == [200, 503, 503]
    assert answers[1].json() == {"status": "failing"}
    live.engine.put(state="loading")
    assert live.client.get("/health").json() == {"status": "loading"}


def test_loading_shows_progress(live: Live) -> None:
    live.engine.put(state="loading", loading=Loading("weights", 30, 120))
    body = live.client.get("/health").json()
    assert (body["done_bytes"], body["total_bytes"]) == (30, 120)


@pytest.mark.parametrize("state", ["loading", "restarting", "stuck", "draining", "closed"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"]
)
def test_requests_are_refused_with_a_time_to_come_back(live: Live, state: State, path: str) -> None:
    live.engine.put(state=state)
    response = live.client.get(path) if path == "/v1/models" else live.post(path, {"bad": 1})
    assert response.status_code == 503
    assert error_of(response)["code"] == state
    assert error_of(response)["type"] == "server_error"
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert (response.headers.get("connection") == "close") == (state in ("draining", "closed"))


def test_full_queue(live: Live) -> None:
    live.engine.refuse = EngineError("queue_full", "512 requests are waiting; at most 512 may")
    live.engine.put(queue_depth=10**9)
    response = live.complete(prompt="a")
    assert response.status_code == 429
    error = error_of(response)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(response.headers["retry-after"]) <= 120


def test_retry_after_follows_the_rate_since_the_queue_began(serve: Any) -> None:
    live: Live = serve()
    live.complete(prompt="a", max_tokens=1)  # long ago
    now = [1000.0]
    live.metrics.finished = Meter(60, lambda: now[0])
    live.complete(prompt="a", max_tokens=1)  # the queue is empty: this begins the time
    now[0] = 1009.0
    live.engine.put(queue_depth=20)
    for _ in range(4):
        live.complete(prompt="a", max_tokens=1)
    live.engine.refuse = EngineError("queue_full", "full")
    # 5 answers in 10 seconds
    assert int(live.complete(prompt="a").headers["retry-after"]) == 40
    live.engine.refuse = None
    live.complete(prompt=["a", "b"], n=10, max_tokens=1)
    live.engine.refuse = EngineError("queue_full", "full")
    # 25 of them: it is answers that wait, and answers that end
    assert int(live.complete(prompt="a").headers["retry-after"]) == 8


def test_more_answers_than_ever_fit_are_not_worth_a_retry(live: Live) -> None:
    live.engine.refuse = EngineError("too_many_answers", "6 answers; this server has room for 5")
    response = live.complete(prompt=["a", "b", "c"], n=2)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", "n")
    assert "retry-after" not in response.headers


def test_a_worker_that_dies_between_check_and_submit(live: Live) -> None:
    live.engine.refuse = EngineError("worker_died", "the engine is being restarted")
    response = live.complete(prompt="a")
    assert response.status_code == 503
    assert "retry-after" in response.headers


def test_all_prompts_are_one_request_of_the_engine(live: Live) -> None:
    assert live.complete(prompt=["a", "b", "c"], n=2).status_code == 200
    (request,) = live.engine.requests
    assert (list(request.prompts), request.n_choices) == ([(97,), (98,), (99,)], 2)


def test_f28_models_say_the_served_and_the_trained_context(live: Live) -> None:
    body = live.client.get("/v1/models").json()
    assert body["object"] == "list"
    model = body["data"][0]
    assert (model["id"], model["object"], model["owned_by"]) == ("fake/model", "model", "cflow")
    assert model["max_model_len"] == 64  # what the worker can, not what the model could
    assert model["meta"]["n_ctx_train"] == 512
    assert model["meta"]["pooling"] is None  # not a model for embeddings
    assert model["context_length"] == model["max_model_len"]
    assert live.client.get("/v1/models/fake/model").json() == model
    missing = live.client.get("/v1/models/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_tokenize_as_llama_server(live: Live) -> None:
    assert live.post("/tokenize", content="aé").json() == {"tokens": [97, 195, 169]}
    pieces = live.post("/tokenize", content="aé", with_pieces=True).json()["tokens"]
    assert pieces[0] == {"id": 97, "piece": "a"}
    assert pieces[1] == {"id": 195, "piece": "bytes:\\xc3"}
    assert live.post("/tokenize", content="").json() == {"tokens": []}


def test_tokenize_as_vllm(live: Live) -> None:
    body = live.post("/tokenize", prompt="ab").json()
    assert body == {"tokens": [97, 98], "count": 2, "max_model_len": 64}
    chat = live.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert bytes(chat["tokens"]).decode() == "user:x|assistant:"
    assert chat["count"] == len(chat["tokens"])


@pytest.mark.parametrize("fields", [{}, {"content": "a", "prompt": "b"}, {"content": 5}])
def test_tokenize_needs_one_source(live: Live, fields: dict[str, Any]) -> None:
    assert error_of(live.post("/tokenize", fields))["type"] == "invalid_request_error"


def test_detokenize(live: Live) -> None:
    body = live.post("/detokenize", tokens=[97, 195, 169, 257]).json()
    assert body == {"content": "aé</s>", "prompt": "aé</s>"}
    assert live.post("/detokenize", tokens=[]).json()["content"] == ""
    for tokens in ([258], [-1], ["a"], None, [True]):
        response = live.post("/detokenize", {"tokens": tokens})
        assert response.status_code == 400
        assert (error_of(response)["param"] or "").startswith("tokens")


def test_tokenizer_info_names_what_tokenizes_as_itself(live: Live) -> None:
    object.__setattr__(live.engine.card, "metadata", {"chat_template": "{{ messages }}"})
    info = live.client.get("/tokenizer_info").json()
    assert info == {
        "bos_token": None,
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
        "model_max_length": 64,
    }
    assert live.post("/tokenize", content=info["eos_token"]).json() == {"tokens": [EOS]}
    live.engine.card.tokenizer.bos_id = BOS
    assert live.client.get("/tokenizer_info").json()["bos_token"] == "<s>"


def test_version(live: Live) -> None:
    assert isinstance(live.client.get("/version").json()["version"], str)


def test_context_is_the_models_until_the_worker_says(serve: Any) -> None:
    live: Live = serve(FakeEngine())
    live.engine.put(ready=msgspec.structs.replace(READY, max_context=32))
    assert live.complete(prompt="x" * 40).status_code == 400
    live.engine.put(ready=None)
    assert live.complete(prompt="x" * 40).status_code == 200
