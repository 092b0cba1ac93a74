"""The line of sequences that wait to run."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from cflow.engine.sequence import Sequence


@dataclass(slots=True)
class _Level:
    """The waiting of one priority."""

    returned: list[Sequence] = field(default_factory=list)  # ran before; oldest first
    turns: OrderedDict[str, deque[Sequence]] = field(default_factory=OrderedDict)  # by key


class WaitingLine:
    """Lowest priority number first; within it those that ran before, by age, then one of each key
    in turn, so that many requests of one key do not hold up another's."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, sequence: Sequence) -> None:
        submit = sequence.request.submit
        level = self._levels.setdefault(submit.priority, _Level())
        level.turns.setdefault(submit.key, deque()).append(sequence)
        sequence.is_waiting = True
        self._n += 1

    def add_returned(self, sequence: Sequence) -> None:
        level = self._levels.setdefault(sequence.request.submit.priority, _Level())
        insort(level.returned, sequence, key=lambda s: (s.request.order, s.choice))
        sequence.is_waiting = True
        self._n += 1

    def first(self) -> Sequence | None:
        if not self._n:
            return None
        level = self._levels[min(self._levels)]
        return level.returned[0] if level.returned else next(iter(level.turns.values()))[0]

    def pop(self) -> Sequence:
        """Takes the first out; its key goes to the end of the turns."""
        sequence = self.first()
        assert sequence is not None
        level = self._levels[sequence.request.submit.priority]
        if not level.returned:
            level.turns.move_to_end(sequence.request.submit.key)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes out one that is in the line."""
        submit = sequence.request.submit
        level = self._levels[submit.priority]
        if sequence in level.returned:
            level.returned.remove(sequence)
        else:
            queue = level.turns[submit.key]
            queue.remove(sequence)
            if not queue:
                del level.turns[submit.key]
        if not level.returned and not level.turns:
            del self._levels[submit.priority]
        sequence.is_waiting = False
        self._n -= 1
