"""A step's input and its result, as the scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cflow.engine.worker.sequence import Request, Sequence


class Chunk(NamedTuple):
    """Positions first .. first + n - 1 of a sequence, in rows row .. row + n - 1 of the step,
    followed by a row for each draft."""

    sequence: Sequence
    first: int
    n: int
    row: int
    drafts: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        return self.n + len(self.drafts)

    @property
    def n_scores(self) -> int:
        """Number of leading rows that score the prompt token after them."""
        if not self.sequence.is_scoring:
            return 0
        return max(0, min(self.n, self.sequence.n_prompt - 1 - self.first))


@dataclass(slots=True)
class Batch:
    """The input of a step. rebound: sequences whose block table changed. fresh: blocks to clear."""

    chunks: list[Chunk] = field(default_factory=list)
    n_rows: int = 0
    n_decodes: int = 0
    rebound: list[Sequence] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, n: int, drafts: tuple[int, ...] = ()) -> None:
        self.chunks.append(Chunk(sequence, sequence.n_computed, n, self.n_rows, drafts))
        self.n_rows += n + len(drafts)


class Draw(NamedTuple):
    """A token to sample for a sequence from a row. If it equals the next draft, the row after it
    holds the logits for another token. n_accepted: drafts accepted so far in this step."""

    row: int
    sequence: Sequence
    drafts: tuple[int, ...] = ()
    n_accepted: int = 0


@dataclass(slots=True)
class Advance:
    """The result of a step. draws: tokens to sample. done: sequences that wanted none. copies:
    (from, to) blocks to copy before the next step. failed: (request, row)."""

    draws: list[Draw] = field(default_factory=list)
    done: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[Request, int]] = field(default_factory=list)
