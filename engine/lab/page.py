"""The layout of docs/claims.md: a table of claims, then a section on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

HERE = "here"
NOT_YET = "not yet measured"


@dataclass(frozen=True)
class Claim:
    """A row of the table. verdict: holds, does not hold, or why it is not known. text: its section."""

    name: str
    published: str
    ours: str
    command: str
    machine: str
    verdict: str
    text: str


def page(claims: Sequence[Claim], here: str) -> str:
    introduction = f"""\
# What the published design claims, and what holds

Written by `make claims` on {date.today().isoformat()}; rows that need training, a disk or a file of some 17 GB show the committed figures in `docs/results/`. \
"Published" is arXiv 2608.23841v1. "Here" is {here}. The arms of a comparison alternate, round by \
round, in one run. A rate is the median over rounds, with the lowest and highest in brackets; a ratio \
is the median of the ratios within rounds. Commands run in the checkout after `make claims`, which \
builds their programs and shapes."""
    head = ("claim", "published", "ours", "command", "machine", "verdict")
    rows = [(c.name, c.published, c.ours, c.command, c.machine, c.verdict) for c in claims]
    sections = [f"## {claim.name}\n\n{claim.text}" for claim in claims]
    return "\n\n".join([introduction, table(head, rows), *sections]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
