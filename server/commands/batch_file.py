"""What `cflow batch` does: a file of requests becomes a file of answers.

Threads send the requests, one writer adds the answers. An answer is done once its line is in the file;
what is not done is sent again by the next run.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from uuid import uuid4

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.server.commands.progress import count_progress, say

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
LOWEST = 2**31 - 1  # priority
TRIES = 5  # of a request that the server cannot answer; a full queue does not count
MAX_WAIT_S = 30.0
MAX_LINE = 64 << 20  # bytes


class Line(NamedTuple):
    """A request of the file. offset: of its line, in bytes."""

    custom_id: str
    number: int
    offset: int


@dataclass(frozen=True)
class Work:
    """source: the file of requests. todo: those without an answer. n_done: those with one."""

    source: Path
    todo: list[Line]
    n_done: int


# ---- the files ----


def read(source: Path, target: Path) -> Work:
    """Check every line of the source before any is sent. Raises CflowError naming the first fault."""
    done = _clean(target)
    todo: list[Line] = []
    seen: dict[str, int] = {}
    try:
        with open(source, "rb") as file:
            offset = 0
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if raw.strip():
                    custom_id, _, _ = _parse(raw, f"{source}, line {number}")
                    if custom_id in seen:
                        raise CflowError(
                            f"{source}, line {number}: custom_id {custom_id[:80]!r} is that of line "
                            f"{seen[custom_id]} too; give each line its own"
                        )
                    seen[custom_id] = number
                    if custom_id not in done:
                        todo.append(Line(custom_id, number, offset))
                offset += len(raw)
    except OSError as error:
        raise CflowError(f"cannot read {source}: {error.strerror}") from None
    return Work(source, todo, len(seen) - len(todo))


def _parse(raw: bytes, where: str) -> tuple[str, str, dict[str, Any]]:
    """custom_id, url and body of a line. Raises CflowError."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CflowError(f"{where} is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise CflowError(f"{where} is not a JSON object")
    custom_id, url, body = (line.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise CflowError(f"{where}: custom_id must be a text")
    if line.get("method", "POST") != "POST" or url not in URLS:
        raise CflowError(f"{where}: method and url must be POST and one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise CflowError(f"{where}: body must be an object")
    if body.get("stream"):
        raise CflowError(f"{where}: stream must be left out: answers are lines of a file")
    return custom_id, url, body


def _clean(target: Path) -> set[str]:
    """The custom_ids that the file answers. What it answers with a fault of the server, and the rest
    of a line that was being written, leave it."""
    try:
        lines = target.read_bytes().split(b"\n")
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CflowError(f"cannot read {target}: {error.strerror}") from None
    kept: dict[str, bytes] = {}
    for number, raw in enumerate(lines, 1):
        try:
            line = json.loads(raw) if raw.strip() else None
        except ValueError:
            if number < len(lines):
                raise CflowError(
                    f"{target}, line {number} is not JSON; name a file that cflow batch wrote, or a "
                    "new one"
                ) from None
            continue
        if isinstance(line, dict) and _is_answered(line):
            kept[str(line.get("custom_id"))] = raw
    text = b"".join(raw + b"\n" for raw in kept.values())
    if text != b"\n".join(lines):
        part = target.with_name(f".{target.name}.part")
        part.write_bytes(text)
        part.replace(target)
    return set(kept)


def _is_answered(line: dict[str, Any]) -> bool:
    response = line.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status < 500


# ---- sending ----


def send(work: Work, target: Path, url: str, api_key: str | None, parallel: int) -> None:
    """Send what is to be done, and write each answer as it comes. Raises CflowError at the end if the
    server could not answer some."""
    questions: Queue[Line | None] = Queue()
    answers: Queue[dict[str, Any]] = Queue()
    for line in work.todo:
        questions.put(line)

    def ask() -> None:
        with open(work.source, "rb") as file:
            while (line := questions.get()) is not None:
                file.seek(line.offset)
                answers.put(_answer(file.readline(MAX_LINE), line, url, api_key))

    for _ in range(min(parallel, len(work.todo))):
        questions.put(None)
        threading.Thread(target=ask, daemon=True).start()
    n_all, n_failed, n_refused = work.n_done + len(work.todo), 0, 0
    try:
        with open(target, "ab", buffering=0) as file, count_progress() as report:
            for i in range(len(work.todo)):
                report("requests", work.n_done + i, n_all)
                answer = answers.get()
                file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
                n_failed += answer["response"] is None
                n_refused += (answer["response"] or {}).get("status_code", 200) >= 400
    except OSError as error:
        raise CflowError(f"cannot write {target}: {error.strerror}") from None
    say(
        f"{n_all - n_failed} of {n_all} requests are answered in {target}, {n_refused} with an error"
    )
    if n_failed:
        raise CflowError(f"{n_failed} requests got no answer; run the same command again for them")


def _answer(raw: bytes, line: Line, url: str, api_key: str | None) -> dict[str, Any]:
    """The line of an answer, in OpenAI's shape."""
    _, path, body = _parse(raw, f"line {line.number}")
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = json.dumps({"priority": LOWEST} | body).encode()
    answer: dict[str, Any] = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id}
    n_tries = 0
    while True:
        status, reply, wait_s = _post(urllib.request.Request(url + path, data, headers))
        if reply is not None and status < 500 and status != 429:
            return answer | {"response": {"status_code": status} | reply, "error": None}
        n_tries += status != 429
        if n_tries == TRIES:
            text = reply["body"] if reply is not None else "the server does not answer"
            error = {"code": str(status or "unreachable"), "message": str(text)}
            return answer | {"response": None, "error": error}
        time.sleep(min(wait_s or 2.0 ** max(n_tries - 1, 0), MAX_WAIT_S))


def _post(request: urllib.request.Request) -> tuple[int, dict[str, Any] | None, float]:
    """Status, answer, and the seconds to wait that it asks for. Without an answer, 0 and None."""
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, _reply(response), 0.0
    except urllib.error.HTTPError as error:
        with error:
            wait = error.headers.get("Retry-After") or ""
            return error.code, _reply(error), float(wait) if wait.isdecimal() else 0.0
    except (OSError, ValueError):
        return 0, None, 0.0


def _reply(response: Any) -> dict[str, Any]:
    text = response.read()
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode(errors="replace")[:1000]
    return {"request_id": response.headers.get("x-request-id") or "", "body": body}


# ---- an engine of its own ----


def send_to_own_engine(work: Work, target: Path, config: EngineConfig, parallel: int) -> None:
    if not work.todo:
        say(f"all {work.n_done} requests are answered in {target}")
        return
    with _server(config) as url:
        send(work, target, url, None, parallel)


@contextmanager
def _server(config: EngineConfig) -> Iterator[str]:
    """A server on a port of this machine; yields its address once the model is loaded."""
    import asyncio

    from cflow.engine.client.local import LocalEngine
    from cflow.server.commands.startup import wait_ready
    from cflow.server.config import ServerConfig
    from cflow.server.http.app import create_app
    from cflow.server.http.listen import listen
    from cflow.server.http.server import http_server

    settings = ServerConfig(engine=config)
    (sock,) = listen(["127.0.0.1"], 0)
    started: Queue[BaseException | None] = Queue()
    stop = threading.Event()

    async def run() -> None:
        engine = await LocalEngine.start(config)
        try:
            await wait_ready(engine)
            server = http_server(create_app(settings, engine), settings)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            started.put(None)
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving
        finally:
            await engine.close()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            started.put(error)

    thread = threading.Thread(target=main)
    thread.start()
    try:
        if (error := started.get()) is not None:
            raise error
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        sock.close()
