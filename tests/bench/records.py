"""The cost of the hot kernels without a clock: instructions by callgrind, cycles by llvm-mca.

    make records

Writes docs/results/kernels.json and the table docs/kernels.md. `make test` counts instructions again
and compares them with that file, so a slower kernel shows on any machine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cflow.engine.lab.page import table

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "docs" / "results" / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
TILE_BYTES = {"q4_0": 18432, "q4_1": 20480, "q8_0": 34816, "q4_k": 18944, "q6_k": 26880}
MACHINES = {"avx2": "znver3", "avx512vnni": "sapphirerapids"}  # whose pipelines llvm-mca models
LLVM_MCA = "llvm-mca-19"  # one version, because its models of processors change
UNITS_OF_TILE = 128 // 32 * 256 // 32

INTRODUCTION = """\
# Cost of the hot kernels

Written by `make records`. No clock is involved, so a slower kernel shows on any machine. Compiled by \
{compiler}.

**Instructions** are counted by callgrind, for each tile of 128 x 256 weights and each row of x, in \
products with one row (decode) and with eight. `make test` counts them again and fails if a count has \
grown by more than 2 % over `docs/results/kernels.json`; it skips this with another compiler. **Cycles** \
are estimates by {llvm_mca} for the inner loops ({machines}) with data in the first-level cache: of a tile \
with one row, and of each further row. Valgrind does not support AVX-512."""

ATTENTION = """\
Instructions of attention for each head and 32 positions (six heads of 128 share keys and values):"""


@dataclass(frozen=True)
class Records:
    compiler: str
    llvm_mca: str
    instructions: dict[str, float]  # "avx2 q4_0 8": of a tile, or 32 positions, with 8 rows
    cycles: dict[str, float]  # "avx2 q4_0 1": of a tile with one row; "avx2 q4_0 +1": one more row


def output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def compiler(build: Path) -> str:
    """The version of the compiler that made the code."""
    cache = (build / "CMakeCache.txt").read_text()
    found = re.search(r"^CMAKE_C_COMPILER:\w+=(.*)$", cache, re.MULTILINE)
    assert found, f"{build} has no C compiler"
    return output(found[1], "--version").splitlines()[0]


def count_instructions(build: Path) -> dict[str, float]:
    """Instructions for one tile or 32 positions, by job of tests/bench/tiles.c."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        marks = ["--toggle-collect=measured", "--dump-after=measured"]
        jobs = [line.split() for line in output(*tool, *marks, build / "tiles").splitlines()]
        found = {}
        for i, (isa, what, rows, tiles) in enumerate(jobs, start=1):
            total = re.search(r"^totals: (\d+)$", Path(f"{out}.{i}").read_text(), re.MULTILINE)
            assert total, f"callgrind counted nothing for job {i}"
            found[f"{isa} {what} {rows}"] = int(total[1]) / int(tiles)
    return found


def estimate_cycles(build: Path, isa: str) -> dict[str, float]:
    """Cycles for a whole tile, from the regions of tests/bench/regions.c."""
    assembly = next(build.glob(f"CMakeFiles/regions_{isa}.dir/**/*.s"))
    text = output(LLVM_MCA, f"-mcpu={MACHINES[isa]}", "-json", assembly)
    found = {}
    for region in json.loads(text)["CodeRegions"]:
        summary = region["SummaryView"]
        found[region["Name"]] = summary["TotalCycles"] / summary["Iterations"] * UNITS_OF_TILE
    cycles = {}
    for encoding in TILE_BYTES:
        one, three = found[f"{encoding} 1"], found[f"{encoding} 3"]
        cycles[f"{isa} {encoding} 1"] = one
        cycles[f"{isa} {encoding} +1"] = (three - one) / 2
    return cycles


def page(records: Records) -> str:
    count, cycles = records.instructions, records.cycles
    head = ["encoding", "bytes", "scalar, 1 row", "8 rows", "AVX2, 1 row", "8 rows"]
    head += ["AVX2 cycles, 1 row", "one more", "AVX-512-VNNI cycles, 1 row", "one more"]
    products = []
    for encoding, size in TILE_BYTES.items():
        cells = [encoding, f"{size:,}"]
        for isa in ("scalar", "avx2"):
            cells += [f"{count[f'{isa} {encoding} {rows}'] / rows:,.0f}" for rows in (1, 8)]
        for isa in MACHINES:
            cells += [f"{cycles[f'{isa} {encoding} {rows}']:,.0f}" for rows in ("1", "+1")]
        products.append(cells)
    attention = [
        [kv, *(f"{count[f'{isa} attend_{kv} 6'] / 6:,.0f}" for isa in ("scalar", "avx2"))]
        for kv in ("f16", "q8")
    ]
    introduction = INTRODUCTION.format(
        compiler=records.compiler,
        llvm_mca=records.llvm_mca,
        machines=", ".join(f"{isa}: {name}" for isa, name in MACHINES.items()),
    )
    sections = [introduction, table(head, products)]
    sections += [ATTENTION, table(["KV", "scalar", "AVX2"], attention)]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    for tool, package in (("valgrind", "valgrind"), (LLVM_MCA, "llvm-19")):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not installed: Debian's package {package} has it")
    build = ROOT / "build" / "bench"
    cycles: dict[str, float] = {}
    for isa in MACHINES:
        cycles |= estimate_cycles(build, isa)
    version = re.search(r"LLVM version \S+", output(LLVM_MCA, "--version"))
    assert version, f"{LLVM_MCA} prints no version"
    records = Records(
        compiler(build),
        f"llvm-mca, {version[0]}",
        count_instructions(build),
        cycles,
    )
    RECORDS.write_text(json.dumps(asdict(records), indent=2) + "\n")
    PAGE.write_text(page(records))
    print(page(records))


if __name__ == "__main__":
    main()
