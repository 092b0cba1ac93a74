"""What a step is to compute, and what it brought."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cflow.engine.worker.sequence import Request, Sequence


class Chunk(NamedTuple):
    """Positions first .. first + n - 1 of a sequence, in rows row .. row + n - 1 of the step. In the
    rows behind them: guesses at what follows."""

    sequence: Sequence
    first: int
    n: int
    row: int
    guesses: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        return self.n + len(self.guesses)

    @property
    def n_scores(self) -> int:
        """Leading rows whose following prompt token gets a score."""
        if not self.sequence.is_scoring:
            return 0
        return max(0, min(self.n, self.sequence.n_prompt - 1 - self.first))


@dataclass(slots=True)
class Batch:
    """One step. rebound: sequences whose block table changed; fresh: blocks to clear."""

    chunks: list[Chunk] = field(default_factory=list)
    n_rows: int = 0
    n_decodes: int = 0
    rebound: list[Sequence] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, n: int, guesses: tuple[int, ...] = ()) -> None:
        self.chunks.append(Chunk(sequence, sequence.n_computed, n, self.n_rows, guesses))
        self.n_rows += n + len(guesses)


class Draw(NamedTuple):
    """A token to sample for a sequence from a row. If it is the guess, the row behind has computed
    it, and the next can be sampled from that one. n_right: guesses that were so before."""

    row: int
    sequence: Sequence
    guesses: tuple[int, ...] = ()
    n_right: int = 0


@dataclass(slots=True)
class Advance:
    """What a step brought. draws: tokens to sample; done: sequences that wanted none; copies: (from, to) blocks to copy before the next step; failed: (request, row)."""

    draws: list[Draw] = field(default_factory=list)
    done: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[Request, int]] = field(default_factory=list)
