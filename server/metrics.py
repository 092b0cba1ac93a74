"""Prometheus metrics: under vLLM's names where one exists, else with the prefix cflow_."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cflow.engine.base.cgroup import cpu_throttling
from cflow.engine.base.limits import MAX_DRAFTS
from cflow.engine.base.messages import DiskStats
from cflow.engine.client.engine import Engine
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
FAULT_KINDS = ("io", "cut", "altered", "timed_out")
REJECTION_REASONS = ("queue_full", "key_queue_full", "loading", "restarting", "stuck", "draining")
Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most) or (1,)


class Metrics:
    """All metrics of one server, in a registry of their own. Counters never fall."""

    def __init__(self, engine: Engine) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.tokens = Meter(10)  # generated, over 10 s
        self.finished = Meter(60)  # answers that ended in any way, over 60 s
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
            "Answers requested: prompts times n.",
            LABELS,
            registry=self.registry,
        ).labels(model, ENGINE)
        success = Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
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
            "Mean time per token after the first.",
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
    """Totals and gauges of the engine, read at each scrape."""

    def __init__(self, engine: Engine, tokens: Meter) -> None:
        self._engine = engine
        self._tokens = tokens
        self._labels = (engine.card.name, ENGINE)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._totals()
        yield from self._gauges()
        yield self._memory()
        yield from self._throttling()
        yield from self._disk()

    def _totals(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield from self._plain(
            CounterMetricFamily,
            ("vllm:prompt_tokens", stats.prompt_tokens, "Prompt tokens processed."),
            ("vllm:generation_tokens", stats.generation_tokens, "Tokens generated."),
            (
                "vllm:prefix_cache_queries",
                stats.prefix_queries,
                "Prompt tokens looked up in the prefix cache.",
            ),
            (
                "vllm:prefix_cache_hits",
                stats.prefix_hits,
                "Prompt tokens found in the prefix cache.",
            ),
            ("vllm:num_preemptions", stats.preemptions, "Sequences preempted."),
            (
                "vllm:spec_decode_num_drafts",
                stats.draft_rounds,
                "Steps that checked drafts, per sequence.",
            ),
            ("vllm:spec_decode_num_draft_tokens", stats.drafts, "Draft tokens."),
            (
                "vllm:spec_decode_num_accepted_tokens",
                sum(stats.accepted_at),
                "Draft tokens accepted.",
            ),
            ("cflow_read_bytes", stats.read_bytes, "Weight bytes streamed."),
            ("cflow_steps", stats.steps, "Forward steps."),
            ("cflow_step_seconds", stats.step_s, "Time spent in steps."),
            ("cflow_worker_restarts", self._engine.status.restarts, "Worker restarts."),
        )
        cancelled = {p: getattr(stats, f"cancelled_{p}") for p in ("queue", "prefill", "decode")}
        text = "Requests cancelled, by phase."
        yield self._by(CounterMetricFamily, "cflow_cancelled", text, "phase", cancelled)
        memory = stats.preemptions_memory
        set_back = {"memory": memory, "turn": stats.preemptions - memory}
        text = "Sequences preempted, for lack of KV memory or because it was another's turn."
        yield self._by(CounterMetricFamily, "cflow_preemptions", text, "reason", set_back)
        right = {str(i): n for i, n in enumerate(stats.accepted_at or [0] * MAX_DRAFTS)}
        name, text = (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
        )
        yield self._by(CounterMetricFamily, name, text, "position", right)

    def _plain(self, kind: Family, *samples: tuple[str, float, str]) -> Iterator[Metric]:
        """One metric a sample; samples: (name, value, help)."""
        for name, value, text in samples:
            family = kind(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _by(
        self, kind: Family, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """One metric with a further label; values: by value of that label."""
        family = kind(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        stats, ready = self._engine.stats, self._engine.status.ready
        used = stats.n_kv_used / stats.n_kv_blocks if stats.n_kv_blocks else 0.0
        huge = ready.huge_bytes / ready.resident_bytes if ready and ready.resident_bytes else 0.0
        yield from self._plain(
            GaugeMetricFamily,
            ("vllm:num_requests_running", stats.n_running, "Sequences that run."),
            ("vllm:num_requests_waiting", stats.n_waiting, "Sequences in the queue."),
            ("vllm:kv_cache_usage_perc", used, "Share of KV blocks in use, 0 to 1."),
            (
                "cflow_generation_tokens_per_second",
                self._tokens.rate(),
                "Tokens generated per second, over the last ten seconds.",
            ),
            ("cflow_huge_page_ratio", huge, "Share of the weights in huge pages, 0 to 1."),
            ("cflow_threads", ready.n_threads if ready else 0, "Compute threads."),
        )

    def _memory(self) -> Metric:
        ready = self._engine.status.ready
        n_bytes = {
            "weights": ready.resident_bytes - ready.expert_bytes if ready else 0,
            "expert_cache": ready.expert_bytes if ready else 0,
            "kv": ready.kv_bytes if ready else 0,
            "scratch": ready.scratch_bytes if ready else 0,
        }
        text = "Memory of the worker."
        return self._by(GaugeMetricFamily, "cflow_memory_bytes", text, "kind", n_bytes)

    def _throttling(self) -> Iterator[Metric]:
        """Throttling by the CPU quota. The worker shares the control groups of this process."""
        found = cpu_throttling()
        yield from self._plain(
            CounterMetricFamily,
            ("cflow_cgroup_cpu_periods", found.periods, "Elapsed periods of the CPU quota."),
            (
                "cflow_cgroup_cpu_throttled_periods",
                found.throttled,
                "Periods in which the CPU quota stopped threads.",
            ),
            (
                "cflow_cgroup_cpu_throttled_seconds",
                found.seconds,
                "Time for which the CPU quota stopped threads, summed over CPUs.",
            ),
        )

    def _disk(self) -> Iterator[Metric]:
        """Reads of weights from disk; all zero if every weight is in memory."""
        found, ready = self._engine.stats.disk, self._engine.status.ready
        tiers = {weights: found.get(weights, DiskStats()) for weights in ("experts", "layers")}
        yield from self._reads(tiers)
        experts, layers = tiers.values()
        n_slots, capacity = (ready.n_expert_slots, ready.expert_bytes) if ready else (0, 0)
        yield from self._cache("expert", experts, n_slots, capacity)
        n_slots, capacity = (ready.n_layer_slots, ready.layer_bytes) if ready else (0, 0)
        yield from self._cache("layer", layers, n_slots, capacity)
        yield from self._experts(experts)
        reads = ("cflow_layer_reads", layers.misses, "Layers demanded that were not in memory.")
        yield from self._plain(CounterMetricFamily, reads)

    def _reads(self, tiers: Mapping[str, DiskStats]) -> Iterator[Metric]:
        """Reads from disk, by kind of weights."""
        for kind, name, field, text in (
            (
                CounterMetricFamily,
                "read_bytes",
                "disk_bytes",
                "Bytes read, without those of the warm start.",
            ),
            (GaugeMetricFamily, "inflight", "n_loading", "Reads in flight."),
            (GaugeMetricFamily, "overdue", "n_overdue", "Reads in flight that exceed the timeout."),
        ):
            values = {weights: getattr(tier, field) for weights, tier in tiers.items()}
            yield self._by(kind, f"cflow_disk_{name}", text, "weights", values)
        family = HistogramMetricFamily(
            "cflow_disk_read_seconds", "Time a read took.", labels=(*LABELS, "weights")
        )
        for weights, tier in tiers.items():
            buckets = _buckets(tier.latencies)
            family.add_metric((*self._labels, weights), buckets, tier.read_ns / 1e9)
        yield family

    def _cache(self, what: str, tier: DiskStats, n_slots: int, capacity: int) -> Iterator[Metric]:
        """Cache, stalls and faults of one kind of weights: `what` is "expert" or "layer"."""
        used = tier.n_resident * (capacity // n_slots) if n_slots else 0
        yield from self._plain(
            GaugeMetricFamily,
            (f"cflow_{what}_cache_bytes", used, f"Memory in use for {what}s."),
            (f"cflow_{what}_cache_capacity_bytes", capacity, f"Memory for {what}s."),
        )
        stall_s, text = tier.stall_ns / 1e9, f"Time that steps waited for {what}s."
        yield from self._plain(CounterMetricFamily, (f"cflow_{what}_stall_seconds", stall_s, text))
        faults = {kind: getattr(tier, f"failed_{kind}") for kind in FAULT_KINDS}
        text = f"Reads of {what}s that failed, by kind."
        yield self._by(CounterMetricFamily, f"cflow_{what}_faults", text, "kind", faults)

    def _experts(self, experts: DiskStats) -> Iterator[Metric]:
        yield from self._plain(
            CounterMetricFamily,
            ("cflow_expert_cache_hits", experts.hits, "Demanded experts that were in memory."),
            (
                "cflow_expert_cache_misses",
                experts.misses,
                "Demanded experts that were not in memory.",
            ),
            ("cflow_expert_evictions", experts.evictions, "Experts evicted."),
            ("cflow_expert_prefetch_issued", experts.speculated, "Experts read ahead."),
            ("cflow_expert_prefetch_useful", experts.useful, "Experts read ahead and used."),
            (
                "cflow_expert_prefetch_late",
                experts.late,
                "Experts read ahead that were demanded before they arrived.",
            ),
            (
                "cflow_expert_prefetch_wasted",
                experts.wasted,
                "Experts read ahead and evicted unused.",
            ),
            (
                "cflow_expert_extra_reads",
                experts.extra_reads,
                "Further reads of an expert for the same use.",
            ),
            (
                "cflow_expert_warm_bytes",
                experts.warm_bytes,
                "Bytes of experts read for the warm start.",
            ),
        )
        wanted = experts.hits + experts.misses
        hits = {"2x": experts.ghost_hits_2x, "4x": experts.ghost_hits_4x}
        yield self._by(
            GaugeMetricFamily,
            "cflow_expert_ghost_hit_ratio",
            "Share of all demanded experts that a cache of a multiple of the budget would have held, 0 to 1.",
            "budget",
            {budget: n / wanted if wanted else 0.0 for budget, n in hits.items()},
        )


def _buckets(latencies: tuple[int, ...]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in seconds.

    latencies[i]: reads of less than 64 us * 2**i; the last entry also counts all longer reads."""
    counts = list(accumulate(latencies or (0,)))
    bounds = [repr(64e-6 * 2**i) for i in range(len(counts) - 1)]
    return list(zip([*bounds, "+Inf"], counts, strict=True))
