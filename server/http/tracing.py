"""OpenTelemetry traces: a span a request, below it a span a prompt with its queue, prefill and decode.

Names of spans and attributes are vLLM's. Spans hold neither prompts nor answers. Needs the extra
`otel`; nothing imports this module unless an endpoint is set.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cflow.engine.base.errors import CflowError
from cflow.engine.base.messages import SamplingParams
from cflow.server.api.records import AnswerRecord, OnEnd
from cflow.server.http.auth import is_open
from cflow.server.http.http_metrics import METHODS

FLUSH_S = 3.0  # for unsent spans at shutdown; a dead collector must not delay it

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Exports spans in batches from a thread, by OTLP over HTTP."""

    def __init__(self, endpoint: str | None, version: str) -> None:
        """endpoint: for example http://collector:4318/v1/traces; None: as OTEL_EXPORTER_OTLP_* say.

        Raises CflowError if an OTEL_* variable is invalid."""
        name = os.environ.get("OTEL_SERVICE_NAME") or "cflow"
        resource = Resource.create({"service.name": name, "service.version": version})
        try:
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        except ValueError as error:
            raise CflowError(f"OpenTelemetry cannot use a setting of OTEL_*: {error}") from None
        self._tracer = self._provider.get_tracer("cflow", version)

    def watch(self, app: Starlette) -> None:
        """Trace requests, inside all middlewares that are added later."""
        app.add_middleware(TracedRequests, tracer=self._tracer)

    def follow(self, model: str, request_id: str, how: SamplingParams) -> OnEnd:
        """A function that makes the spans of an answer when it ends. Call within its request."""
        parent = context.get_current()
        asked = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.max_tokens": how.max_tokens,
            "gen_ai.request.temperature": how.temperature,
            "gen_ai.request.top_p": how.top_p,
            "gen_ai.response.model": model,
        }
        return lambda record: self._tell(record, parent, asked)

    def _tell(self, record: AnswerRecord, parent: Any, asked: dict[str, Any]) -> None:
        offset = time.time() - time.perf_counter()

        def at(moment: float) -> int:
            return round((moment + offset) * 1e9)

        attributes = asked | _facts(record)
        span = self._tracer.start_span(
            "llm_request", parent, attributes=attributes, start_time=at(record.arrived)
        )
        if "error" in record.reasons:
            span.set_status(StatusCode.ERROR)
        inside = trace.set_span_in_context(span, parent)
        for name, start, end in _phases(record):
            part = self._tracer.start_span(name, inside, start_time=at(start))
            part.end(at(end))
        span.end(at(record.ended))

    def close(self) -> None:
        """Export the remaining spans."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def _phases(record: AnswerRecord) -> list[tuple[str, float, float]]:
    """The phases that the answer reached, each with its start and end."""
    begun = [("queue", record.arrived), ("prefill", record.started), ("decode", record.first)]
    begun = [(name, start) for name, start in begun if start]
    ends = [*(start for _, start in begun[1:]), record.ended]
    return [(name, start, end) for (name, start), end in zip(begun, ends, strict=True)]


def _facts(record: AnswerRecord) -> dict[str, Any]:
    lasted = {name: end - start for name, start, end in _phases(record)}
    facts = {
        "gen_ai.request.n": len(record.n_tokens),
        "gen_ai.usage.num_sequences": len(record.n_tokens),
        "gen_ai.usage.prompt_tokens": record.n_prompt,
        "gen_ai.usage.completion_tokens": sum(record.n_tokens),
        "gen_ai.response.finish_reasons": record.reasons,
        "gen_ai.latency.time_in_queue": lasted["queue"],
        "gen_ai.latency.e2e": record.ended - record.arrived,
    }
    if record.started:
        facts["gen_ai.latency.time_in_model_inference"] = record.ended - record.started
        facts["gen_ai.latency.time_in_model_prefill"] = lasted["prefill"]
    if record.first:
        facts["gen_ai.latency.time_to_first_token"] = record.first - record.arrived
        facts["gen_ai.latency.time_in_model_decode"] = lasted["decode"]
    return facts


class TracedRequests:
    """ASGI middleware: a span around each authorised request, below the caller's span if the request
    has a traceparent."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self.tracer.start_as_current_span(
            method,
            _caller(scope),
            SpanKind.SERVER,
            {"http.request.method": method, "url.scheme": scope["scheme"]},
            record_exception=False,  # its text may quote the client
            set_status_on_exception=False,
        ) as span:
            try:
                await self.app(scope, receive, watch)
            finally:
                if path := getattr(scope.get("route"), "path", None):
                    span.update_name(f"{method} {path}")
                    span.set_attribute("http.route", path)
                if status:
                    span.set_attribute("http.response.status_code", status)
                if not status or status >= 500:
                    span.set_status(StatusCode.ERROR)


def _caller(scope: Scope) -> Any:
    """The caller's context from the first traceparent header; an invalid one is ignored."""
    found = (value for name, value in scope["headers"] if name == b"traceparent")
    return _propagator.extract({"traceparent": next(found, b"").decode("latin-1")})
