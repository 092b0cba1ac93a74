"""Writes docs/benchmarks.md from docs/results/benchmarks.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import stages
from bench.rows import MADE, ROWS, Row
from cflow.engine.lab.page import table

INTRODUCTION = """\
# Benchmarks

Written on {machine} by `make bench`; the table of peers by `make bench-peers`. A figure is the median of \
the runs, with the lowest and highest in brackets.

A **ceiling** is what this machine allows. For one decoding stream it is memory bandwidth divided by the \
bytes that a token reads. Bandwidth is probed between the runs, with as many threads, and each run is \
compared with the probes before and after it. The rows of a step share those bytes, so steps of many rows \
are also bounded by the rate at which the processor multiplies and adds 8-bit numbers in registers \
({products}`tests/bench/multiply.c`); the slower bound counts. Neither includes attention. Goals with \
tokens a second in brackets were set on a machine with AVX-512-VNNI; what counts here is their share of \
that machine's ceiling. All models but SmolLM2 and the bundled one have random weights."""

SWEEPS = """\
## Rows a step

Each column is a number of streams that decode together from empty contexts, one row a step each: tokens \
a second of all streams, and their share of the ceiling."""

PROFILES = """\
## Profiles

Where the time of decode goes (`python -m bench.stages FILE.cflow`): a token's stages by what they \
compute, from an empty context, medians of seven rounds, each between two probes of memory. A probe is the \
best of several passes; the model's line shows the median probe, and in brackets the median of single \
passes, which compares better with decode. Cycles are those of one thread for a tile of 128 x 256 weights, \
by the time stamp counter; next to them llvm-mca's estimate of the inner loop with data in the first-level \
cache ([kernels.md](kernels.md)), by the processor's own clock. Idle: the mean time that a thread waits in \
a stage for the others and for their signal."""

PEERS = """\
## Peers

Tokens a second with {threads} threads, random weights of the same shapes, and the same GGUF file for all \
engines (cflow converts it). Engines alternate in one run; with files above 8 GB each runs once. They are \
fed random tokens and sample nothing; cflow samples greedily with every token."""

COMMANDS = """\
## Commands

To be run in the checkout after `make bench`. FILE is a model's name; put `PYTHONPATH=tests` before \
`python`."""


def write(results: Mapping[str, Any], path: Path) -> None:
    path.write_text("\n\n".join(_sections(results)) + "\n")


def verdict(found: Mapping[str, Any]) -> str:
    """A row as one line of progress."""
    if "why_not" in found:
        return f"not measured: {found['why_not']}"
    _, value, ceiling, ratio, goal, met = _cells("", found)
    parts = [
        value,
        ceiling and f"{ratio} of {ceiling}",
        f"{goal} {met}".strip(),
    ]
    return ", ".join(filter(None, parts))


def _sections(results: Mapping[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    measured = {name: row for name, row in rows.items() if "why_not" not in row}
    rates = [row["gmac_s"] for row in measured.values()]
    products = f"{min(rates):.0f} to {max(rates):.0f} G/s, " if rates else ""
    yield INTRODUCTION.format(machine=results["machine"], products=products)
    head = ("work", "cflow", "ceiling", "of it", "goal", "met")
    yield table(head, [_cells(name, row) for name, row in rows.items()])
    yield "![shares of the ceilings](results/benchmarks.png)"
    if sweeps := {name: row["steps"] for name, row in measured.items() if row["steps"]}:
        yield SWEEPS
        yield _sweeps(sweeps)
    if results["profiles"]:
        yield PROFILES
        yield table(("model", *stages.COLUMNS), _profiles(results["profiles"]))
    yield from _peers(results["peers"])
    yield COMMANDS
    yield table(("model", "made by"), _made(rows))
    yield table(("work", "command", "date"), _commands(rows))


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if "why_not" in row:
        return name, f"not measured: {row['why_not']}", "", "", "", ""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    ceiling = "" if row["ceiling"] is None else number(row["ceiling"])
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    return name, f"{spread(row['runs'])} {row['unit']}", ceiling, ratio, row["goal"], met


def spread(runs: Mapping[str, float]) -> str:
    low, middle, high = (number(runs[key]) for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _sweeps(sweeps: Mapping[str, Any]) -> str:
    sizes = [step[0] for step in next(iter(sweeps.values()))]
    rows = [
        (name, *(f"{number(rate)} ({rate / ceiling:.2f})" for _, rate, ceiling in steps))
        for name, steps in sweeps.items()
    ]
    return table(("", *map(str, sizes)), rows)


def _profiles(profiles: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in profiles.items():
        probe = f"{name}, {found['probe_gb_s']:.1f} ({found['pass_gb_s']:.1f}) GB/s"
        for row in stages.rows(found):
            yield probe, *row
            probe = ""


def _peers(peers: Mapping[str, Any]) -> Iterator[str]:
    if not peers:
        return
    yield PEERS.format(threads=peers["threads"])
    engines = peers["engines"]
    rows = []
    for name, rates in peers["rows"].items():
        best = max((r["median"] for e, r in rates.items() if e != "cflow"), default=0)
        gain = f"{rates['cflow']['median'] / best:.2f}x" if best and "cflow" in rates else ""
        rows.append((name, *(spread(rates[e]) if e in rates else "" for e in engines), gain))
    yield table(("work", *engines, "cflow over the best"), rows)
    notes = [f"- {engine}: {said}" for engine, said in engines.items()]
    yield "\n".join(notes)


def _of(rows: Mapping[str, Any]) -> list[Row]:
    return [row for row in ROWS if row.name in rows]


def _made(rows: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for source in dict.fromkeys(row.source for row in _of(rows)):
        names = {"shape": source.shape, "encoding": source.encoding, "file": source.name}
        made = (text.format(checkpoint="CHECKPOINT.gguf", **names) for text in MADE[source.made])
        yield source.name, "; ".join(f"`{text}`" for text in made) or "comes with cflow"


def _commands(rows: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in _of(rows):
        file = (
            "engine/files/data/tinystories.cflow" if row.source.made == "bundled" else "FILE.cflow"
        )
        yield row.name, f"`{row.command.format(model=file)}`", rows[row.name]["date"]
