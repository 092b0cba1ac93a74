"""Drafts, which are guesses at a sequence's next tokens, and how many of them a step checks.

Prompt lookup: the drafts are the tokens that followed the last earlier occurrence of the sequence's
last three tokens, or two. A step computes a row for each draft and accepts it if sampling chooses
the same token, so drafts never change the output. Every new token is compared with its draft, even
one that was not checked, so the acceptance rate costs nothing to measure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cflow.engine.worker.pace import Pace

FIRST_ODDS = 0.5
BEST_ODDS = 0.95  # no look-up if even such odds would not pay
WEIGHT = 0.2  # of the newest draft in the odds
N_PLACES = 1 << 14  # hash slots of a sequence, 64 KiB; newer places overwrite older ones
REACH = 1 << 13  # the last tokens, which are all that one call indexes
DELAY = 0.1  # most time that drafts add to a step in which some sequence has none


class Lookup:
    """Drafts for one sequence. odds: share of recent drafts that were right, 0 to 1."""

    __slots__ = ("_n", "_n_prompt", "_places", "_source", "_tokens", "odds")

    def __init__(self, tokens: array[int], n_prompt: int) -> None:
        """tokens: of the sequence, which appends to them."""
        self.odds = FIRST_ODDS
        self._tokens = tokens
        self._n_prompt = n_prompt
        self._n = 0  # tokens indexed
        self._places = array("i", bytes(4 * N_PLACES))  # of what follows a pair or triple, by hash
        self._source = 0  # place of the next draft; 0: none

    def follow(self) -> float:
        """Index new tokens. Returns the odds of the next draft, 0 if there is none."""
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
        """The place if the n tokens before it equal the n tokens up to i, else 0."""
        tokens = self._tokens
        return place if tokens[place - n : place] == tokens[i + 1 - n : i + 1] else 0

    def draft(self, n: int) -> tuple[int, ...]:
        """The next n drafts. Where they reach the end of the tokens, they repeat from the start."""
        tokens, source = self._tokens, self._source
        period = len(tokens) - source
        return tuple(tokens[source + i % period] for i in range(n))


def may_pay(n: int, pace: Pace) -> bool:
    """Whether drafts beside n decodes can pay, or a trial is due."""
    return pace.n_trial_rows(n) > 0 or n * pace.row_price(n) < BEST_ODDS


def count_drafts(odds: Sequence[float], limits: Sequence[int], room: int, pace: Pace) -> list[int]:
    """The number of drafts to check for each decode: at most its limit, and `room` in total. odds:
    0 for a decode without drafts.

    Another draft pays while it adds more tokens a second than the step has without it. The nth
    draft is accepted with probability odds^n. A trial checks a few drafts in any case.
    """
    price, trial = pace.row_price(len(odds)), pace.n_trial_rows(len(odds))
    seconds, gained = 1.0, float(len(odds))  # seconds: in steps without drafts
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
