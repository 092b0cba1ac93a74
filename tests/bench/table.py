"""Measures the rows of the benchmark table, model by model, and writes docs/benchmarks.md.

    make bench                                   every row: some 12 minutes on an idle machine
    make bench FLAGS='--only "decode olmoe*"'    some rows; the other figures stay
    make bench FLAGS=--list                      lists the rows

Models are made in build/bench/models and removed when their rows are done. A row for which memory or
disk is too small is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import figures, page, picture
from bench.figures import Figure, Taken
from bench.rows import BITS, MADE, ROWS, Row, Source
from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.files import hub
from cflow.engine.files.synth import load_shape
from oracles.real_models import RealModel

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PROGRAMS = {"cflow": [sys.executable, "-P", "-m", "cflow.server"], "python": [sys.executable, "-P"]}
MORE_BYTES = 2_500_000_000  # of a run besides weights: the probe, keys and values, Python


class NotHere(Exception):
    """Why a row cannot be measured on this machine."""


# ---- commands and files ----


def run(command: str) -> str:
    """The output of a command of the table. NotHere: it fails."""
    program, *arguments = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    whole = [*PROGRAMS.get(program, [program]), *arguments]
    done = subprocess.run(whole, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        typed = command.replace(f"{ROOT}/", "")
        raise NotHere(f"`{typed}` failed with status {done.returncode}")
    return done.stdout


def file_bytes(source: Source) -> int:
    """Approximate size, known before the file is made."""
    if source.made == "bundled":
        return hub.BUNDLED_FILE.stat().st_size
    return int(load_shape(source.shape).n_parameters() * BITS[source.encoding] / 8)


def disk_bytes(source: Source) -> int:
    """Disk space needed to make it; a GGUF file exists beside its conversion."""
    return 0 if source.made == "bundled" else file_bytes(source) * len(MADE[source.made])


def making(source: Source, folder: Path) -> list[str]:
    checkpoint = ""
    if source.made == "real":
        try:
            checkpoint = str(RealModel.fetch(source.shape).gguf)
        except pytest.skip.Exception as reason:
            raise NotHere(str(reason)) from None
    names = {"shape": source.shape, "encoding": source.encoding, "checkpoint": checkpoint}
    return [text.format(file=folder / source.name, **names) for text in MADE[source.made]]


@contextmanager
def model(source: Source, folder: Path) -> Iterator[Path]:
    """Makes the .cflow file and removes it in the end, with the .gguf file that it was made from."""
    if source.made == "bundled":
        yield hub.BUNDLED_FILE
        return
    need, free = disk_bytes(source), machine.disk_free(folder)
    if need > free:
        raise NotHere(f"{need / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free")
    try:
        for command in making(source, folder):
            run(command)
        yield folder / f"{source.name}.cflow"
    finally:
        for left in folder.glob(f"{source.name}.*"):
            left.unlink()


def check_memory(source: Source, copies: int = 1) -> None:
    need = copies * file_bytes(source) + MORE_BYTES
    free = machine.memory().available
    if need > free:
        raise NotHere(f"{need / 1e9:.1f} GB of memory are needed, {free / 1e9:.1f} GB are free")


# ---- rows ----


def multiplied(threads: int) -> float:
    program = ROOT / "build" / "bench" / "multiply"
    return float(json.loads(run(f"{program} {threads} 5"))["gmac_s"])


def measure(rows: list[Row], path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Measures the rows of one model; rows with the same command share a run."""

    @cache
    def taken(command: str) -> Taken:
        gmac_s = multiplied(machine.cores().threads)
        printed = json.loads(run(command.format(model=path)))
        return Taken(printed, rows[0].source.shape, gmac_s)

    for row in rows:
        with reported(row, found):
            check_memory(row.source, row.copies)
            one = taken(row.command)
            if "expert_slots" in one.found:
                raise NotHere("not all experts fit into memory")
            found[row.name] = result(row, one, row.figure(one), found)


def add_profile(name: str, path: Path, profiles: dict[str, Any]) -> None:
    try:
        found = json.loads(run(f"python -m bench.stages {path} --json"))
    except NotHere as reason:
        print(f"  profile: not measured: {reason}")
    else:
        profiles[name] = found | {"date": date.today().isoformat()}


@contextmanager
def reported(row: Row, found: dict[str, dict[str, Any]]) -> Iterator[None]:
    try:
        yield
    except NotHere as reason:
        found[row.name] = {"why_not": str(reason), "date": date.today().isoformat()}
    print(f"  {row.name}: {page.verdict(found[row.name])}", flush=True)


def result(row: Row, taken: Taken, figure: Figure, found: dict[str, Any]) -> dict[str, Any]:
    names = ("probe_gb_s", "bytes_per_token", "kv_bytes_per_token", "isa", "threads")
    goal, is_met = judge(row, figure, found)
    return {
        **asdict(figure),
        "goal": goal,
        "met": is_met,
        "gmac_s": taken.gmac_s,
        **{name: taken.found[name] for name in names if name in taken.found},
        "date": date.today().isoformat(),
    }


def judge(row: Row, figure: Figure, found: dict[str, Any]) -> tuple[str, bool | None]:
    """The goal in words, and whether it is met; None without a goal or without the row to compare with."""
    said = f" ({row.said})" if row.said and not row.beside else ""
    if row.at_most is not None:
        return f"≤ {row.at_most:g} {figure.unit}{said}", figure.runs["median"] <= row.at_most
    if row.at_least is None or figure.ratio is None:
        return "", None
    if not row.beside:
        return f"≥ {row.at_least:.2f}{said}", figure.ratio >= row.at_least
    other = found.get(row.beside, {}).get("ratio")
    goal = f"≥ {row.at_least:.2f} {row.said}"
    return goal, None if other is None else figure.ratio >= row.at_least * other


def machine_text() -> str:
    cpu, cores = machine.cpu(), machine.cores()
    return (
        f"{cpu.model}, {cores.threads} cores, {cpu.l3_bytes >> 20} MiB of L3, "
        f"{machine.memory().total / 2**30:.0f} GiB of RAM, {native.best_isa()}"
    )


def load() -> dict[str, Any]:
    """Earlier figures if they were measured on this machine, else empty ones."""
    empty = {"machine": machine_text(), "rows": {}, "profiles": {}, "peers": {}}
    if not RESULTS.exists():
        return empty
    old: dict[str, Any] = json.loads(RESULTS.read_text())
    return empty | old if old["machine"] == empty["machine"] else empty


def save(results: dict[str, Any]) -> None:
    order = [row.name for row in ROWS if row.name in results["rows"]]
    results["rows"] = {name: results["rows"][name] for name in order}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page.write(results, PAGE)
    picture.draw(results, RESULTS.with_suffix(".png"))


def wanted(patterns: list[str]) -> list[Row]:
    rows = [row for row in ROWS if any(fnmatch(row.name, pattern) for pattern in patterns)]
    if not rows:
        raise SystemExit(f"no row matches {' or '.join(patterns)}; --list lists the rows")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="measure the benchmark table")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        help="rows to measure, with wildcards * and ?; default: all",
    )
    parser.add_argument("--list", action="store_true", help="show the rows and their commands")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench" / "models")
    args = parser.parse_args()
    rows = wanted(args.only)
    if args.list:
        print("\n".join(f"{row.name}: {row.command}" for row in rows))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    sources = list(dict.fromkeys(row.source for row in rows))
    most = max(map(disk_bytes, sources)) / 1e9
    print(f"{len(rows)} rows; models take up to {most:.1f} GB in {args.folder} at a time")
    results = load()
    for at, source in enumerate(sources, 1):
        ours = [row for row in rows if row.source == source]
        print(f"[{at}/{len(sources)}] {source.name}, {file_bytes(source) / 1e9:.2f} GB", flush=True)
        try:
            check_memory(source)
            with model(source, args.folder) as path:
                measure(ours, path, results["rows"])
                if any(row.figure is figures.decode for row in ours):
                    add_profile(source.name, path, results["profiles"])
        except NotHere as reason:
            for row in ours:
                with reported(row, results["rows"]):
                    raise reason
        save(results)


if __name__ == "__main__":
    main()
