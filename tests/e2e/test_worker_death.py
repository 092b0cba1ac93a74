"""The worker dies, hangs, or loses its front end; the server lives on, or nothing is left."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cflow.engine.files.hub import BUNDLED_FILE
from harness.servers import LONG, Server, Stream, assert_failed, is_alive, kill, serving
from harness.waiting import until
from oracles.random_model import RandomModel


def test_killed_under_load(start: Callable[..., Server]) -> None:
    server = start().ready()
    text = server.complete("The capital of France is", max_tokens=8)["choices"][0]["text"]
    counters = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "cflow_read_bytes_total",
    )
    streams = [Stream(server) for _ in range(4)]
    until(lambda: all(len(s.events) > 5 for s in streams))
    before = {name: server.metric(name) for name in counters}
    (worker,) = server.workers()
    kill(worker)
    for stream in streams:
        assert_failed(stream.join(), "worker_died")
    server.ready()
    answer = server.complete("The capital of France is", max_tokens=8)
    assert answer["choices"][0]["text"] == text
    assert server.metric("cflow_worker_restarts_total") == 1
    assert all(server.metric(name) >= value for name, value in before.items())
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    assert all(math.isfinite(sample.value) for family in families for sample in family.samples)
    assert server.workers() != [worker]
    assert len(server.workers()) == 1


def test_killed_while_idle_and_during_a_prompt(start: Callable[..., Server]) -> None:
    server = start().ready()
    kill(server.workers()[0])
    until(lambda: server.status("/health") == 503)
    server.ready()
    stream = Stream(server, prompt=[100] * 2000, max_tokens=10)
    until(lambda: server.metric("vllm:num_requests_running") > 0 or bool(stream.events))
    kill(server.workers()[0])
    events = stream.join()
    assert events[-1] == {"done": True}
    server.ready()
    assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_whole_answer_fails_with_a_status(start: Callable[..., Server]) -> None:
    server = start().ready()
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(server.http.post("/v1/completions", json=LONG).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: server.metric("vllm:num_requests_running") == 1)
    kill(server.workers()[0])
    thread.join()
    assert statuses == [503]


def test_stopped_worker_is_found_and_replaced(start: Callable[..., Server]) -> None:
    server = start().ready()
    stream = Stream(server)
    until(lambda: len(stream.events) > 3)
    (worker,) = server.workers()
    os.kill(worker, signal.SIGSTOP)
    assert server.status("/live") == 200
    assert_failed(stream.join(), "worker_stuck")
    server.ready()
    assert not is_alive(worker)
    assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_file_replaced_meanwhile_is_not_asked_with_the_old_ones_tokens(tmp_path: Path) -> None:
    model, kept = tmp_path / "m.cflow", tmp_path / "kept.cflow"
    shutil.copy(BUNDLED_FILE, model)
    with serving(model) as server:
        before = server.complete("Once upon a time", max_tokens=8)["choices"]
        model.rename(kept)
        RandomModel([{}]).write(model)
        formed = server.complete("x", max_tokens=8, guided_choice=["yes", "no"])
        assert formed["choices"][0]["text"] in ("yes", "no")
        kill(server.workers()[0])
        until(lambda: "m.cflow is no longer the file" in server.log)
        assert server.status("/health") == 503
        kept.replace(model)
        assert server.ready().complete("Once upon a time", max_tokens=8)["choices"] == before


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_worker_outlives_a_killed_front_end(start: Callable[..., Server], is_busy: bool) -> None:
    server = start().ready()
    thread = threading.Thread(target=_ignore_errors, args=(server,)) if is_busy else None
    if thread:
        thread.start()
        until(lambda: server.metric("vllm:num_requests_running") > 0)
    (worker,) = server.workers()
    kill(server.process.pid)
    until(lambda: not is_alive(worker))
    if thread:
        thread.join()


def _ignore_errors(server: Server) -> None:
    try:
        server.http.post("/v1/completions", json=LONG | {"n": 16})
    except Exception as error:  # the connection breaks, in one of several ways
        print(error)
