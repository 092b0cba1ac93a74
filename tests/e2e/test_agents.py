"""Agent frameworks and coding agents, unmodified, against a real server (`make test-clients`).

The engine is scripted: it answers with the texts that a test gives, so that no test depends on the
skill of a small model. HTTP, schemas, tool calls and streams are the product's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cflow.engine.base.messages import Delta, Progress
from cflow.engine.files.convert import convert
from cflow.engine.text.dialect import HERMES, Dialect
from cflow.server.config import server_config
from harness.fake_engine import READY, Call, FakeEngine
from harness.live import Live
from harness.scripts import CALL, Template, say
from harness.servers import serving

HERE = Path(__file__).parent / "clients"
BUILD = Path(__file__).parents[2] / "build"
PYTHON = BUILD / "agents" / "bin" / "python"
AIDER = BUILD / "aider" / "bin" / "aider"
MODULES = BUILD / "npm" / "node_modules"
CLAUDE = MODULES / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
TOLD = "It rains in Zürich."
CONTEXT = 1 << 20  # tokens are bytes, and coding agents begin with 50 kB
ENDS_S = 240.0  # imports alone take half a minute on busy cores


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"no {path}: run `make test-clients`")


class Scripted(FakeEngine):
    """Answers with `texts`, one a request."""

    def __init__(self, *texts: str) -> None:
        self.texts = [*texts]
        super().__init__(
            script=self._next,
            template=Template(),
            dialect=Dialect(HERMES, False),
            context=CONTEXT,
        )
        self.card = dataclasses.replace(self.card, name="M")
        self.put(ready=replace(READY, max_context=CONTEXT))

    def _next(self, call: Call) -> AsyncIterator[Delta | Progress]:
        assert self.texts, "the client asks once more than the test expects"
        return say(self.texts.pop(0))(call)

    @property
    def prompts(self) -> list[str]:
        return [bytes(t for t in call.prompt if t < 256).decode() for call in self.calls]


@pytest.fixture
def scripted() -> Iterator[Callable[..., Live]]:
    """scripted(*texts): a server whose model says these."""
    running: list[Live] = []

    def start(*texts: str) -> Live:
        running.append(Live(Scripted(*texts), server_config({})))
        return running[-1]

    yield start
    for live in running:
        live.close()


def run(*command: str | Path, home: Path, **variables: str) -> str:
    """What a program prints. home: its working directory and home folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command,
        capture_output=True, text=True, check=False, timeout=ENDS_S, cwd=home,
        stdin=subprocess.DEVNULL, env=environment | variables,
    )  # fmt: skip
    print(done.stdout[-8000:], done.stderr[-8000:])
    assert done.returncode == 0
    return done.stdout


def found(printed: str) -> Any:
    return json.loads(printed.splitlines()[-1])


def check_agent(live: Live, answer: str) -> None:
    """The last prompt holds what the client's tool returned; the last text reached its user."""
    assert isinstance(live.engine, Scripted)
    assert live.engine.texts == []
    assert "sun in Zürich" in live.engine.prompts[-1]
    assert answer == TOLD


@needs(PYTHON)
@pytest.mark.parametrize(
    "client",
    [
        "openai_chat", "openai_stream", "openai_responses", "anthropic_messages",
        "anthropic_stream", "pydantic_ai", "openai_agents_chat", "openai_agents_responses",
        "langchain_agent",
    ],
)  # fmt: skip
def test_python_agents(scripted: Callable[..., Live], client: str, tmp_path: Path) -> None:
    live = scripted(CALL, TOLD)
    url = f"http://127.0.0.1:{live.port}"
    url += "" if client.startswith("anthropic") else "/v1"
    check_agent(live, found(run(PYTHON, HERE / "python_agents.py", client, url, home=tmp_path)))


@needs(PYTHON)
@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(scripted: Callable[..., Live], mode: str, tmp_path: Path) -> None:
    person = {"name": "Ada", "age": 36}
    as_call = json.dumps({"name": "Person", "arguments": person})
    text = f"<tool_call>\n{as_call}\n</tool_call>" if mode == "TOOLS" else json.dumps(person)
    live = scripted(text)
    url = f"http://127.0.0.1:{live.port}/v1"
    assert found(run(PYTHON, HERE / "extract.py", mode, url, home=tmp_path)) == person


@needs(PYTHON)
def test_llama_index_finds_a_document_by_its_embedding(tmp_path: Path) -> None:
    """The model is random, but the question is one of the documents: its vector has the cosine 1."""
    from oracles import embedding_model  # with torch, which the other tests do not need

    texts = ["A cat sleeps.", "It rains in Zürich.", "Rust never sleeps.", "Seven lean cows."]
    convert(
        str(embedding_model.save(embedding_model.build(), tmp_path / "m")), tmp_path / "m.cflow"
    )
    with serving(tmp_path / "m.cflow") as server:
        program = HERE / "llama_index_search.py"
        ranked = found(run(PYTHON, program, f"{server.url}/v1", texts[1], *texts, home=tmp_path))
        vectors = [
            np.array(
                server.http.post("/v1/embeddings", json={"input": text}).json()["data"][0][
                    "embedding"
                ]
            )
            for text in texts
        ]
    assert ranked[0][0] == texts[1]
    assert sorted(text for text, _ in ranked) == sorted(texts)
    for text, score in ranked:
        assert score == pytest.approx(vectors[texts.index(text)] @ vectors[1], abs=1e-5)


@needs(AIDER)
def test_aider_edits_a_file(scripted: Callable[..., Live], tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text('print("hello")\n')
    edit = """hello.py
```python
<<<<<<< SEARCH
print("hello")
=======
print("goodbye")
>>>>>>> REPLACE
```"""
    live = scripted(f"It says goodbye now.\n\n{edit}")
    run(
        AIDER, "--model", "openai/M", "--openai-api-base", f"http://127.0.0.1:{live.port}/v1",
        "--edit-format", "diff", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable",
        "--no-show-model-warnings", "--no-gitignore", "--map-tokens", "0",
        "--message", "Say goodbye instead.", "hello.py",
        home=tmp_path,
    )  # fmt: skip
    assert (tmp_path / "hello.py").read_text() == 'print("goodbye")\n'
    assert isinstance(live.engine, Scripted)
    assert "Say goodbye instead." in live.engine.prompts[0]


@needs(MODULES)
@pytest.mark.skipif(shutil.which("node") is None, reason="no node: apt-get install nodejs")
@pytest.mark.parametrize(
    "client",
    ["openai_chat", "openai_responses", "ai_sdk_chat", "ai_sdk_stream", "ai_sdk_responses"],
)
def test_node_agents(scripted: Callable[..., Live], client: str, tmp_path: Path) -> None:
    live = scripted(CALL, TOLD)
    shutil.copy(HERE / "agents.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    url = f"http://127.0.0.1:{live.port}/v1"
    check_agent(live, found(run("node", tmp_path / "agents.mjs", client, url, home=tmp_path)))


@needs(MODULES)
@pytest.mark.skipif(shutil.which("node") is None, reason="no node: apt-get install nodejs")
def test_codex_runs_a_command(scripted: Callable[..., Live], tmp_path: Path) -> None:
    """On /v1/responses, with the hosted tools and namespaces that it always lists."""
    command = {
        "name": "exec_command",
        "arguments": {"cmd": "echo sun in Zürich > found.txt; cat found.txt"},
    }
    live = scripted(f"<tool_call>\n{json.dumps(command)}\n</tool_call>", TOLD)
    provider = f'{{name="cflow",base_url="http://127.0.0.1:{live.port}/v1",wire_api="responses"}}'
    settings = (f"model_providers.cflow={provider}", 'model_provider="cflow"', 'model="M"')
    answer = run(
        MODULES / ".bin" / "codex", "exec", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *(word for setting in settings for word in ("-c", setting)),
        "What is the weather in Zürich?",
        home=tmp_path,
    )  # fmt: skip
    assert (tmp_path / "found.txt").read_text() == "sun in Zürich\n"
    check_agent(live, answer.strip())


@needs(CLAUDE)
def test_claude_code_runs_a_command(scripted: Callable[..., Live], tmp_path: Path) -> None:
    """On /v1/messages, with reminders in the middle of the conversation."""
    command = {
        "name": "Bash",
        "arguments": {
            "command": "echo sun in Zürich > found.txt; cat found.txt",
            "description": "look",
        },
    }
    live = scripted(f"<tool_call>\n{json.dumps(command)}\n</tool_call>", TOLD)
    variables = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{live.port}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "M",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    question = "What is the weather in Zürich?"
    answer = run(CLAUDE, "-p", question, "--allowedTools", "Bash", home=tmp_path, **variables)
    check_agent(live, answer.strip())
    assert (tmp_path / "found.txt").read_text() == "sun in Zürich\n"
