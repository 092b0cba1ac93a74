"""The line of sequences that wait to run, shared fairly between keys.

Fair queueing: the key that was served the fewest tokens comes first. A key that was away begins where
the least served of the others is, so nobody saves up for later. Within a key it goes by turn: by
arrival, but each further answer of one HTTP request lets PASSING later ones by, so that a batch of
hundreds does not hold up a single question, nor single questions for ever a batch.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from cflow.engine.worker.sequence import Sequence

PASSING = 32  # later requests that each further answer of a request lets by

Rank = tuple[int, int, int, int, int]


def turn(sequence: Sequence) -> tuple[int, int, int]:
    """By which those of one key go."""
    request = sequence.request
    place = request.submit.place + sequence.choice
    return request.turn + PASSING * place, request.order, sequence.choice


class WaitingLine:
    """Smaller priority numbers first, then fair between keys, then by turn."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[Sequence]] = {}  # by priority and key; by turn
        self._served: dict[str, int] = {}  # tokens by key
        self._n_requests: Counter[str] = Counter()  # by key, waiting or running

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    # ---- what keys were served ----

    def open(self, key: str) -> None:
        """A request of this key has come."""
        if not self._n_requests[key]:
            others = [self._served[other] for other, n in self._n_requests.items() if n]
            self._served[key] = max(self._served.get(key, 0), min(others, default=0))
        self._n_requests[key] += 1

    def close(self, key: str) -> None:
        """One of its requests is over."""
        self._n_requests[key] -= 1

    def charge(self, key: str, n_tokens: int) -> None:
        self._served[key] += n_tokens

    # ---- the line ----

    def add(self, sequence: Sequence) -> None:
        submit = sequence.request.submit
        insort(self._queues.setdefault((submit.priority, submit.key), []), sequence, key=turn)
        sequence.is_waiting = True

    def remove(self, sequence: Sequence) -> None:
        submit = sequence.request.submit
        queue = self._queues[submit.priority, submit.key]
        queue.remove(sequence)
        if not queue:
            del self._queues[submit.priority, submit.key]
        sequence.is_waiting = False

    def rank(self, sequence: Sequence) -> Rank:
        """Its place in the line now, also of one that runs."""
        submit = sequence.request.submit
        return (submit.priority, self._served[submit.key], *turn(sequence))

    def first(self) -> Sequence | None:
        heads = (queue[0] for queue in self._queues.values())
        return min(heads, key=self.rank, default=None)

    def order(self) -> list[int]:
        """Request ids, as it will go if nobody comes or leaves and answers are short."""
        places = []
        for (priority, key), queue in self._queues.items():
            served = self._served[key]
            for sequence in queue:
                places.append((priority, served, turn(sequence), sequence.request.id))
                served += len(sequence.tokens)
        return list(dict.fromkeys(id for *_, id in sorted(places)))
