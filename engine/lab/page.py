"""How docs/claims.md is laid out: a table of claims, then a section on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

HERE = "here"
NOT_YET = "not yet measured"


@dataclass(frozen=True)
class Claim:
    """A row of the table, and what stands below it. verdict: holds, does not, or why not known."""

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

Written by `make claims` on {date.today().isoformat()}; rows whose command trains, or needs a file of \
some 17 GB, come from the committed figures in `docs/results/`. "Published" is arXiv 2608.23841v1. \
"Here" is {here}. Arms of a comparison take turns, round by round, in one run: rates are medians over \
rounds, followed by the lowest and the highest; a ratio is the median of the ratios inside the rounds. \
Commands run in the checkout after `make claims`, which builds their programs and shapes."""
    head = ("claim", "published", "ours", "command", "machine", "verdict")
    rows = [(c.name, c.published, c.ours, c.command, c.machine, c.verdict) for c in claims]
    sections = [f"## {claim.name}\n\n{claim.text}" for claim in claims]
    return "\n\n".join([introduction, table(head, rows), *sections]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
