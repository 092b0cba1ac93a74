"""The cflow command: flags, output, and errors as one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.base.machine import Memory
from cflow.engine.files import catalogue, hub
from cflow.engine.files.shapes import SHAPES
from cflow.server.commands import startup
from cflow.server.commands.cli import app
from cflow.server.commands.options import ENGINE_FLAGS, read_engine
from harness.fake_engine import READY
from harness.waiting import LIMIT_S

runner = CliRunner()

SHAPE = """
architecture = "llama"
n_layers = 2
d_model = 64
vocab_size = 320
context = 128
tied = true
norm_eps = 1e-5

[layer]
n_heads = 4
n_kv_heads = 2
head_dim = 16
d_ff = 96

[layer.rope]
kind = "half"
dim = 16
base = 10000.0
"""


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SHAPE)
    return path


@pytest.fixture
def model(shape: Path) -> Path:
    path = shape.with_suffix(".cflow")
    result = runner.invoke(app, ["synth", str(shape), str(path)])
    assert result.exit_code == 0, result.output
    return path


def run_json(*arguments: object) -> dict[str, Any]:
    result = runner.invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_every_command_explains_itself() -> None:
    for name in "serve convert run chat bench perplexity plan inspect synth doctor".split():  # noqa: SIM905
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0
        assert len(result.output.splitlines()) > 5


@pytest.mark.parametrize("group", [[], ["lab"]])
def test_help_is_whole_where_there_are_80_columns(group: list[str]) -> None:
    """In the list of commands the first sentence of each, which a narrow place cuts with dots."""
    text = runner.invoke(app, [*group, "--help"]).output
    assert "Commands:" in text
    assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", ["serve", "run", "chat"])
def test_engine_flags_are_the_same_everywhere(command: str) -> None:
    text = runner.invoke(app, [command, "--help"]).output
    assert all(f"--{name.replace('_', '-')}" in text for name in ENGINE_FLAGS)


def test_engine_settings_come_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLOW_THREADS", "3")
    monkeypatch.setenv("CFLOW_KV_MEMORY", "1GiB")
    config = read_engine({"kv_memory": "2GiB", "context": None})
    assert (config.threads, config.kv_memory) == (3, 2 << 30)


def test_inspect(model: Path) -> None:
    found = run_json("inspect", model)
    assert found["header"]["n_layers"] == 2
    assert found["header"]["order"] == "layer"
    assert [(run["first"], run["last"]) for run in found["layers"]] == [(0, 1)]
    assert found["layers"][0]["d_ff"] == 96
    embedding = next(t for t in found["tensors"] if t["role"] == "embedding")
    assert (embedding["n_rows"], embedding["n_cols"], embedding["block"]) == (320, 64, None)
    text = runner.invoke(app, ["inspect", str(model)]).output
    assert "4 heads of 16, 2 KV heads, dense 96" in text


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_file_that_is_cut_in_its_weights_is_told(model: Path, command: str) -> None:
    n_bytes = model.stat().st_size
    os.truncate(model, n_bytes - 1)
    problem = runner.invoke(app, [command, str(model)]).exception
    assert isinstance(problem, CflowError)
    assert f"{n_bytes - 1} bytes, its header says {n_bytes}" in str(problem)


def test_a_file_in_stage_order_is_inspected_and_run(shape: Path, model: Path) -> None:
    by_stage = shape.with_suffix(".vflow")
    assert (
        runner.invoke(app, ["synth", str(shape), str(by_stage), "--order", "stage"]).exit_code == 0
    )
    assert run_json("inspect", by_stage)["header"]["order"] == "stage"
    assert re.search(r"order +stage", runner.invoke(app, ["inspect", str(by_stage)]).output)
    flags = ["-p", "hello", "--max-tokens", "8", "--temperature", "0"]
    texts = [runner.invoke(app, ["run", str(path), *flags]) for path in (model, by_stage)]
    assert [text.exit_code for text in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout


def test_what_has_no_flag_is_set_in_the_environment(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[EngineConfig] = []

    def run(config: EngineConfig, **_: Any) -> None:
        found.append(config)
        raise CflowError("seen")

    monkeypatch.setattr("cflow.engine.measure.bench.run", run)
    for environment, seconds in (({"CFLOW_STUCK": "20"}, 20), ({}, 60)):
        runner.invoke(app, ["bench", str(model)], env=environment)
        assert found.pop().stuck_s == seconds
    result = runner.invoke(app, ["bench", str(model)], env={"CFLOW_STUCK": "never"})
    assert "CFLOW_STUCK" in str(result.exception)


def test_plan_of_a_file_and_of_its_shape_agree(
    model: Path, shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cflow.engine.measure.plan.native.probe_bandwidth", lambda *_: 10e9)
    memory = Memory(total=1 << 30, available=1 << 30, limited_by="test")
    monkeypatch.setattr("cflow.engine.measure.plan.machine.memory", lambda: memory)
    of_file, of_shape = run_json("plan", model), run_json("plan", shape)
    assert of_file == of_shape
    assert of_file["resident_bytes"] == model.stat().st_size
    assert of_file["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, dim, f16
    assert of_file["predicted_decode_tok_s"] == 10e9 / of_file["bytes_per_token"]
    assert of_file["stages"] == len(of_file["stage_list"])
    assert sum(stage["bytes"] for stage in of_file["stage_list"]) == of_file["layer_bytes"]
    assert of_file.keys() >= {"barriers", "critical_path_bytes", "critical_path_closed_form_bytes"}
    output = " ".join(runner.invoke(app, ["plan", str(model)]).output.split())
    assert str(model) in "".join(output.split())  # what was asked for, however it calls itself
    assert of_file["memory_limited_by"] == "test"
    for words in (
        "(test)",
        of_file["threads_reason"],
        "predicted decode",
        "whatever the delays",
        "sum over layers of max(attention",
    ):
        assert words in output


def test_what_stays_of_layers_is_told() -> None:
    """And that the memory asked for also holds those that come and go."""
    ready = replace(
        READY, n_layers=30, n_layers_kept=11, n_layer_slots=15, layer_bytes=63_000_000,
        layer_step_bytes=62_000_000,
    )  # fmt: skip
    assert startup._tiers(ready) == (
        "11 of 30 layers stay in memory, the rest share 4 slots, 63 MB in all, 62 MB read in every "
        "step, "
    )


def test_plan_of_a_name_is_of_the_model_where_that_is_here(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of the same name have other weights than what would be served."""
    monkeypatch.setattr("cflow.engine.measure.plan.native.probe_bandwidth", lambda *_: 10e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = run_json("plan", "smollm2-135m")
    made = hub._catalogue_file(catalogue.entries()["smollm2-135m"])
    shutil.copy(model, made)
    assert run_json("plan", "smollm2-135m")["resident_bytes"] == model.stat().st_size
    assert shape["resident_bytes"] > model.stat().st_size


def test_plan_of_nothing_lists_models_and_shapes() -> None:
    problem = runner.invoke(app, ["plan", "nosuchshape"]).exception
    assert isinstance(problem, CflowError)
    for name in ("smollm2-135m", "tinystories", *(path.stem for path in SHAPES.glob("*.toml"))):
        assert name in str(problem)


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"cflow {metadata.version('cflow')}\n")


def test_doctor() -> None:
    found = run_json("doctor")
    assert list(found) == [
        "processor", "kernels", "threads", "throttling", "memory", "huge pages", "disk",
    ]  # fmt: skip
    assert found["kernels"]["value"] in ("scalar", "avx2", "avx512vnni")
    assert "threads" in runner.invoke(app, ["doctor"]).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "missing.cflow"], ["plan", "missing"], ["synth", "no-such-shape", "x.cflow"],
        ["convert", "missing.gguf", "x.cflow"], ["bench", "x", "--batch", "one"],
        ["bench", "x", "--isa", "sse9"], ["serve", "--config", "missing.toml"],
        ["serve", "missing", "--port", "0"], ["run", "x", "-p", "a", "--temperature", "7"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_errors_are_cflow_errors(arguments: list[str]) -> None:
    """main() turns these into one line; none leaves a file behind."""
    result = runner.invoke(app, arguments)
    assert isinstance(result.exception, CflowError)
    assert not Path("x.cflow").exists()


@pytest.mark.parametrize("command", ["overlap", "storage"])
def test_what_could_not_be_written_is_not_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cflow.server.commands.lab._needs_extra", lambda: pytest.fail("begun"))
    problem = runner.invoke(app, ["lab", command]).exception
    assert isinstance(problem, CflowError)
    assert "not the root of a checkout" in str(problem)
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line_and_exit_code_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cflow.server", "inspect", "missing.cflow"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cflow: error: ")
    assert done.stderr.count("\n") == 1
    assert "missing.cflow" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "command", "status"),
    [(signal.SIGINT, "serve", 130), (signal.SIGTERM, "serve", 0), (signal.SIGTERM, "convert", 143)],
)
def test_signals_before_the_imports_are_done(
    number: signal.Signals, command: str, status: int, tmp_path: Path
) -> None:
    """What is imported first takes for ever here."""
    slow = "import sys, time\nprint('importing', flush=True)\ntime.sleep(3600)\n"
    (tmp_path / "typer.py").write_text(slow)
    with subprocess.Popen(
        [sys.executable, "-m", "cflow.server", command],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        # A shell's background jobs ignore it, and so do the processes that tests run in there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert said == ("cflow: interrupted\n" if number == signal.SIGINT else "")


def test_a_port_in_use_is_told_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = runner.invoke(app, ["serve", "missing", "--port", port])
    assert isinstance(result.exception, CflowError)
    assert f"cannot listen on 127.0.0.1:{port}" in str(result.exception)
