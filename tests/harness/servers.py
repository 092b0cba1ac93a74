"""A real `cflow serve` process with a real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai

from harness.waiting import LIMIT_S, until


class Server:
    """Listening when made; ready() waits for the model."""

    def __init__(
        self, model: Path | None, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """model: None leaves it to the command. environment: added to this process's."""
        command = [sys.executable, "-m", "cflow.server", "serve", "--port", "0", *flags]
        if model is not None:
            command += [str(model), "--served-name", "M"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        until(lambda: self._address() is not None or self.process.poll() is not None)
        assert self._address() is not None, self.log
        self.url = self._address() or ""
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S, verify=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._lines += lines

    def _address(self) -> str | None:
        found = re.search(r"listening at (http\S+),", self.log)
        return found[1] if found else None

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def ready(self) -> Server:
        until(lambda: self.status("/ready") == 200, lambda: self.log)
        return self

    def openai(self, **options: Any) -> openai.OpenAI:
        base, client = f"{self.url}/v1", cast(Any, self.http)  # newer versions name a fork of httpx
        return openai.OpenAI(base_url=base, api_key="none", http_client=client, **options)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream as they come; the last is {"done": True} if it ended so."""
        with self.http.stream("POST", path, json={"temperature": 0} | body | {"stream": True}) as r:
            assert r.status_code == 200, r.read()
            for line in r.iter_lines():
                if line == "data: [DONE]":
                    yield {"done": True}
                elif line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a family's samples of that name with these labels."""
        text = self.http.get("/metrics").text
        samples = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [float(value) for found, value in samples if all(w in found for w in wanted)]
        assert values, (name, labels)
        return sum(values)

    def workers(self) -> list[int]:
        return workers_of(self.process.pid)

    def stop(self) -> int:
        """End it without draining: a second SIGTERM cancels what runs. Returns the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LIMIT_S)
        self._reader.join()
        return code


@contextmanager
def serving(
    model: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready, and by its end has left no traceback in its log."""
    server = Server(model, *flags, environment=environment)
    try:
        yield server.ready()
    finally:
        server.stop()
        print(server.log)
    assert "Traceback" not in server.log


LONG: dict[str, Any] = {"prompt": "Count: 1 2 3", "max_tokens": 1900, "ignore_eos": True}


class Stream:
    """A stream read in a thread."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._server = server
        self._fields = LONG | fields
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for event in self._server.events("/v1/completions", self._fields):
            self.events.append(event)

    def join(self) -> list[dict[str, Any]]:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.events


def assert_failed(events: list[dict[str, Any]], code: str) -> None:
    """An error event, then [DONE], and no choice that claims to be finished."""
    assert events[-1] == {"done": True}
    assert events[-2]["error"]["code"] == code
    assert events[-2]["error"]["type"] == "server_error"
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-2])


def children_of(pid: int, module: str = "") -> list[int]:
    """Processes whose parent is `pid`, and whose command line names the module."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_text(errors="replace")
        except (OSError, IndexError):
            continue
        if parent == pid and module in command:
            found.append(int(entry.name))
    return found


def workers_of(pid: int) -> list[int]:
    """Engine workers whose parent is `pid`."""
    return children_of(pid, "cflow.engine.worker\0")


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
