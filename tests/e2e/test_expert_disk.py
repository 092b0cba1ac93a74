"""Experts on a disk that goes bad and heals, under streams: nobody gets wrong text, nothing dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Model
from harness.servers import Server, assert_failed, kill, serving
from harness.waiting import until
from makefiles.shape_file import synth_model

FLAGS = ("--max-sequences", "16", "--expert-cache", "10%")
PROMPTS = [f"{i}: a text of its own" for i in range(6)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return synth_model(
        tmp_path / "tiny.cflow", "qwen3moe", n_layers=4, d_model=128, heads=(4, 2, 32),
        vocab_size=512, context=2048, tied=True,
        n_experts=32, top_k=4, d_expert=64, renormalise=True, qk_norm="head",
    )  # fmt: skip


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with serving(model, *FLAGS) as server:
        yield server


def ask(server: Server, prompt: str) -> list[dict[str, Any]]:
    fields = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True}
    return list(server.events("/v1/completions", fields))


def ask_all(server: Server) -> list[list[dict[str, Any]]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))


def text(events: list[dict[str, Any]]) -> str:
    assert events[-1] == {"done": True}
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def test_a_disk_that_goes_bad_and_heals(server: Server, model: Path) -> None:
    until(lambda: "12 of 128 experts in" in server.log)
    (worker,) = server.workers()
    clean = [text(events) for events in ask_all(server)]
    good = model.read_bytes()
    bank = ExpertBank.of(Model(str(model), header_only=True))
    with model.open("r+b") as file:
        file.seek(bank.offsets[0])
        file.write(bytes(bank.n_bytes))
    for events in ask_all(server):
        assert_failed(events, "io_error")
        assert ", expert " in events[-2]["error"]["message"]
    assert server.http.get("/health").json() == {"status": "failing"}
    assert server.status("/live") == 200
    response = server.http.post("/v1/completions", json={"prompt": PROMPTS[0], "temperature": 0})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "io_error"
    with model.open("r+b") as file:
        file.write(good)
    assert [text(events) for events in ask_all(server)] == clean
    assert server.status("/health") == 200
    assert server.workers() == [worker]
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("cflow_expert_faults_total") > 0


def test_counters_go_on_over_a_restart(server: Server) -> None:
    names = ("cache_misses", "evictions")

    def counters() -> list[float]:
        return [server.metric(f"cflow_expert_{name}_total") for name in names]

    ask_all(server)
    until(lambda: min(counters()) > 0)
    before = counters()
    (worker,) = server.workers()
    kill(worker)
    until(lambda: server.workers() not in ([], [worker]))
    server.ready()
    assert all(now >= then for now, then in zip(counters(), before, strict=True))
    ask_all(server)
    until(lambda: all(now > then for now, then in zip(counters(), before, strict=True)))
