"""What a command imports before it fails or shows its help: each heavy module costs 0.05 to 1 s.

pydantic is not in the lists: `run` and `chat` check sampling flags with the schema of requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LAB = ("cflow.engine.lab", "torch", "matplotlib")
ENGINE = ("numpy", "_cffi_backend", "cflow.engine.native", "cflow.engine.files.convert", "gguf")
TEXT = ("tokenizers", "llguidance", "jinja2", "transformers")
HTTP = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
REST = ("asyncio", "rich", "huggingface_hub", "httpx", "safetensors")
ALL = (*LAB, *ENGINE, *TEXT, *HTTP, *REST)

COMMANDS = "serve convert run chat batch bench perplexity plan inspect synth doctor lab".split()  # noqa: SIM905
HELP = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
ERRORS = [
    ["nosuch"],
    ["serve", "/no/such"],
    ["serve", "--nosuch"],
    ["serve", "--config", "/no/such"],
    ["serve", "--threads", "0"],
    ["serve", "--kv", "f64"],
    ["serve", "--port", "70000"],
    ["serve", "--host", "203.0.113.1"],
    ["serve", "--port", "0", "--api-keys", "/no/such"],
    ["serve", "--port", "0", "--tls-cert", "/no/such"],
    ["serve", "--port", "0", __file__],
    ["convert", "/no/such", "x.cflow"],
    ["run", "/no/such", "-p", "x"],
    ["run", "x"],
    ["run", "x", "-p", "x", "--temperature", "7"],
    ["chat", "/no/such"],
    ["batch", "/no/such", "x"],
    ["batch", "/no/such", "x", "--url", "http://127.0.0.1:9"],
    ["bench", "/no/such"],
    ["bench", "x", "--batch", "one"],
    ["perplexity", "/no/such", "text"],
    ["plan", "/no/such"],
    ["plan", "/no/such.toml"],
    ["inspect", "/no/such"],
    ["synth", "nosuch", "x.cflow"],
    ["lab", "train", "/no/such"],
]
WORK = [["inspect", "tinystories"]]
# Runs each command in a fork of a process that has only the list of commands.
PROBE = """
import json, os, sys
import pydantic
from cflow.server.__main__ import main
from cflow.server.commands import cli

cases, heavy = json.load(sys.stdin)
for arguments in cases:
    source, sink = os.pipe()
    if not os.fork():
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.argv[1:] = arguments
        code = None
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            found = [name for name in heavy if name in sys.modules]
            os.write(sink, json.dumps([code, found]).encode())
            os._exit(0)
    os.close(sink)
    with open(source) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""

Found = dict[str, tuple[int | None, list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By command line: the exit code, and the heavy modules that are imported at the end."""
    folder = tmp_path_factory.mktemp("commands")
    cases = [*HELP, *ERRORS, *WORK]
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps([cases, ALL]),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder)},
    )
    assert not list(folder.rglob("*.cflow"))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        " ".join(case): (code, heavy) for case, (code, heavy) in zip(cases, answers, strict=True)
    }


@pytest.mark.parametrize("command", [" ".join(case) for case in HELP])
def test_f04_help_imports_nothing_heavy(command: str, found: Found) -> None:
    assert found[command] == (0 if command else 2, [])


@pytest.mark.parametrize(
    "command", [" ".join(case) for case in ERRORS], ids=lambda command: command[:60]
)
def test_f04_an_error_exit_imports_nothing_heavy(command: str, found: Found) -> None:
    code, heavy = found[command]
    assert code in (1, 2)
    assert heavy == []


def test_a_command_with_work_to_do_is_seen_to_import_the_engine(found: Found) -> None:
    code, heavy = found["inspect tinystories"]
    assert code == 0
    assert "cflow.engine.native" in heavy
