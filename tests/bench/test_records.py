"""Instructions of the hot kernels against those in docs/results/kernels.json."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import records
from cflow.engine.native import best_isa

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/bench/tiles.c with the engine's kernels, built as `make records` does."""
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    cmake, ninja = (
        shutil.which(name, path=str(Path(sys.executable).parent)) for name in ("cmake", "ninja")
    )
    if not cmake or not ninja:
        pytest.skip("cmake and ninja, of the extra `dev`, are not installed")
    folder = tmp_path_factory.mktemp("records")
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [cmake, "-S", str(ROOT / "native"), "-B", str(folder), *options, "-DCFLOW_BENCH=ON"],
        [cmake, "--build", str(folder), "--target", "tiles"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_page_shows_the_records() -> None:
    recorded = records.Records(**json.loads(records.RECORDS.read_text()))
    assert records.PAGE.read_text() == records.page(recorded)


def test_no_kernel_takes_more_instructions_than_recorded(build: Path) -> None:
    recorded = json.loads(records.RECORDS.read_text())
    if records.compiler(build) != recorded["compiler"]:
        pytest.skip(f"recorded with {recorded['compiler']}: another compiler makes other code")
    found = records.count_instructions(build)
    isas = ("scalar",) if best_isa() == "scalar" else ("scalar", "avx2")
    assert set(found) == {job for job in recorded["instructions"] if job.startswith(isas)}
    grown = {
        job: f"{count:.0f} instructions, {recorded['instructions'][job]:.0f} recorded"
        for job, count in found.items()
        if count > 1.02 * recorded["instructions"][job]
    }
    assert not grown, f"{grown}; `make records` records new counts, if this is intended"
