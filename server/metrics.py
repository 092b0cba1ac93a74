"""What the server counts, in Prometheus form: vLLM's names where they apply, cflow_ elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cflow.engine.engine import Engine
from cflow.server.meter import Meter

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
WHOLE_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
CHOICES = (1, 2, 5, 10, 20)
LABELS = ("model_name", "engine")
ENGINE = "0"
FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("queue_full", "loading", "restarting", "stuck", "draining")


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most) or (1,)


class Metrics:
    """Everything /metrics shows, in a registry of its own. Counters only ever rise."""

    def __init__(self, engine: Engine) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.tokens = Meter(10)  # generated
        self.finished = Meter(60)  # requests, however they ended
        ProcessCollector(registry=self.registry)
        self._make_http()
        self._make_requests(engine.card.name, engine.card.context)
        self.registry.register(EngineCollector(engine, self.tokens))

    def _make_http(self) -> None:
        labels = ("handler", "method")
        self.http_requests = Counter(
            "http_requests", "HTTP requests.", (*labels, "status"), registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time until the last byte of the answer.",
            labels,
            buckets=WHOLE_S,
            registry=self.registry,
        )
        self.rejections = Counter(
            "cflow_queue_rejections", "Requests not taken.", ("reason",), registry=self.registry
        )
        for reason in REJECTION_REASONS:
            self.rejections.labels(reason=reason)

    def _make_requests(self, model: str, context: int) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
            return family.labels(model, ENGINE)

        tokens = token_buckets(context)
        self.received = Counter(
            "cflow_requests_received",
            "Answers asked for: prompts times n.",
            LABELS,
            registry=self.registry,
        ).labels(model, ENGINE)
        success = Counter(
            "vllm:request_success",
            "Answers that are over, by how they ended.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.over = {reason: success.labels(model, ENGINE, reason) for reason in FINISHED_REASONS}
        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S
        )
        self.between_tokens_s = histogram(
            "vllm:inter_token_latency_seconds", "From a token to the next.", BETWEEN_TOKENS_S
        )
        self.per_token_s = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of the tokens after the first.",
            BETWEEN_TOKENS_S,
        )
        self.whole_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", WHOLE_S)
        self.queue_s = histogram("vllm:request_queue_time_seconds", "Arrival to start.", WHOLE_S)
        self.inference_s = histogram(
            "vllm:request_inference_time_seconds", "Start to end.", WHOLE_S
        )
        self.prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "Start to first token.", WHOLE_S
        )
        self.decode_s = histogram(
            "vllm:request_decode_time_seconds", "First token to end.", WHOLE_S
        )
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", tokens)
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", tokens
        )
        self.most_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice.", tokens
        )
        self.max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", tokens
        )
        self.n_choices = histogram("vllm:request_params_n", "n of a request.", CHOICES)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's own totals and gauges, read when somebody asks."""

    def __init__(self, engine: Engine, tokens: Meter) -> None:
        self._engine = engine
        self._tokens = tokens
        self._labels = (engine.card.name, ENGINE)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._totals()
        yield from self._gauges()
        yield from self._memory()

    def _totals(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, value, text in (
            ("vllm:prompt_tokens", stats.prompt_tokens, "Prompt tokens taken in."),
            ("vllm:generation_tokens", stats.generation_tokens, "Tokens generated."),
            ("vllm:prefix_cache_queries", stats.prefix_queries, "Prompt tokens looked up."),
            ("vllm:prefix_cache_hits", stats.prefix_hits, "Prompt tokens found."),
            ("vllm:num_preemptions", stats.preemptions, "Sequences set back for want of memory."),
            ("cflow_read_bytes", stats.read_bytes, "Weight bytes streamed."),
            ("cflow_steps", stats.steps, "Forward steps."),
            ("cflow_step_seconds", stats.step_s, "Time spent in steps."),
            ("cflow_worker_restarts", self._engine.restarts, "Workers started again."),
        ):
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        cancelled = CounterMetricFamily(
            "cflow_cancelled", "Requests cancelled, by phase.", labels=(*LABELS, "phase")
        )
        for phase in ("queue", "prefill", "decode"):
            cancelled.add_metric((*self._labels, phase), getattr(stats, f"cancelled_{phase}"))
        yield cancelled

    def _gauges(self) -> Iterator[Metric]:
        stats, ready = self._engine.stats, self._engine.ready
        used = stats.n_kv_used / stats.n_kv_blocks if stats.n_kv_blocks else 0.0
        huge = ready.huge_bytes / ready.resident_bytes if ready and ready.resident_bytes else 0.0
        for name, value, text in (
            ("vllm:num_requests_running", stats.n_running, "Sequences in steps."),
            ("vllm:num_requests_waiting", stats.n_waiting, "Sequences in the queue."),
            ("vllm:kv_cache_usage_perc", used, "Share of KV blocks in use, 0 to 1."),
            (
                "cflow_generation_tokens_per_second",
                self._tokens.rate(),
                "Tokens generated a second, over the last ten.",
            ),
            ("cflow_huge_page_ratio", huge, "Share of the weights in huge pages, 0 to 1."),
            ("cflow_threads", ready.n_threads if ready else 0, "Compute threads."),
        ):
            family = GaugeMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _memory(self) -> Iterator[Metric]:
        ready = self._engine.ready
        family = GaugeMetricFamily(
            "cflow_memory_bytes", "Memory of the worker.", labels=(*LABELS, "kind")
        )
        for kind, value in (
            ("weights", ready.resident_bytes if ready else 0),
            ("kv", ready.kv_bytes if ready else 0),
            ("scratch", ready.scratch_bytes if ready else 0),
        ):
            family.add_metric((*self._labels, kind), value)
        yield family
