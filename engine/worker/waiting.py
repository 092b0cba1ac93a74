"""The queue of sequences that wait to run, shared fairly between API keys.

Fair queueing: the key with the fewest tokens served comes first. A key that returns starts level
with the least served active key, so idle keys gain no credit. Within a key, sequences run by
arrival, except that each further answer of one HTTP request lets PASSING later requests go first: a
batch of hundreds does not block a single question, and single questions do not block a batch for
ever.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from cflow.engine.worker.sequence import Sequence

PASSING = 32  # later requests that go before each further answer of a request

Rank = tuple[int, int, int, int, int]


def turn(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key within an API key."""
    request = sequence.request
    place = request.submit.place + sequence.choice
    return request.turn + PASSING * place, request.order, sequence.choice


class WaitingLine:
    """Orders sequences by priority (smaller first), then fairly between keys, then by turn."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[Sequence]] = {}  # by priority and key; by turn
        self._served: dict[str, int] = {}  # tokens by key
        self._n_requests: Counter[str] = Counter()  # by key, waiting or running

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    # ---- tokens served, by key ----

    def open(self, key: str) -> None:
        """Count a new request of this key."""
        if not self._n_requests[key]:
            others = [self._served[other] for other, n in self._n_requests.items() if n]
            self._served[key] = max(self._served.get(key, 0), min(others, default=0))
        self._n_requests[key] += 1

    def close(self, key: str) -> None:
        """A request of this key has ended."""
        self._n_requests[key] -= 1

    def charge(self, key: str, n_tokens: int) -> None:
        self._served[key] += n_tokens

    # ---- the queue ----

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
        """The rank that this sequence has, or would have if it waited."""
        submit = sequence.request.submit
        return (submit.priority, self._served[submit.key], *turn(sequence))

    def first(self) -> Sequence | None:
        heads = (queue[0] for queue in self._queues.values())
        return min(heads, key=self.rank, default=None)

    def order(self) -> list[int]:
        """Request ids in the order expected if no request comes or leaves."""
        places = []
        for (priority, key), queue in self._queues.items():
            served = self._served[key]
            for sequence in queue:
                places.append((priority, served, turn(sequence), sequence.request.id))
                served += len(sequence.tokens)
        return list(dict.fromkeys(id for *_, id in sorted(places)))
