"""Responses that were kept, so that later requests can go on from them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cflow.server.api.wire import encode
from cflow.server.errors import RequestError, shorten


@dataclass(frozen=True, slots=True)
class Stored:
    """response: the object that was answered. items: the conversation up to its end."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    n_bytes: int
    since: float


class ResponseStore:
    """A bounded store in memory. Each API key sees its own responses only.

    If it is full, the key that holds most loses its oldest response. Sizes count whole conversations,
    also where responses share items, so the memory in use is smaller."""

    def __init__(
        self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """max_bytes: 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_key: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def put(self, key: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, unless it exceeds the store alone."""
        n_bytes = len(encode([response, items]))
        if n_bytes > self._max_bytes:
            return
        kept = self._by_key.setdefault(key, OrderedDict())
        kept[response["id"]] = Stored(response, items, n_bytes, self._clock())
        self._sizes[key] = self._sizes.get(key, 0) + n_bytes
        self._expire()
        while sum(self._sizes.values()) > self._max_bytes:
            self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def get(self, key: str, id: str, *, param: str | None = None) -> Stored:
        """Raises RequestError (404) if it is not there: never, or not any more."""
        self._expire()
        if id not in self._by_key.get(key, ()):
            raise not_stored("response", id, param)
        return self._by_key[key][id]

    def items(self, key: str) -> dict[str, dict[str, Any]]:
        """The input and output items of all stored responses, by id; the newest of an id."""
        self._expire()
        return {
            item["id"]: item
            for stored in self._by_key.get(key, OrderedDict()).values()
            for item in stored.items
            if isinstance(item.get("id"), str)
        }

    def delete(self, key: str, id: str) -> None:
        """Raises RequestError (404)."""
        self.get(key, id)
        self._drop(key, id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_s
        for key, kept in list(self._by_key.items()):
            while kept and next(iter(kept.values())).since <= oldest:
                self._drop_oldest(key)

    def _drop_oldest(self, key: str) -> None:
        self._drop(key, next(iter(self._by_key[key])))

    def _drop(self, key: str, id: str) -> None:
        self._sizes[key] -= self._by_key[key].pop(id).n_bytes


def not_stored(what: str, id: Any, param: str | None) -> RequestError:
    """The 404 of a response or an item."""
    message = (
        f"No {what} {shorten(id)} is stored. Responses are kept in memory for a limited time, and not "
        "over a restart of the server."
    )
    return RequestError(message, code=f"{what}_not_found", param=param, status=404)
