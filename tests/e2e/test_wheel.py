"""The wheel, as somebody without a checkout installs it: all of cflow but the lab."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel unpacked in it."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def cflow(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the wheel's command. -S: an editable install must not be found before it."""
    path = os.pathsep.join([str(installed), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-S", "-m", "cflow.server", *arguments],
        capture_output=True,
        text=True,
        cwd=installed,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_it_holds_every_module_but_the_lab(installed: Path) -> None:
    ours = {
        path.relative_to(ROOT)
        for package in ("engine", "server")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "engine" / "lab")
    }
    packed = {path.relative_to(installed / "cflow") for path in installed.rglob("cflow/**/*.py")}
    assert packed == ours
    assert not (installed / "cflow" / "engine" / "lab").exists()
    for data in ("catalogue.toml", "shapes/smollm2-135m.toml"):
        assert (installed / "cflow" / "configs" / data).is_file()


def test_it_serves_and_runs_a_model(installed: Path) -> None:
    assert "Serve a model behind the OpenAI HTTP API." in cflow(installed, "serve", "--help").stdout
    found = cflow(installed, "inspect", "tinystories")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("arguments", [[], ["train", "x.toml"], ["claims"]])
def test_the_lab_says_where_it_is(installed: Path, arguments: list[str]) -> None:
    found = cflow(installed, "lab", *arguments)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "git clone" in found.stderr
    assert "pip install -e '.[lab]'" in found.stderr
