"""Dashboard, alert rules and a real Prometheus (Debian's) against a real server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.servers import Server
from harness.waiting import LIMIT_S, until

DOCKER = Path(__file__).parent.parent.parent / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "cflow.json"
RULES = DOCKER / "prometheus" / "alerts.yml"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "4s"}
ADDED = {"instance", "job"}  # labels, by Prometheus
GROUPING = r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)"


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def rule_queries() -> list[str]:
    """Each expression is on the line of its key, or indented below it."""
    found = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", RULES.read_text())
    assert len(found) == RULES.read_text().count("- alert:")
    return [block or line for block, line in found]


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program}: apt-get install prometheus")
    return path


def names_of(query: str) -> set[str]:
    """Names of metrics: what is no label, function, keyword, number or text."""
    bare = re.sub(r'\{[^}]*\}|"[^"]*"|\[[^\]]*\]', " ", re.sub(GROUPING, " ", query))
    words = re.findall(r"(?<![\w.:])[a-zA-Z_][\w:]*(?!\w*\s*\()", bare)
    return {word for word in words if word not in ("by", "and", "or", "unless", "on")}


def labels_of(query: str) -> set[str]:
    matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", query)
    grouped = [name.strip() for names in re.findall(GROUPING, query) for name in names.split(",")]
    return {*matched, *grouped}


@pytest.fixture(scope="module")
def server(shared: Server) -> Server:
    """One that has answered something."""
    shared.complete("Count: 1 2 3", max_tokens=4)
    return shared


def test_names_are_found_in_queries() -> None:
    query = 'sum by (le, a) (rate(x:y_total{b="c", d=~"e"}[5m])) / on (f) z_sum > 0.5 and v == 1e3'
    assert names_of(query) == {"x:y_total", "z_sum", "v"}
    assert labels_of(query) == {"le", "a", "b", "d", "f"}


@pytest.mark.parametrize("query", [*dashboard_queries(), *rule_queries()])
def test_every_query_names_what_the_server_exports(server: Server, query: str) -> None:
    samples = [
        sample
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    ]
    names = names_of(query)
    assert names
    assert names <= {"up", *(sample.name for sample in samples)}
    labels = {label for sample in samples if sample.name in names for label in sample.labels}
    assert labels_of(query) <= labels | ADDED


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [need("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(rule_queries())} rules found" in done.stdout


def test_promtool_accepts_the_metrics_but_for_names_that_others_gave(server: Server) -> None:
    done = subprocess.run(
        [need("promtool"), "check", "metrics"],
        input=server.http.get("/metrics").text, capture_output=True, text=True,
    )  # fmt: skip
    complaints = (done.stdout + done.stderr).splitlines()
    assert [line for line in complaints if not line.startswith("vllm:")] == []


@pytest.mark.parametrize(("reason", "fires"), [("memory", True), ("turn", False)])
def test_only_a_lack_of_memory_fires(tmp_path: Path, reason: str, fires: bool) -> None:
    series = f'cflow_preemptions_total{{instance="i", job="cflow", reason="{reason}"}}'
    told = [
        {
            "exp_labels": {
                "severity": "warning",
                "instance": "i",
                "job": "cflow",
                "reason": reason,
            },
            "exp_annotations": {"summary": "i preempts running answers for lack of KV memory"},
        }
    ]
    check = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": "0+1x60"}],
                "alert_rule_test": [
                    {"eval_time": "30m", "alertname": "CflowKvFull", "exp_alerts": told[:fires]}
                ],
            }
        ],
    }
    file = tmp_path / "rules.json"  # which is YAML
    file.write_text(json.dumps(check))
    done = subprocess.run(
        [need("promtool"), "test", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, program: str, target: Server, folder: Path) -> None:
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(RULES))}]\n"
            "scrape_configs: [{job_name: cflow, static_configs: "
            f'[{{targets: ["127.0.0.1:{target.port}"]}}]}}]\n'
        )
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stderr=log,
            )  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=LIMIT_S)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.http.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        return [float(row["value"][1]) for row in self.get("/query", query=query)["result"]]

    def is_scraping(self) -> bool:
        try:
            return self.values('count_over_time(up{job="cflow"}[1m])') > [3]
        except (httpx.TransportError, ValueError):  # it says in words that it is not ready yet
            return False

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped the server before and after some load."""
    running = Prometheus(need("prometheus"), server, tmp_path_factory.mktemp("prometheus"))
    try:
        until(running.is_scraping, running.log.read_text)
        for _ in range(4):
            server.complete("Count: 1 2 3", max_tokens=40, ignore_eos=True)
        made = server.metric("vllm:generation_tokens_total")
        query = f"vllm:generation_tokens_total >= {made}"
        until(lambda: bool(running.values(query)))
        yield running
    finally:
        running.stop()


def test_prometheus_takes_every_query(prometheus: Prometheus) -> None:
    for query in [*dashboard_queries(), *rule_queries()]:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        prometheus.values(query)


def test_prometheus_sees_the_load(prometheus: Prometheus) -> None:
    assert prometheus.values('up{job="cflow"}') == [1]
    [tokens] = prometheus.values("sum(increase(vllm:generation_tokens_total[1m]))")
    assert tokens > 0
    bucket = "vllm:inter_token_latency_seconds_bucket"
    [p90] = prometheus.values(f"histogram_quantile(0.9, sum by (le) (rate({bucket}[1m])))")
    assert 0 < p90 < 10


def test_prometheus_evaluates_every_rule_and_none_fires(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        [group] = prometheus.get("/rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {
        rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"
    } == {}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
