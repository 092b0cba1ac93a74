"""Guesses at what sequences say next, and how many of them a step checks.

A sequence's guess is what followed its last three tokens, or two, where they last stood (prompt
lookup). The rows of a step check guesses: a sequence goes on behind a guess where sampling chose
just that, so answers are what they are without. Each token that comes is compared with its guess,
run or not, so how often guesses are right is known at no cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cflow.engine.worker.pace import Pace

FIRST_ODDS = 0.5
BEST_ODDS = 0.95  # of guesses that are always right; what takes more is not worth looking up
WEIGHT = 0.2  # of the newest guess in the odds
N_PLACES = 1 << 14  # remembered of a sequence, in 64 KiB; newer ones push out older ones
REACH = 1 << 13  # tokens taken in at a time, the last ones
DELAY = 0.1  # of a step, at most, for the sake of others where a sequence has no guess of its own


class Lookup:
    """Guesses for one sequence. odds: how many of the latest were right, 0 to 1."""

    __slots__ = ("_n", "_n_prompt", "_places", "_source", "_tokens", "odds")

    def __init__(self, tokens: array[int], n_prompt: int) -> None:
        """tokens: shared; they grow."""
        self.odds = FIRST_ODDS
        self._tokens = tokens
        self._n_prompt = n_prompt
        self._n = 0  # taken in
        self._places = array("i", bytes(4 * N_PLACES))  # what follows a pair or triple, by its hash
        self._source = 0  # of the next token; 0: no guess

    def follow(self) -> float:
        """Takes in new tokens. The odds of the guess at the next one; 0: there is none."""
        tokens, places = self._tokens, self._places
        first = max(self._n, len(tokens) - REACH)
        source = self._source if first == self._n else 0
        for i in range(first, len(tokens)):
            token = tokens[i]
            if source:
                is_right = tokens[source] == token
                if i >= self._n_prompt:
                    self.odds += WEIGHT * (is_right - self.odds)
                source = source + 1 if is_right else 0
            if i < 2:
                continue
            pair = hash((tokens[i - 1], token)) % N_PLACES
            triple = hash((tokens[i - 2], tokens[i - 1], token)) % N_PLACES
            if not source:
                source = self._check(places[triple], i, 3) or self._check(places[pair], i, 2)
            places[pair] = places[triple] = i + 1
        self._source, self._n = source, len(tokens)
        return self.odds if source else 0.0

    def _check(self, place: int, i: int, n: int) -> int:
        """The place, if the n tokens before it are those up to i; else 0."""
        tokens = self._tokens
        return place if tokens[place - n : place] == tokens[i + 1 - n : i + 1] else 0

    def guess(self, n: int) -> tuple[int, ...]:
        """The next n tokens. What repeats itself at the end goes on repeating itself."""
        tokens, source = self._tokens, self._source
        period = len(tokens) - source
        return tuple(tokens[source + i % period] for i in range(n))


def may_pay(n: int, pace: Pace) -> bool:
    """Guesses beside n decodes may bring more than they take, or have to be tried."""
    return pace.n_trial_rows(n) > 0 or n * pace.row_price(n) < BEST_ODDS


def count_guesses(odds: Sequence[float], limits: Sequence[int], room: int, pace: Pace) -> list[int]:
    """How many guesses each of some decodes runs, at most its limit, and `room` together. odds: 0
    where there is none.

    One more pays while it brings more tokens for its time than the step does without it; n in a row
    are right with odds^n. Where the price of a row has to be tried, a few are run in any case.
    """
    price, trial = pace.row_price(len(odds)), pace.n_trial_rows(len(odds))
    seconds, gained = 1.0, float(len(odds))  # seconds: in steps without guesses
    wanted = []
    for chance, limit in zip(odds, limits, strict=True):
        n, value = 0, chance
        while n < limit and value and (trial or value * seconds > price * gained):
            n += 1
            seconds += price
            gained += value
            value *= chance
        wanted.append(n)
    if trial:
        room = min(room, trial)
    elif 0 in wanted:
        room = min(room, int(DELAY / price))
    counts = []
    for n in wanted:
        counts.append(min(n, room))
        room -= counts[-1]
    return counts
