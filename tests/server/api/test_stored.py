"""Stored responses: bounded, per key, and gone after a time."""

from __future__ import annotations

from typing import Any

from cflow.server.api.stored import ResponseStore
from cflow.server.api.wire import encode
from cflow.server.errors import RequestError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id: str, text: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"id": id}, [{"id": f"item_{id}", "text": text}]


def size(id: str, text: str = "") -> int:
    return len(encode([*response(id, text)]))


def has(store: ResponseStore, key: str, id: str) -> bool:
    try:
        store.get(key, id)
    except RequestError as error:
        return (error.status, error.code) != (404, "response_not_found")
    return True


def test_a_key_sees_its_own_only() -> None:
    store = ResponseStore(1000, 60)
    store.put("a", *response("1"))
    assert has(store, "a", "1")
    assert not has(store, "b", "1")
    assert store.items("b") == {}
    assert store.items("a") == {"item_1": {"id": "item_1", "text": ""}}


def test_the_newest_item_of_an_id_counts() -> None:
    store = ResponseStore(1000, 60)
    for id, text in (("1", "old"), ("2", "new")):
        store.put(
            "a", {"id": id}, [{"id": "same", "text": text}, {"text": "without id"}, {"id": 5}]
        )
    assert store.items("a") == {"same": {"id": "same", "text": "new"}}


def test_age_is_bounded() -> None:
    clock = Clock()
    store = ResponseStore(1000, 60, clock)
    store.put("a", *response("1"))
    clock.now = 59
    store.put("a", *response("2"))
    assert has(store, "a", "1")
    clock.now = 60
    assert not has(store, "a", "1")
    assert has(store, "a", "2")


def test_the_key_that_holds_most_loses_its_oldest() -> None:
    store = ResponseStore(4 * size("1"), 60)
    for id in ("1", "2", "3"):
        store.put("a", *response(id))
    store.put("b", *response("4"))
    store.put("b", *response("5"))
    assert [has(store, "a", id) for id in ("1", "2", "3")] == [False, True, True]
    assert has(store, "b", "4")
    assert has(store, "b", "5")


def test_what_exceeds_the_store_is_not_kept() -> None:
    store = ResponseStore(size("1"), 60)
    store.put("a", *response("1"))
    store.put("a", *response("2", "x"))
    assert has(store, "a", "1")
    assert not has(store, "a", "2")


def test_deleted_ones_leave_room() -> None:
    store = ResponseStore(2 * size("1"), 60)
    store.put("a", *response("1"))
    store.put("a", *response("2"))
    store.delete("a", "2")
    store.put("a", *response("3"))
    assert has(store, "a", "1")
    assert has(store, "a", "3")
