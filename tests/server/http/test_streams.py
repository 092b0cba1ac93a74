"""The life of a stream: pings, failures after the 200, clients that leave, in every phase."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import TIMED_OUT, Delta, Finish, Progress
from cflow.server.http.sse import EventStream
from harness.fake_engine import Call, FakeEngine, logprob
from harness.live import Live, error_of, events, request
from harness.simulated_loop import SimulatedLoop
from harness.waiting import until


async def queued(call: Call) -> AsyncIterator[Delta | Progress]:
    """Never gets its turn."""
    await asyncio.Event().wait()
    yield Delta(0, 0, finish=Finish("stop"))


async def prefilling(call: Call) -> AsyncIterator[Delta | Progress]:
    """Has begun with a prompt that takes for ever."""
    yield Progress(0, 0)
    yield Progress(0, 2)
    await asyncio.Event().wait()


async def decoding(call: Call) -> AsyncIterator[Delta | Progress]:
    """Talks without end."""
    while True:
        for choice in range(call.n_choices):
            yield Delta(0, choice, (65,), "A")
        await asyncio.sleep(0.005)


async def failing(call: Call) -> AsyncIterator[Delta | Progress]:
    """Dies after three tokens."""
    for _ in range(3):
        yield Delta(0, 0, (65,), "A")
    raise EngineError("worker_died", "the engine died while answering")


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


def post(path: str, fields: dict[str, Any]) -> bytes:
    return request("POST", path, json.dumps(fields).encode())


class TestClientLeaves:
    @pytest.mark.parametrize("script", [queued, prefilling, decoding])
    @pytest.mark.parametrize(("path", "fields"), PATHS)
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("how", ["close", "half-close", "reset"])
    def test_its_answers_are_cancelled(
        self,
        live: Live,
        caplog: pytest.LogCaptureFixture,
        script: Any,
        path: str,
        fields: dict[str, Any],
        stream: bool,
        how: str,
    ) -> None:
        live.engine.script = script
        aborted = "vllm:request_success_total" + (
            '{engine="0",finished_reason="abort",model_name="fake/model"}'
        )
        before = live.metric(aborted)
        sock = live.raw(post(path, fields | {"stream": stream}))
        n_answers = 2 if isinstance(fields.get("prompt"), list) else 1
        until(lambda: len(live.engine.answers) == n_answers)
        if stream and script is decoding:
            sock.recv(1000)
        assert not any(answer.is_cancelled for answer in live.engine.answers)
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.close()
        until(lambda: all(a.is_cancelled for a in live.engine.answers))
        n_choices = n_answers * fields.get("n", 1)
        until(lambda: live.metric(aborted) == before + n_choices)
        sock.close()
        assert caplog.records == []

    def test_all_middlewares_let_the_leaving_through(self, serve: Any, tmp_path: Any) -> None:
        keys = tmp_path / "keys"
        keys.write_text("k\n")
        live: Live = serve(FakeEngine(decoding), api_keys=keys, access_log=True)
        body = json.dumps({"prompt": "a", "x": "y" * 100_000}).encode()  # a body that could linger
        sock = live.raw(request("POST", "/v1/completions", body, "Authorization: Bearer k"))
        until(lambda: len(live.engine.answers) == 1)
        sock.close()
        until(lambda: live.engine.answers[0].is_cancelled)

    def test_a_finished_answer_is_not_cancelled(self, live: Live) -> None:
        """A response ends after all that its handler might have cancelled."""
        for stream in (False, True):
            assert live.complete(prompt="ab", stream=stream).status_code == 200
        assert [a.is_cancelled for a in live.engine.answers] == [False, False]


class TestFailures:
    @pytest.mark.parametrize(("path", "fields"), [PATHS[0], PATHS[2]])
    def test_after_the_200_is_an_event_then_done(
        self, live: Live, path: str, fields: dict[str, Any]
    ) -> None:
        live.engine.script = failing
        chunks = events(live.post(path, fields | {"stream": True}))
        error = chunks[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "worker_died")
        assert set(error) == {"message", "type", "param", "code"}
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])

    @pytest.mark.parametrize(("path", "fields"), PATHS)
    def test_a_fault_of_ours_is_told_too_without_details(
        self, live: Live, path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def script(call: Call) -> AsyncIterator[Delta | Progress]:
            yield Delta(0, 0, (65,), "A")
            raise ValueError("a secret")

        live.engine.script = script
        response = live.post(path, fields | {"stream": True})
        error = events(response)[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal")
        assert "secret" not in response.text
        assert "a secret" in caplog.text

    @pytest.mark.parametrize(("path", "fields"), PATHS)
    def test_of_a_whole_answer_is_a_status(
        self, live: Live, path: str, fields: dict[str, Any]
    ) -> None:
        live.engine.script = failing
        response = live.post(path, fields)
        assert response.status_code == 503
        assert error_of(response)["code"] == "worker_died"
        assert response.headers["x-should-retry"] == "false"

    def test_of_one_prompt_cancels_the_others(self, live: Live) -> None:
        live.engine.script = lambda call: (failing if call.prompt == (97,) else decoding)(call)
        chunks = events(live.complete(prompt=["b", "a"], stream=True))
        assert chunks[-1]["error"]["code"] == "worker_died"
        assert live.engine.answers[0].is_cancelled

    @pytest.mark.parametrize(
        ("code", "status", "retry"),
        [("numeric", 500, "false"), ("internal", 500, "false"), ("draining", 503, "true"),
         ("io_error", 500, "false"), ("worker_stuck", 503, "false"), ("out_of_memory", 503, "false")],
    )  # fmt: skip
    def test_statuses(self, live: Live, code: str, status: int, retry: str) -> None:
        async def script(call: Call) -> AsyncIterator[Delta | Progress]:
            raise EngineError(code, "why")
            yield Progress(0, 0)

        live.engine.script = script
        response = live.complete(prompt="a")
        assert (response.status_code, response.headers["x-should-retry"]) == (status, retry)
        assert error_of(response)["code"] == code


class TestFraming:
    def test_headers(self, live: Live) -> None:
        response = live.chat(stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"

    def test_ignored_fields_are_listed_on_streams_too(self, live: Live) -> None:
        assert live.chat(stream=True, x=1).headers["x-cflow-ignored-params"] == "x"

    @pytest.mark.parametrize(
        ("script", "ping"),
        [(queued, b": ping, in the queue\n\n"), (prefilling, b": ping, 2 of 5 prompt tokens\n\n")],
    )
    def test_pings_before_the_first_token_say_why(
        self, serve: Any, script: Any, ping: bytes
    ) -> None:
        live: Live = serve(FakeEngine(script), ping=0.05)
        sock = live.raw(post("/v1/completions", {"prompt": "abcde", "stream": True}))
        answer = b""
        while answer.count(ping) < 5:
            answer += sock.recv(65536)
        sock.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"data:" not in answer

    def test_pings_tell_the_place_in_the_queue(self, serve: Any) -> None:
        live: Live = serve(FakeEngine(queued), ping=0.05)
        sock = live.raw(post("/v1/completions", {"prompt": ["a", "b"], "stream": True}))
        until(lambda: len(live.engine.answers) == 2)
        for n_ahead, answer in zip((7, 3), live.engine.answers, strict=True):
            answer.n_ahead = n_ahead
        data = b""
        while b": ping, in the queue, 3 ahead\n\n" not in data:
            data += sock.recv(65536)
        sock.close()

    def test_pings_come_only_while_no_tokens_do(self) -> None:
        """A second of tokens, five of silence, and a second of tokens, on a simulated clock."""

        async def chunks() -> AsyncGenerator[bytes, None]:
            for n, wait_s in ((100, 0.01), (1, 5), (100, 0.01)):
                for _ in range(n):
                    await asyncio.sleep(wait_s)
                    yield b"token"

        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(chunks(), on_gone=lambda: None, state=str, ping_s=0.5, headers={})
        with SimulatedLoop() as loop:
            loop.run_until_complete(stream({"type": "http"}, receive, send))
        pings = [i for i, body in enumerate(sent) if body.startswith(b": ping")]
        assert len(pings) == 9
        assert pings == list(range(pings[0], pings[0] + 9))
        assert pings[0] == 101  # behind the headers and the first hundred tokens
        assert sent.count(b"token") == 201

    def test_refusals_come_before_the_headers(self, live: Live) -> None:
        live.engine.refuse = EngineError("queue_full", "512 requests are waiting")
        response = live.chat(stream=True)
        assert response.status_code == 429
        error_of(response)


class TestTimeout:
    """The engine says TIMED_OUT when timeout_s is over."""

    @pytest.mark.parametrize(("path", "fields"), PATHS)
    def test_with_no_token_it_is_an_error(
        self, live: Live, path: str, fields: dict[str, Any]
    ) -> None:
        async def script(call: Call) -> AsyncIterator[Delta | Progress]:
            for choice in range(call.n_choices):
                yield Delta(0, choice, finish=TIMED_OUT)

        live.engine.script = script
        response = live.post(path, fields | {"timeout_s": 0.5})
        assert live.engine.calls[0].request.timeout_s == 0.5
        assert (response.status_code, response.headers["x-should-retry"]) == (503, "true")
        assert error_of(response)["code"] == "timeout"
        assert events(live.post(path, fields | {"stream": True}))[-1]["error"]["code"] == "timeout"

    @pytest.mark.parametrize("stream", [True, False])
    def test_what_there_is_is_the_answer(self, live: Live, stream: bool) -> None:
        async def script(call: Call) -> AsyncIterator[Delta | Progress]:
            if call.prompt == (97,):
                yield Delta(0, 0, (65,), "A")
                yield Delta(0, 0, text="B", finish=TIMED_OUT)
                return
            await asyncio.sleep(0.1)
            yield Delta(0, 0, finish=TIMED_OUT)

        live.engine.script = script
        response = live.complete(prompt=["a", "b"], stream=stream)
        chunks = events(response) if stream else [response.json()]
        texts, ends = ["", ""], {}
        for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
        assert texts == ["AB", ""]
        assert ends == {0: ("length", "timeout"), 1: ("length", "timeout")}

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_prompt_that_was_not_scored_in_time_is_echoed_without_scores(
        self, live: Live, stream: bool
    ) -> None:
        async def script(call: Call) -> AsyncIterator[Delta | Progress]:
            if call.prompt == (97,):
                yield Delta(0, 0, (65,), "A", (logprob(65, 1),), None, 0, (None,))
                yield Delta(0, 0, finish=TIMED_OUT)
                return
            await asyncio.sleep(0.1)
            for choice in range(call.n_choices):
                yield Delta(0, choice, finish=TIMED_OUT)

        live.engine.script = script
        response = live.complete(prompt=["a", "bc"], echo=True, logprobs=1, stream=stream)
        chunks = events(response) if stream else [response.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        (late,) = [choice for choice in choices if choice["index"] == 1]
        assert late["text"] == "bc"
        assert late["stop_reason"] == "timeout"
        assert late["logprobs"] == {
            "tokens": ["b", "c"],
            "token_logprobs": [None, None],
            "top_logprobs": [None, None],
            "text_offset": [0, 1],
        }


class TestProgress:
    """A prompt of which 4 tokens are cached, computed in two chunks."""

    @staticmethod
    async def script(call: Call) -> AsyncIterator[Delta | Progress]:
        n = len(call.prompt)
        for n_done in (4, 7, n):
            yield Progress(0, n_done)
        yield Delta(0, 0, (65,), "A", n_cached=4)
        yield Delta(0, 0, (66,), "B")
        yield Delta(0, 0, (67,), "C", finish=Finish("length"))

    @pytest.mark.parametrize(
        ("path", "fields"), [("/v1/completions", {"prompt": "x" * 10}), PATHS[2]]
    )
    def test_is_told_when_asked_for(self, live: Live, path: str, fields: dict[str, Any]) -> None:
        live.engine.script = self.script
        silent = events(live.post(path, fields | {"stream": True}))
        assert not any("prompt_progress" in chunk for chunk in silent)
        chunks = events(live.post(path, fields | {"stream": True, "return_progress": True}))
        told = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert [len(chunk["choices"]) for chunk in told] == [1, 1, 1]
        n = len(live.engine.calls[0].prompt)
        seen = [chunk["prompt_progress"] for chunk in told]
        assert all(progress.pop("time_ms") >= 0 for progress in seen)
        assert seen == [{"total": n, "cache": 4, "processed": done} for done in (4, 7, n)]
        assert len(chunks) == len(silent) + 3

    @pytest.mark.parametrize("usage", [False, True])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_timings_come_once_at_the_end(self, live: Live, path: str, usage: bool) -> None:
        live.engine.script = self.script
        fields = {"prompt": "x" * 10} if path == "/v1/completions" else PATHS[2][1]
        options = {"stream_options": {"include_usage": True}} if usage else {}
        whole = live.post(path, fields).json()
        chunks = events(live.post(path, fields | options | {"stream": True}))
        assert ["timings" in chunk for chunk in chunks[-3:]] == [False, False, True]
        n = len(live.engine.calls[0].prompt)
        for timings in (whole["timings"], chunks[-1]["timings"]):
            assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (
                4,
                n - 4,
                3,
            )
            assert timings["prompt_ms"] > 0
            assert timings["predicted_per_second"] == pytest.approx(2e3 / timings["predicted_ms"])
            assert timings["prompt_per_token_ms"] == pytest.approx(timings["prompt_ms"] / (n - 4))

    def test_timings_in_every_chunk(self, live: Live) -> None:
        chunks = events(live.complete(prompt="abc", stream=True, timings_per_token=True))
        assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3, 4]
        assert chunks[0]["timings"]["predicted_per_second"] is None

    def test_usage_so_far_in_every_chunk(self, live: Live) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(live.complete(prompt="abc", stream=True, stream_options=options))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
        alone = {"continuous_usage_stats": True}
        chunks = events(live.complete(prompt="abc", stream=True, stream_options=alone))
        assert all("usage" not in chunk for chunk in chunks)


def test_a_client_that_reads_nothing_is_dropped(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cflow.server.http.sse.STALL_S", 0.3)

    async def flood(call: Call) -> AsyncIterator[Delta | Progress]:
        while True:
            yield Delta(0, 0, (65,), "A" * 10_000)
            await asyncio.sleep(0)

    live: Live = serve(FakeEngine(flood), ping=0.1)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    sock.sendall(post("/v1/completions", {"prompt": "a", "stream": True}))
    until(lambda: bool(live.engine.answers) and live.engine.answers[0].is_cancelled)
    sock.close()
