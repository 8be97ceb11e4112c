"""Documents: what programs read of a history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from outbox import Message
from outbox.cli.documents import document
from outbox.core.attempt import Attempt, Dead, Reason
from outbox.core.dead_letter import DeadLetter
from outbox.stores.rows import history_line
from outbox.transports.rabbitmq.copies import after_failure, of_dead_letter, of_replay
from outbox.transports.rabbitmq.envelope import Envelope

MESSAGE = Message(routing_key="order.created", body=b"1")
AT = "2026-01-02T03:04:05+00:00"
WRITTEN = "2026-01-02 03:04:05Z"


def entries(history: str) -> list[dict[str, Any]]:
    letter = DeadLetter(
        id=1,
        message=MESSAGE,
        queue="billing",
        reason=Reason.REJECTED,
        error="",
        attempt_count=1,
        crash_count=0,
        history=history,
        died_at=datetime.now(UTC),
    )
    found: list[dict[str, Any]] = document(letter)["history"]
    return found


@pytest.mark.parametrize(
    ("line", "attempt", "what", "error"),
    [
        ("attempt 2 failed: ValueError: a: b", 2, "failed", "ValueError: a: b"),
        ("attempt 3 was the last, exhausted: no", 3, "was the last, exhausted", "no"),
        ("replayed: attempts start again", None, "replayed", "attempts start again"),
        ("given up: its expiration passed", None, "given up", "its expiration passed"),
        ("unroutable: no queue is bound to 'a:b'", None, "unroutable", "no queue is bound to 'a:b'"),
        ("not delivered: no listener has it", None, "not delivered", "no listener has it"),
        ("attempt 1 failed: ", 1, "failed", ""),
        ("attempt 1 failed:", 1, "failed", ""),
    ],
)
def test_each_line_of_a_history_is_an_object(line: str, attempt: int | None, what: str, error: str) -> None:
    expected = {"at": AT, "attempt": attempt, "what": what, "error": error}
    assert entries(f"{WRITTEN} {line}\n") == [expected]
    assert entries(f"{WRITTEN} {line}\n{WRITTEN} {line}\n") == [expected, expected]


@pytest.mark.parametrize(
    "line",
    [
        "4:05Z attempt 2 failed: its beginning was cut",
        "2026-13-02 03:04:05Z attempt 2 failed: no such month",
        "2026-01-02 99:99:99Z attempt 2 failed: no such time",
        f"{WRITTEN} attempt 12345678901234567890 failed",
        "what another program wrote",
        "\x1b[2J",
    ],
)
def test_a_line_that_was_cut_or_that_another_program_wrote_is_all_error(line: str) -> None:
    later = {"at": AT, "attempt": 1, "what": "failed", "error": "later"}
    unread = {"at": None, "attempt": None, "what": None, "error": line}
    assert entries(f"{line}\n{WRITTEN} attempt 1 failed: later\n") == [unread, later]


def test_lines_are_read_as_the_stores_and_rabbitmq_write_them() -> None:
    [stored] = entries(history_line("attempt 7 failed", "OSError: away\nand more"))
    assert (stored["attempt"], stored["what"], stored["error"]) == (7, "failed", "OSError: away")
    envelope, attempt = Envelope({}, {}), Attempt(MESSAGE, 2, 1)
    dead = of_dead_letter(attempt, envelope, "billing", Dead(Reason.EXHAUSTED, "no\nmore"))
    for headers, what, number in (
        (after_failure(attempt, envelope, "no\nmore"), "failed", 2),
        (dead, "was the last, exhausted", 2),
        (of_replay(envelope), "replayed", None),
    ):
        [entry] = entries(str(headers["outbox-history"]))
        assert (entry["attempt"], entry["what"]) == (number, what)
        assert datetime.now(UTC).year == datetime.fromisoformat(entry["at"]).year


def test_no_history_is_an_empty_list() -> None:
    assert entries("") == []
