"""docs/benchmarks.md out of docs/results/benchmarks.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import stages
from bench.rows import MADE, ROWS, Row
from cflow.engine.lab.page import table

INTRODUCTION = """\
# Benchmarks

Written by `make bench`, and `make bench-peers` for the table of peers, on {machine}. A figure is the \
median of the runs, followed by the lowest and the highest.

A **ceiling** is what this machine allows. For one stream that decodes it is the bandwidth of its memory, \
read in turn with the runs and by as many threads, over the bytes that a token reads; each run is compared \
with the probes beside it. Steps of many rows share those bytes and are also held against the products \
of 8-bit numbers that the processor can add up in registers ({products}`tests/bench/multiply.c`): \
the larger of both times is the floor. Neither counts attention. Goals in brackets were set in tokens a \
second where AVX-512-VNNI is; here their share of the ceiling there counts. Models have random weights \
but for SmolLM2 and the bundled one."""

SWEEPS = """\
## Rows a step

So many streams decode at once, each a row of every step, from empty contexts: tokens a second of all \
together, and their share of the ceiling."""

PROFILES = """\
## Profiles

Where the time of decode goes (`python -m bench.stages FILE.cflow`): the stages of a token by what they \
compute, from an empty context on, medians of seven rounds, each between two probes of memory. A probe is \
the best of its passes, decode is all that happens: beside the model stands the median probe, and in \
brackets the median of passes alone. Cycles are \
of one thread for a tile of 128 x 256 weights, by the time stamp counter; beside them what llvm-mca makes \
of the inner loop out of the first-level cache ([kernels.md](kernels.md)), by the processor's own clock. \
Idle: how long a thread waits in a stage for the others and for their call, in the mean."""

PEERS = """\
## Peers

Random weights of the same shapes, the same GGUF file for all (cflow converts it), {threads} threads, \
the engines in turn in one run, above 8 GB one after the other. They are fed random tokens and sample \
nothing, cflow makes a greedy choice with every token. Tokens a second."""

COMMANDS = """\
## Commands

In the checkout, after `make bench`; FILE is a model's name. `PYTHONPATH=tests` goes before `python`."""


def write(results: Mapping[str, Any], path: Path) -> None:
    path.write_text("\n\n".join(_sections(results)) + "\n")


def verdict(found: Mapping[str, Any]) -> str:
    """A row in a line, as progress."""
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
    """Three digits, or all before the point."""
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
