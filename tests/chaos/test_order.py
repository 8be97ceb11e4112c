"""A message that overtakes another one is seen, and nothing that has no place in the log's order is called so."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.chaos.checker import Kind, check
from tests.chaos.evidence import Change, FinalTables
from tests.chaos.history import COMMITTED, History, Transaction
from tests.chaos.order import ordering
from tests.chaos.specimens import emitted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIRST, SECOND, THIRD = (
    Transaction(number, tuple(emitted(id) for id in ids), outcome=COMMITTED)
    for number, ids in (("one", ("a", "b")), ("two", ("c",)), ("three", ("d",)))
)
HISTORY = History(transactions=[THIRD, FIRST, SECOND])
TABLES = FinalTables(commits=("one", "two", "three"), delivered=("a", "b", "c", "d"))


def overtaken(*delivered: str, **others: object) -> list[tuple[str, str]]:
    tables = replace(TABLES, delivered=delivered, **others)  # type: ignore[arg-type]
    return list(ordering(HISTORY, tables).overtaken)


def update(id: str, *, deleted: bool = False) -> Change:
    return Change("relay-0.1", NOON, NOON, deleted, 1, id, "", None, None, None)


def test_the_order_of_commits_is_right_and_so_are_copies_of_what_was_delivered() -> None:
    assert overtaken("a", "b", "c", "d") == []
    assert overtaken("a", "b", "a", "b", "c", "b", "d", "a") == []
    assert overtaken("a", "c", "d") == [], "what was never delivered is lost, which is another matter"


@pytest.mark.parametrize(
    ("delivered", "found"),
    [
        (("a", "c", "b", "d"), [("b", "c")]),
        (("b", "a", "c", "d"), [("a", "b")]),
        (("d", "a", "b", "c"), [("a", "d"), ("b", "d"), ("c", "d")]),
    ],
    ids=["a later transaction first", "a later row of the same transaction first", "the last one first"],
)
def test_what_comes_after_something_that_was_committed_later_is_overtaken(
    delivered: tuple[str, ...], found: list[tuple[str, str]]
) -> None:
    assert overtaken(*delivered) == found


def test_what_was_left_to_the_table_has_no_place_in_the_order() -> None:
    changes = (update("b"), update("c", deleted=True))
    assert overtaken("a", "c", "b", "d", changes=changes) == []
    assert overtaken("a", "d", "c", "b", changes=changes) == [("c", "d")], "a deletion alone leaves nothing"
    assert ordering(HISTORY, replace(TABLES, changes=changes)).left == 1


def test_the_checker_says_so() -> None:
    orders = frozenset(TABLES.commits)
    violations = check(HISTORY, replace(TABLES, orders=orders, delivered=("a", "c", "b", "d")))
    assert [each.what for each in violations if each.kind is Kind.OVERTAKEN] == ["b"]
