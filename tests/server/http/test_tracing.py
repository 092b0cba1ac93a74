"""Spans, as a collector gets them over OTLP/HTTP."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cflow.engine.base.errors import CflowError, EngineError
from cflow.engine.base.messages import Delta, Progress
from cflow.server.config import server_config
from cflow.server.http.app import create_app
from harness.fake_engine import Call, FakeEngine, shout
from harness.live import Live, events, read_all, request

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, ERROR = 2, 2  # SpanKind, StatusCode


class Collector:
    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans_of(self, live: Live) -> list[Any]:
        """All of a server that takes no more requests."""
        live.tracing.close()
        parts = [part for r in self.requests for part in r.resource_spans]
        return [span for part in parts for scope in part.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture
def traced(serve: Any, collector: Collector) -> Any:
    """traced(engine, **settings): a server that tells the collector."""
    endpoint = f"{collector.url}/v1/traces"
    return lambda engine=None, **settings: serve(
        engine or FakeEngine(), otlp_traces_endpoint=endpoint, **settings
    )


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def children(spans: list[Any], parent: Any) -> dict[str, Any]:
    return {span.name: span for span in spans if span.parent_span_id == parent.span_id}


def test_a_request_its_answer_and_its_phases(traced: Any, collector: Collector) -> None:
    live = traced()
    body = {"prompt": "abc", "stream": True, "temperature": 0.5, "top_p": 0.9, "max_tokens": 9}
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
    assert events(live.client.post("/v1/completions", json=body, headers=headers))
    spans = collector.spans_of(live)
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (whole,) = [span for span in spans if span.parent_span_id.hex() == CALLER]
    assert (whole.name, whole.kind) == ("POST /v1/completions", SERVER)
    assert attributes(whole)["http.response.status_code"] == 200
    assert whole.status.code != ERROR
    (answer,) = children(spans, whole).values()
    assert answer.name == "llm_request"
    said = attributes(answer)
    latency = {k: v for k, v in said.items() if k.startswith("gen_ai.latency.")}
    assert {k: v for k, v in said.items() if k not in latency} == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.model": "fake/model",
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 3,
    }
    phases = children(spans, answer)
    assert list(phases) == ["queue", "prefill", "decode"]
    moments = [answer.start_time_unix_nano]
    for phase in phases.values():
        moments += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    moments.append(answer.end_time_unix_nano)
    assert moments == sorted(moments)
    assert moments[0::2] == moments[1::2]  # each begins where the last one ends
    lasted = {
        name: (p.end_time_unix_nano - p.start_time_unix_nano) / 1e9 for name, p in phases.items()
    }
    assert {name.removeprefix("gen_ai.latency."): value for name, value in latency.items()} == {
        "time_in_queue": pytest.approx(lasted["queue"], abs=1e-5),
        "time_in_model_prefill": pytest.approx(lasted["prefill"], abs=1e-5),
        "time_in_model_decode": pytest.approx(lasted["decode"], abs=1e-5),
        "time_in_model_inference": pytest.approx(lasted["prefill"] + lasted["decode"], abs=1e-5),
        "time_to_first_token": pytest.approx(lasted["queue"] + lasted["prefill"], abs=1e-5),
        "e2e": pytest.approx(sum(lasted.values()), abs=1e-5),
    }


def test_each_prompt_has_its_answer(traced: Any, collector: Collector) -> None:
    live = traced()
    assert live.complete(prompt=["ab", "abc"], n=2).status_code == 200
    answers = [s for s in collector.spans_of(live) if s.name == "llm_request"]
    assert sorted(attributes(s)["gen_ai.usage.completion_tokens"] for s in answers) == [6, 8]
    assert len({span.parent_span_id for span in answers}) == 1


def test_an_answer_that_fails_and_a_fault_of_ours(traced: Any, collector: Collector) -> None:
    async def fail(_call: Call) -> AsyncIterator[Delta | Progress]:
        raise EngineError("numeric", "not finite")
        yield

    async def crash(_call: Call) -> AsyncIterator[Delta | Progress]:
        raise ZeroDivisionError("of a secret")
        yield

    engine = FakeEngine(script=fail)
    live = traced(engine)
    assert live.complete(prompt="ab").status_code == 500
    engine.script = crash
    assert live.complete(prompt="ab").status_code == 500
    spans = collector.spans_of(live)
    requests = [span for span in spans if span.kind == SERVER]
    assert [span.status.code for span in requests] == [ERROR, ERROR]
    failed = next(span for span in spans if span.name == "llm_request")
    assert failed.status.code == ERROR
    assert attributes(failed)["gen_ai.response.finish_reasons"] == ["error"]
    assert list(children(spans, failed)) == ["queue"]
    assert "secret" not in str(spans)


def test_what_is_not_let_in_and_probes_leave_none(
    traced: Any, collector: Collector, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    live = traced(api_keys=keys)
    for path in ("/health", "/metrics", "/"):
        assert live.client.get(path).status_code == 200
    assert live.complete(prompt="a").status_code == 401
    assert collector.spans_of(live) == []


@pytest.mark.parametrize(
    "header",
    [
        b"traceparent: nonsense",
        b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
        b"traceparent: \xff\\x",
        b"user-agent: \xff\\x",
        b"tracestate: " + b"\xfe=," * 100,
    ],
)
def test_hostile_headers_change_nothing(
    traced: Any, collector: Collector, header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    live = traced()
    head = request("GET", "/v1/models", b"", "Connection: close").removesuffix(b"\r\n")
    with live.raw(head + header + b"\r\n\r\n") as sock:
        assert read_all(sock).startswith(b"HTTP/1.1 200")
    with live.raw(request("BREW", "/x/1234", b"", "Connection: close")) as sock:
        read_all(sock)
    spans = collector.spans_of(live)
    assert "GET /v1/models" in [span.name for span in spans]
    assert {span.parent_span_id for span in spans} == {b""}
    assert "1234" not in str(spans)
    assert not caplog.records


def test_the_standard_variables_hold(
    serve: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "stories")
    live = serve(FakeEngine(script=shout))
    assert live.complete(prompt="a").status_code == 200
    assert collector.spans_of(live)
    (item,) = {
        a.value.string_value
        for r in collector.requests
        for part in r.resource_spans
        for a in part.resource.attributes
        if a.key == "service.name"
    }
    assert item == "stories"
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-3")
    with pytest.raises(CflowError, match=r"OTEL_.*max_queue_size"):
        create_app(server_config({}), FakeEngine())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    config = server_config({"otlp_traces_endpoint": "http://127.0.0.1:1/v1/traces"})
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "cflow.server.http.tracing", raising=False)
    with pytest.raises(CflowError, match=r"needs opentelemetry.*pip install 'cflow\[otel\]'"):
        create_app(config, FakeEngine())


def test_nothing_is_traced_unless_asked_for(live: Live) -> None:
    assert live.complete(prompt="a").status_code == 200
    assert live.tracing is None
