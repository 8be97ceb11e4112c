"""Rows: messages to rows and back."""

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import Message
from outbox.core.message import LARGEST_HEADERS, MOST_IDS, check, check_message_ids
from outbox.stores.rows import (
    CLAIMED,
    as_attempts,
    as_dead_letter,
    as_message,
    as_stored,
    as_utc,
    history_line,
    message_row,
)

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)
NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)

MESSAGES = st.builds(
    Message,
    routing_key=TEXT,
    body=st.binary(max_size=200),
    content_type=st.sampled_from(["application/json", "application/octet-stream"]),
    headers=st.dictionaries(TEXT, st.text(max_size=20), max_size=4),
    key=st.none() | TEXT,
    tracking_ids=st.lists(TEXT, min_size=1, max_size=4).map(tuple),
    created_at=st.datetimes(timezones=st.just(UTC)),
)


def row_of(message: Message, **further: Any) -> Any:
    """A row as a database gives it back."""
    fresh = {
        "id": 7,
        "expires_at": None,
        "attempts": 0,
        "starts": 0,
        "isolated": False,
        "destination": "",
        "unroutable": False,
        "due_at": NOW,
        "first_due_at": None,
        "routed_at": None,
        "lease_until": None,
        "done_at": None,
        "history": None,
        "timer_id": None,
    }
    return SimpleNamespace(**message_row(message) | fresh | further)


MESSAGE = Message(routing_key="order.created", body=b"{}", created_at=NOW)


@given(MESSAGES)
def test_a_message_comes_back_from_its_row_unchanged(message: Message) -> None:
    assert as_message(row_of(message)) == message
    assert as_message(row_of(message)).id == message.id


def test_the_longest_headers_and_ids_that_emit_takes_are_read_from_a_row() -> None:
    name, value = "n" * 24, "é" * 500
    headers = {f"{name}{number:02}"[-24:]: value for number in range(LARGEST_HEADERS // 1024)}
    ids = tuple(f"{number:03}{'é' * 126}" for number in range(MOST_IDS))
    message = Message(routing_key="a", body=b"", headers=headers, tracking_ids=ids)
    check(message)
    check_message_ids(message)
    assert as_message(row_of(message)) == message


def test_a_row_without_headers_or_earlier_ids_holds_nothing_for_them() -> None:
    row = message_row(Message(routing_key="a", body=b"", tracking_ids=("this",)))
    assert (row["headers"], row["tracking_ids"], row["message_id"]) == (None, None, "this")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2030, 1, 1, 12), NOW),  # noqa: DTZ001 - as SQLite answers
        (datetime(2030, 1, 1, 12, tzinfo=UTC), NOW),
        (datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=2))), NOW),
    ],
)
def test_a_moment_from_a_database_is_utc_with_or_without_a_zone(value: datetime, expected: datetime) -> None:
    assert as_utc(value) == expected
    assert as_utc(value).tzinfo is UTC


@pytest.mark.parametrize(
    ("attempts", "starts", "attempt_count", "crash_count"),
    [
        (0, 1, 1, 0),  # the first try has begun
        (2, 3, 3, 0),  # two failed, the third has begun
        (0, 3, 1, 2),  # two began and never ended
        (1, 3, 2, 1),
    ],
)
def test_tries_that_never_ended_are_crashes_and_not_attempts(
    attempts: int, starts: int, attempt_count: int, crash_count: int
) -> None:
    row = row_of(MESSAGE, attempts=attempts, starts=starts, expired=False)
    [attempt], dead = as_attempts([[getattr(row, name) for name in CLAIMED]])
    assert (attempt.attempt_count, attempt.crash_count, attempt.id) == (attempt_count, crash_count, 7)
    assert (attempt.message, dead) == (MESSAGE, {})


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({}, "waiting"),
        ({"unroutable": True}, "unroutable"),
        ({"destination": "billing"}, "queued"),
        ({"destination": "billing", "attempts": 1, "starts": 1}, "retrying"),
        ({"done_at": NOW}, "sent"),
        ({"destination": "billing", "attempts": 1, "starts": 1, "done_at": NOW}, "handled"),
        ({"destination": "https://shop.example", "attempts": 1, "starts": 1, "done_at": NOW}, "sent"),
    ],
)
def test_a_row_is_in_one_state(row: dict[str, Any], state: str) -> None:
    stored = as_stored(row_of(MESSAGE, **row), NOW, routes=["https://shop.example"])
    assert stored.state == state
    assert stored.queue == (row.get("destination") or None)


@pytest.mark.parametrize(
    ("seconds", "leased", "crash_count"), [(1, True, 0), (0, False, 1), (-1, False, 1)]
)  # a lease that runs out now has run out
def test_a_lease_counts_until_it_runs_out_and_then_as_a_crash(seconds: int, leased: bool, crash_count: int) -> None:
    until = NOW + timedelta(seconds=seconds)
    stored = as_stored(row_of(MESSAGE, starts=1, lease_until=until), NOW)
    assert stored.leased_until == (until if leased else None)
    assert stored.crash_count == crash_count


def test_a_dead_letter_tells_what_its_row_holds() -> None:
    row = row_of(MESSAGE, reason="rejected", error="no", died_at=NOW, attempts=2, starts=3, history="a line\n")
    letter = as_dead_letter(row)
    assert (letter.message, letter.queue, letter.reason) == (MESSAGE, None, "rejected")
    assert (letter.attempt_count, letter.crash_count, letter.history) == (2, 1, "a line\n")


@pytest.mark.parametrize("error", ["", "one\ntwo", "x" * 5000, "\n"])
def test_a_line_of_history_is_one_line_whatever_the_error(error: str) -> None:
    line = history_line("attempt 1 failed", error)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert "attempt 1 failed: " in line
    assert len(line) < 1100
