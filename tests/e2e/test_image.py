"""The container image as docker/build-here.sh builds it, run by podman as strictly as it is meant to be."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.waiting import until

IMAGE = "localhost/cflow"
ENVIRONMENT = os.environ | {"STORAGE_DRIVER": "vfs"}  # as in build-here.sh
STRICT = (
    "--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges",
    "--network=host", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096",
)  # fmt: skip
EMULATOR = "/usr/bin/qemu-x86_64-static"


def podman(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    # crun knows no machine that has control groups of both versions.
    runtime = ["--runtime", "runc"] if shutil.which("runc") else []
    command = ["podman", *runtime, "--cgroup-manager", "cgroupfs", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    if shutil.which("podman") is None or podman("image", "exists", IMAGE).returncode:
        pytest.skip(f"no image {IMAGE} in podman's store: run `make image`")


class Box:
    """A running container of the image with one CPU and 2 GiB."""

    def __init__(self, scheme: str = "http", *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        started = podman(
            "run", "--detach", *STRICT, "--cpus=1", "--memory=2g", f"--env=CFLOW_PORT={self.port}",
            *flags, IMAGE, "serve", "tinystories",
        )  # fmt: skip
        assert started.returncode == 0, started.stderr
        self.name = started.stdout.strip()
        url = f"{scheme}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=url, timeout=30, verify=False)
        until(self.is_ready, self.log)

    def close(self) -> None:
        self.http.close()
        podman("rm", "--force", "--volumes", self.name)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return podman("logs", self.name).stderr

    def shell(self, command: str) -> str:
        return podman("exec", self.name, "sh", "-c", command).stdout


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    box = Box()
    yield box
    box.close()


def stream(box: Box, **fields: Any) -> list[str]:
    """The data of all events."""
    body = {"prompt": "Once upon a time", "temperature": 0, "stream": True} | fields
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        return [
            line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data")
        ]


def test_it_has_no_rights_and_still_answers(box: Box) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in box.shell("cat /proc/1/status").splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == ["10001"] * 4
    assert int(status["CapBnd"], 16) == 0
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert box.shell("touch /x /tmp/x /opt/cflow/x || echo no; touch /models/x && echo yes") == (
        "no\nyes\n"
    )
    events = stream(box, max_tokens=8)
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_it_listens_to_all_and_takes_the_threads_of_its_quota(box: Box) -> None:
    assert f"listening at http://0.0.0.0:{box.port}" in box.log()
    assert "1 threads: CPU quota of 1 (" in box.log()


def test_its_health_check_asks_the_server(box: Box) -> None:
    assert podman("healthcheck", "run", box.name).returncode == 0
    [image] = json.loads(podman("image", "inspect", IMAGE).stdout)
    kind, *check = image["Healthcheck"]["Test"]
    assert kind == "CMD"
    for port, code in ((box.port, 0), (1, 1)):
        assert podman("exec", f"--env=CFLOW_PORT={port}", box.name, *check).returncode == code


def test_it_is_healthy_with_tls_and_keys(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=elsewhere", "-keyout", str(tmp_path / "key.pem"), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    cert.write_text(cert.read_text() + (tmp_path / "key.pem").read_text())
    (tmp_path / "keys").write_text("alice: secret\n")
    tmp_path.chmod(0o755)
    box = Box(
        "https", f"--volume={tmp_path}:/secret:ro", "--env=CFLOW_TLS_CERT=/secret/cert.pem",
        "--env=CFLOW_API_KEYS=/secret/keys",
    )  # fmt: skip
    try:
        assert podman("healthcheck", "run", box.name).returncode == 0
        assert box.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
    finally:
        box.close()


def test_stopping_it_ends_its_streams_whole(box: Box) -> None:
    """As the first process of the container it has to take the signal itself."""
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        stopping = subprocess.Popen(["podman", "stop", "--time=60", box.name], env=ENVIRONMENT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert stopping.wait(90) == 0
    state = json.loads(podman("inspect", box.name).stdout)[0]["State"]
    # What podman has to kill in the end exits with 137.
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


def test_it_runs_on_any_processor_of_x86_64_v2(tmp_path: Path) -> None:
    """An emulated one without AVX gives the same bits."""
    if not Path(EMULATOR).exists():
        pytest.skip(f"no {EMULATOR}: apt-get install qemu-user-static")
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a girl named Lily. She had a red ball. " * 4)
    flags = (*STRICT, f"--volume={text}:/text:ro", f"--volume={EMULATOR}:/emulator:ro")
    command = ("perplexity", "tinystories", "/text", "--json")
    found = []
    for run in (
        (IMAGE, *command),
        ("--entrypoint=/emulator", IMAGE, "-cpu", "Nehalem", "/opt/cflow/bin/python3", "-m",
         "cflow.server", *command),
    ):  # fmt: skip
        done = podman("run", "--rm", *flags, *run, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[1]["isa"] == "scalar"
    assert found[0]["mean_nll"] == found[1]["mean_nll"]
