"""Reads of experts and layers that fail, stop short, lag or hang while answers stream.

Requests that do not need the faulty weights get the bits of a clean run, the others an error that names
the weights, and nothing leaks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import ExpertOptions, LayerRecords, Model
from harness.servers import Server, assert_failed, serving
from harness.waiting import until
from makefiles.shape_file import synth_model
from oracles.bad_disk import BadDisk, Kind
from oracles.model_file import ModelFile

FLAGS = ("--context", "512", "--max-sequences", "3", "--speculation", "off")  # a token an event
TIMEOUT_S = 5
READS = 2  # in flight
PROMPTS = [f"{i}: a text of its own" for i in range(6)]
N_TOKENS = 16

Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """weights: "experts" or "layers". places: where in the file reads start that a fault is to
    strike. clean: what the prompts are answered."""

    weights: str
    server: Server
    model: Path
    disk: BadDisk
    places: tuple[int, int]
    clean: list[Events]

    def metric(self, name: str, **labels: str) -> float:
        """Of this kind of weights."""
        if name.startswith("disk"):
            labels["weights"] = self.weights
        else:
            name = f"{self.weights.removesuffix('s')}_{name}"
        return self.server.metric(f"cflow_{name}", **labels)

    def strike(self, kind: Kind, **options: Any) -> None:
        self.disk.strike(kind, begin=self.places[0], end=self.places[1], **options)


def ask(server: Server, prompt: str) -> Events:
    fields = {"prompt": prompt, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 0}
    events = list(server.events("/v1/completions", fields))
    return [
        {k: e["choices"][0][k] for k in ("text", "logprobs")} if e.get("choices") else e
        for e in events
    ]


def ask_all(server: Server) -> list[Events]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))


def split(served: Served, said: list[Events], name: str) -> list[Events]:
    """Those that failed, as `name` says; all others are right to the bit, and so is what the failed
    ones had said by then."""
    failed = []
    for events, clean in zip(said, served.clean, strict=True):
        if events == clean:
            continue
        *good, error, done = events
        assert done == {"done": True}
        assert error["error"]["code"] == "io_error"
        assert name in error["error"]["message"]
        assert good == clean[: len(good)]
        failed.append(events)
    return failed


def come_to_rest(served: Served) -> None:
    """Also what is read ahead ends, and an idle server says so."""
    running = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    until(lambda: not any(map(served.server.metric, running)))
    reading = ("disk_inflight", "disk_overdue")
    until(lambda: not any(map(served.metric, reading)))


def check_nothing_is_left(served: Served) -> None:
    served.disk.heal()
    come_to_rest(served)
    server = served.server
    assert ask_all(server) == served.clean
    assert server.status("/health") == 200
    come_to_rest(served)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert served.metric("cache_bytes") <= served.metric("cache_capacity_bytes")
    assert server.metric("cflow_worker_restarts_total") == 0


def make_experts(folder: Path) -> Path:
    return synth_model(
        folder / "experts.cflow", "qwen3moe", n_layers=4, d_model=128, heads=(4, 2, 32),
        vocab_size=512, tied=True,
        n_experts=32, top_k=2, d_expert=64, renormalise=True, qk_norm="head",
    )  # fmt: skip


def make_layers(folder: Path) -> Path:
    sizes: dict[str, Any] = {"n_layers": 12, "d_model": 512, "vocab_size": 512, "d_ff": 1536}
    return synth_model(folder / "layers.cflow", "llama", heads=(8, 8, 64), **sizes)


def layer_records(model: Path, memory: int = 1 << 50) -> LayerRecords:
    experts: ExpertOptions = {"cache": 0, "expert_reads": READS}
    found = Model(
        str(model), header_only=True, weights_memory=memory, experts=experts
    ).layer_records
    assert found is not None
    return found


def environment_of(disk: BadDisk, folder: Path) -> dict[str, str]:
    """Two reads at a time, given up after half of CFLOW_STUCK; uses that are kept stay in the folder."""
    return disk.environment | {
        "CFLOW_EXPERT_READS": str(READS),
        "CFLOW_STUCK": str(2 * TIMEOUT_S),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def flags_of(weights: str, model: Path) -> tuple[str, ...]:
    """The smallest memory there can be."""
    if weights == "experts":
        least = 3 * ExpertBank.of(Model(str(model), header_only=True)).record_bytes
        return (*FLAGS, "--expert-cache", str(least))
    records = layer_records(model)
    least = records.n_least * records.slot_bytes
    return (*FLAGS, "--weights-memory", str(least))


def places_of(weights: str, model: Path) -> tuple[int, int]:
    """All experts; or a layer in the middle, which no step reads ahead of the one before it."""
    if weights == "experts":
        bank = ExpertBank.of(Model(str(model), header_only=True))
        return bank.offsets[0], bank.offsets[-1] + 1
    start, n_bytes = ModelFile(model).sections[7]
    return start + n_bytes // 2, start + n_bytes * 2 // 3


@pytest.fixture(scope="module", params=["experts", "layers"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    weights, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = (make_experts if weights == "experts" else make_layers)(folder)
    with serving(model, *FLAGS) as server:
        clean = ask_all(server)
    assert all(len(events) == N_TOKENS + 1 for events in clean)
    disk = BadDisk(model, folder)
    environment = environment_of(disk, folder)
    with serving(model, *flags_of(weights, model), environment=environment) as server:
        yield Served(weights, server, model, disk, places_of(weights, model), clean)
        disk.heal()


def test_usage_and_metrics_say_what_a_request_read(served: Served) -> None:
    server = served.server
    total = "cache_misses_total" if served.weights == "experts" else "reads_total"
    names = ("disk_read_bytes_total", total, "stall_seconds_total")
    come_to_rest(served)
    before = [served.metric(name) for name in names]
    n_steps = server.metric("cflow_steps_total")
    usage = server.complete("a prompt that nobody else has", max_tokens=8, ignore_eos=True)["usage"]
    come_to_rest(served)
    n_steps = server.metric("cflow_steps_total") - n_steps
    n_bytes, n_reads, stall_s = (
        served.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    assert stall_s == pytest.approx(usage["stall_ms"] / 1000, abs=0.05)
    if served.weights == "experts":
        record_bytes = ExpertBank.of(Model(str(served.model), header_only=True)).record_bytes
        assert usage["expert_misses"] == n_reads > 0
        assert usage["disk_bytes"] == n_reads * record_bytes <= n_bytes
        assert usage["layer_reads"] == 0
        return
    records = layer_records(served.model, int(served.metric("cache_capacity_bytes")))
    assert usage["layer_reads"] == n_steps * (records.n_records - records.n_kept)
    assert usage["disk_bytes"] == n_steps * records.step_bytes
    assert usage["expert_misses"] == usage["expert_hits"] == 0
    # What is read ahead for the next step is counted already, and was for this one.
    assert (n_reads, n_bytes) == (usage["layer_reads"], usage["disk_bytes"])


def test_short_interrupted_and_late_reads_change_nothing(served: Served) -> None:
    served.disk.disturb(interrupted=30, short=30, delayed=5, delay_ms=20)
    faults = served.metric("faults_total")
    assert ask_all(served.server) == served.clean
    assert served.disk.n_struck > 0
    served.disk.disturb()
    assert served.metric("faults_total") == faults
    check_nothing_is_left(served)


def test_a_read_of_a_second_is_waited_for(served: Served) -> None:
    served.strike(Kind.WAITS, times=1, wait_ms=1000)
    assert ask_all(served.server) == served.clean
    assert served.disk.n_struck == 1
    check_nothing_is_left(served)


@pytest.mark.parametrize(
    ("kind", "error", "fault", "text"),
    [
        (Kind.FAILS, errno.EIO, "io", "the operating system failed the read"),
        (Kind.FAILS, errno.ESTALE, "io", "the operating system failed the read"),
        (Kind.IS_CUT, 0, "cut", "the file ends inside it"),
        (Kind.ALTERS, 0, "altered", "its checksum is wrong"),
    ],
)
def test_one_read_that_fails(served: Served, kind: Kind, error: int, fault: str, text: str) -> None:
    before = served.metric("faults_total", kind=fault)
    served.strike(kind, times=1, error=error)
    failed = split(served, ask_all(served.server), text)
    assert 0 < len(failed) < len(PROMPTS)
    assert served.disk.n_struck == 1
    names = {events[-2]["error"]["message"].partition(": ")[2] for events in failed}
    (name,) = names
    assert name.startswith("layer ")
    assert (", expert " in name) == (served.weights == "experts")
    until(lambda: served.metric("faults_total", kind=fault) == before + 1)
    check_nothing_is_left(served)


def test_failures_in_a_row_show_and_what_they_computed_is_not_kept(served: Served) -> None:
    """The prompt is several KV blocks long."""
    server, prompt = served.server, "a prompt that fails at first " * 5
    for _ in range(4):
        served.strike(Kind.FAILS)
        events = list(server.events("/v1/completions", {"prompt": prompt, "max_tokens": 4}))
        assert_failed(events, "io_error")
        assert len(events) == 2
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failing"})
    assert server.status("/live") == 200
    assert all(len(events) == 2 for events in ask_all(server))
    served.disk.heal()
    details = [
        server.complete(prompt, max_tokens=4)["usage"]["prompt_tokens_details"] for _ in range(2)
    ]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens"] > 64
    check_nothing_is_left(served)


def test_a_disk_that_hangs(served: Served) -> None:
    """First in one read, then in all of them."""
    server, text = served.server, "the disk did not answer in time"
    (worker,) = server.workers()
    served.strike(Kind.HANGS, times=1)
    failed = split(served, ask_all(server), text)
    assert failed
    assert served.disk.n_hanging == 1
    until(lambda: served.metric("disk_overdue") == served.metric("disk_inflight") == 1)
    assert served.metric("faults_total", kind="timed_out") > 0
    split(served, ask_all(server), text)  # what it holds does not come from anywhere else
    check_nothing_is_left(served)
    served.strike(Kind.HANGS)
    assert len(split(served, ask_all(server), text)) == len(PROMPTS)
    assert server.status("/health") == 503
    assert server.status("/live") == 200
    assert served.disk.n_hanging == served.metric("disk_overdue") > 0
    check_nothing_is_left(served)
    assert server.workers() == [worker]


def test_a_file_cut_replaced_and_removed(served: Served) -> None:
    model, server = served.model, served.server
    whole = model.read_bytes()
    os.truncate(model, served.places[0] + 512)
    assert split(served, ask_all(server), "the file ends inside it")
    model.write_bytes(whole)  # in place
    check_nothing_is_left(served)
    model.chmod(0)
    assert ask_all(server) == served.clean
    other = model.with_name("other")
    other.write_bytes(bytes(len(whole)))
    other.replace(model)
    assert ask_all(server) == served.clean
    model.unlink()
    check_nothing_is_left(served)


def test_a_server_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    model = make_experts(tmp_path)
    disk = BadDisk(model, tmp_path)
    environment = environment_of(disk, tmp_path)
    with serving(model, *flags_of("experts", model), environment=environment) as server:
        (worker,) = server.workers()
        disk.strike(Kind.HANGS)
        assert_failed(list(server.events("/v1/completions", {"prompt": PROMPTS[0]})), "io_error")
        assert disk.n_hanging
        assert server.stop() == 0
        assert not Path(f"/proc/{worker}").exists()
