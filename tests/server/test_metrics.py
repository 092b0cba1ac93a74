"""/metrics: valid from the first second, counters that add up, labels that do not grow."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cflow.engine.base.cgroup import Throttling
from cflow.engine.base.messages import DiskStats, Stats
from cflow.server.metrics import token_buckets
from harness.fake_engine import READY, FakeEngine
from harness.live import Live

MODEL = 'engine="0",model_name="fake/model"'


def families(live: Live) -> dict[str, Any]:
    response = live.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {family.name: family for family in text_string_to_metric_families(response.text)}
    for family in found.values():
        for sample in family.samples:
            assert math.isfinite(sample.value), sample
    return found


def test_every_name_is_there_from_the_first_second(serve: Any) -> None:
    found = families(serve())
    assert found.keys() >= {
        "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_requests_running",
        "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:request_success",
        "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos",
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds", "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens",
        "vllm:request_params_max_tokens", "vllm:request_params_n",
        "cflow_generation_tokens_per_second", "cflow_read_bytes", "cflow_huge_page_ratio",
        "cflow_worker_restarts", "cflow_preemptions", "cflow_queue_rejections", "cflow_cancelled", "cflow_threads",
        "cflow_expert_cache_hits", "cflow_expert_cache_misses", "cflow_expert_cache_bytes",
        "cflow_expert_cache_capacity_bytes", "cflow_expert_evictions",
        "cflow_expert_prefetch_issued", "cflow_expert_prefetch_useful",
        "cflow_expert_prefetch_late", "cflow_expert_prefetch_wasted",
        "cflow_expert_stall_seconds", "cflow_expert_faults", "cflow_disk_read_bytes",
        "cflow_disk_read_seconds", "cflow_disk_inflight", "cflow_disk_overdue",
        "cflow_layer_reads", "cflow_layer_stall_seconds", "cflow_layer_faults",
        "cflow_layer_cache_bytes", "cflow_layer_cache_capacity_bytes",
        "cflow_expert_extra_reads", "cflow_expert_warm_bytes", "cflow_expert_ghost_hit_ratio",
        "cflow_memory_bytes", "http_requests", "http_request_duration_seconds",
    }  # fmt: skip
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


def test_a_request_is_counted(serve: Any) -> None:
    live: Live = serve()
    live.complete(prompt="abc", n=2)
    live.complete(prompt="abc", max_tokens=2, stream=True)
    assert live.metric(f"cflow_requests_received_total{{{MODEL}}}") == 3
    success = 'vllm:request_success_total{{engine="0",finished_reason="{}",{}}}'
    assert live.metric(success.format("stop", 'model_name="fake/model"')) == 2
    assert live.metric(success.format("length", 'model_name="fake/model"')) == 1
    assert live.metric(f"vllm:time_to_first_token_seconds_count{{{MODEL}}}") == 2
    assert live.metric(f"vllm:inter_token_latency_seconds_count{{{MODEL}}}") == 2 * 3 + 1
    assert live.metric(f"vllm:request_prompt_tokens_sum{{{MODEL}}}") == 6
    assert live.metric(f"vllm:request_generation_tokens_sum{{{MODEL}}}") == 2 * 4 + 2
    assert live.metric(f"vllm:request_params_n_sum{{{MODEL}}}") == 3
    assert live.metric(f"cflow_generation_tokens_per_second{{{MODEL}}}") == 1.0
    handler = '{handler="/v1/completions",method="POST",status="2xx"}'
    assert live.metric(f"http_requests_total{handler}") == 2


def test_preemptions_are_told_apart(serve: Any) -> None:
    live: Live = serve()
    live.engine.stats = Stats(preemptions=7, preemptions_memory=2)
    assert live.metric(f"vllm:num_preemptions_total{{{MODEL}}}") == 7
    set_back = 'cflow_preemptions_total{{engine="0",model_name="fake/model",reason="{}"}}'
    assert [live.metric(set_back.format(reason)) for reason in ("memory", "turn")] == [2, 5]


def test_drafts_are_counted_by_how_far_ahead_they_were(serve: Any) -> None:
    live: Live = serve()
    accepted = "vllm:spec_decode_num_accepted_tokens"
    at = '{{engine="0",model_name="fake/model",position="{}"}}'
    assert live.metric(f"{accepted}_per_pos_total{at.format(7)}") == 0
    live.engine.stats = Stats(draft_rounds=5, drafts=12, accepted_at=(4, 2, 1))
    assert live.metric(f"vllm:spec_decode_num_drafts_total{{{MODEL}}}") == 5
    assert live.metric(f"vllm:spec_decode_num_draft_tokens_total{{{MODEL}}}") == 12
    assert live.metric(f"{accepted}_total{{{MODEL}}}") == 7
    assert live.metric(f"{accepted}_per_pos_total{at.format(1)}") == 2


def test_the_disk_is_accounted_for(serve: Any) -> None:
    live: Live = serve()
    ready = msgspec.structs.replace(
        READY, resident_bytes=1000, n_experts=100, n_expert_slots=10, expert_bytes=400,
        n_layer_slots=4, layer_bytes=200,
    )  # fmt: skip
    live.engine.put(ready=ready)
    experts = DiskStats(
        hits=1, misses=3, evictions=3, speculated=4, useful=5, late=6, wasted=7, disk_bytes=8,
        n_resident=9, n_loading=2, stall_ns=1_500_000_000, read_ns=2_000_000_000, failed_cut=1,
        latencies=(5, 0, 2, 1), ghost_hits_2x=1, ghost_hits_4x=3,
    )  # fmt: skip
    layers = DiskStats(
        misses=30, disk_bytes=80, n_resident=3, n_loading=1, n_overdue=1, stall_ns=500_000_000,
        read_ns=4_000_000_000, failed_timed_out=2, latencies=(0, 6),
    )  # fmt: skip
    live.engine.stats = Stats(disk={"experts": experts, "layers": layers})
    wanted = {
        "cflow_expert_cache_hits_total": 1, "cflow_expert_cache_misses_total": 3,
        "cflow_expert_evictions_total": 3, "cflow_expert_prefetch_issued_total": 4,
        "cflow_expert_prefetch_useful_total": 5, "cflow_expert_prefetch_late_total": 6,
        "cflow_expert_prefetch_wasted_total": 7, "cflow_expert_stall_seconds_total": 1.5,
        "cflow_expert_cache_bytes": 360, "cflow_expert_cache_capacity_bytes": 400,
        "cflow_layer_reads_total": 30, "cflow_layer_stall_seconds_total": 0.5,
        "cflow_layer_cache_bytes": 150, "cflow_layer_cache_capacity_bytes": 200,
    }  # fmt: skip
    assert {name: live.metric(f"{name}{{{MODEL}}}") for name in wanted} == wanted
    by_weights = {
        "cflow_disk_read_bytes_total": (8, 80), "cflow_disk_inflight": (2, 1),
        "cflow_disk_overdue": (0, 1), "cflow_disk_read_seconds_count": (8, 6),
        "cflow_disk_read_seconds_sum": (2, 4),
    }  # fmt: skip
    for name, values in by_weights.items():
        for weights, value in zip(("experts", "layers"), values, strict=True):
            assert live.metric(f'{name}{{{MODEL},weights="{weights}"}}') == value
    by_bound = {"6.4e-05": 5, "0.000128": 5, "0.000256": 7, "+Inf": 8}
    for bound, count in by_bound.items():
        labels = f'engine="0",le="{bound}",model_name="fake/model",weights="experts"'
        assert live.metric(f"cflow_disk_read_seconds_bucket{{{labels}}}") == count
    for what, counts in {"expert": (0, 1, 0, 0), "layer": (0, 0, 0, 2)}.items():
        for kind, value in zip(("io", "cut", "altered", "timed_out"), counts, strict=True):
            labels = f'engine="0",kind="{kind}",model_name="fake/model"'
            assert live.metric(f"cflow_{what}_faults_total{{{labels}}}") == value
    for budget, ratio in {"2x": 0.25, "4x": 0.75}.items():
        labels = f'budget="{budget}",engine="0",model_name="fake/model"'
        assert live.metric(f"cflow_expert_ghost_hit_ratio{{{labels}}}") == ratio
    for kind, value in {"weights": 600, "expert_cache": 400}.items():
        labels = f'engine="0",kind="{kind}",model_name="fake/model"'
        assert live.metric(f"cflow_memory_bytes{{{labels}}}") == value


def test_the_engines_totals_and_gauges(serve: Any) -> None:
    live: Live = serve()
    live.engine.stats = Stats(
        n_running=3, n_waiting=4, n_kv_used=2, n_kv_blocks=8, prompt_tokens=100, read_bytes=5,
        cancelled_prefill=6,
    )  # fmt: skip
    live.engine.put(restarts=7)
    assert live.metric(f"vllm:num_requests_running{{{MODEL}}}") == 3
    assert live.metric(f"vllm:num_requests_waiting{{{MODEL}}}") == 4
    assert live.metric(f"vllm:kv_cache_usage_perc{{{MODEL}}}") == 0.25
    assert live.metric(f"vllm:prompt_tokens_total{{{MODEL}}}") == 100
    assert live.metric(f"cflow_read_bytes_total{{{MODEL}}}") == 5
    assert live.metric(f"cflow_worker_restarts_total{{{MODEL}}}") == 7
    assert live.metric(f"cflow_huge_page_ratio{{{MODEL}}}") == 0.5
    assert (
        live.metric('cflow_cancelled_total{engine="0",model_name="fake/model",phase="prefill"}')
        == 6
    )
    assert live.metric('cflow_memory_bytes{engine="0",kind="kv",model_name="fake/model"}') == 300


def test_what_a_cpu_quota_stopped(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cflow.server.metrics.cpu_throttling",
        lambda: Throttling(periods=10, throttled=4, seconds=2.5),
    )
    live: Live = serve()
    values = {"periods": 10, "throttled_periods": 4, "throttled_seconds": 2.5}
    for name, value in values.items():
        assert live.metric(f"cflow_cgroup_cpu_{name}_total{{{MODEL}}}") == value


def test_without_a_worker_all_values_are_finite(serve: Any) -> None:
    live: Live = serve(FakeEngine())
    live.engine.put(ready=None)
    live.engine.stats = msgspec.structs.replace(Stats(), n_kv_blocks=0)
    assert families(live)["cflow_huge_page_ratio"].samples[0].value == 0


def test_received_is_the_sum_of_how_they_ended(serve: Any) -> None:
    live: Live = serve()
    for fields in ({"n": 3}, {"max_tokens": 1}, {"stream": True}, {"prompt": ["a", "b"]}):
        live.complete(**({"prompt": "ab"} | fields))
    found = families(live)
    over = sum(s.value for s in found["vllm:request_success"].samples)
    assert over == found["cflow_requests_received"].samples[0].value == 7


def test_histograms_are_whole(serve: Any) -> None:
    live: Live = serve()
    live.complete(prompt="ab")
    for family in families(live).values():
        if family.type != "histogram":
            continue
        counts = {
            tuple(sorted(s.labels.items())): s.value
            for s in family.samples if s.name.endswith("_count")
        }  # fmt: skip
        for s in family.samples:
            if s.labels.get("le") == "+Inf":
                rest = {k: v for k, v in s.labels.items() if k != "le"}
                assert counts[tuple(sorted(rest.items()))] == s.value


def test_scanners_do_not_grow_the_exposition(serve: Any) -> None:
    live: Live = serve()
    live.client.get("/v1/models/nope")  # brings lines of its own
    n_lines = live.client.get("/metrics").text.count("\n")
    names = random.Random(1)
    for _ in range(60):
        word = f"zz{names.randrange(10**9)}"
        live.client.get(f"/x/{word}")
        live.client.get(f"/v1/models/{word}")
        live.client.request("PUT", f"/{word}")
        for path in ("/v1/completions", "/health", "/"):
            live.client.request(word, path)
            live.client.delete(path)
        live.chat(model=word)
    text = live.client.get("/metrics").text
    assert text.count("\n") < n_lines + 20
    assert "zz" not in text
    assert 'handler="unmatched"' in text


def test_counters_never_fall(serve: Any) -> None:
    live: Live = serve()
    before: dict[tuple[Any, ...], float] = {}
    for _ in range(5):
        live.complete(prompt="ab")
        for family in families(live).values():
            if family.type != "counter":
                continue
            for s in family.samples:
                key = (s.name, *sorted(s.labels.items()))
                assert s.value >= before.get(key, 0.0)
                before[key] = s.value


def test_token_buckets() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(64) == (1, 2, 5, 10, 20, 50)
