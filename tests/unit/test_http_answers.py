"""Answers: which status means what, and how long a Retry-After asks to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outbox.transports.http.answers import LONGEST_EXCERPT, LONGEST_WAIT, is_taken, refusal, waiting_time

NOW = datetime(2026, 11, 16, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_every_2xx_means_taken(status: int) -> None:
    assert is_taken(status)


@pytest.mark.parametrize("status", [199, 300, 304, 400, 500])
def test_nothing_else_means_taken(status: int) -> None:
    assert not is_taken(status)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 507, 511, 520, 599])
def test_some_answers_mean_not_now(status: int) -> None:
    found = refusal(status, None, b"", NOW)
    assert not found.permanent
    assert str(status) in found.error


@pytest.mark.parametrize(
    "status", [300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 405, 409, 410, 413, 422, 451]
)
def test_the_others_mean_never(status: int) -> None:
    assert refusal(status, "1", b"", NOW).permanent


def test_a_redirect_says_what_to_do() -> None:
    assert "configure the URL" in refusal(301, None, b"", NOW).error


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 7 ", 7),
        ("Mon, 16 Nov 2026 12:01:00 GMT", 60),
        ("Mon, 16 Nov 2026 13:01:00 +0100", 60),
        ("Monday, 16-Nov-26 12:00:30 GMT", 30),
        ("Mon Nov 16 12:00:30 2026", 30),
        ("Mon, 16 Nov 2026 11:00:00 GMT", 0),
        ("999999999999", LONGEST_WAIT.total_seconds()),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_WAIT.total_seconds()),
        ("Mon, 01 Jan 0001 00:00:00 GMT", 0),
    ],
)
def test_a_retry_after_is_a_number_or_a_date(text: str, seconds: float) -> None:
    assert waiting_time(text, NOW) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", [None, "", "-1", "1.5", "soon", "1e9", "٣", "9" * 5000, "Mon, 99 Nov 2026 12:00:00 GMT", "nan", "\x00"]
)
def test_what_is_neither_asks_for_nothing(text: str | None) -> None:
    assert waiting_time(text, NOW) is None


def test_only_answers_that_mean_not_now_have_a_waiting_time() -> None:
    assert refusal(429, "7", b"", NOW).retry_after == timedelta(seconds=7)
    assert refusal(503, "7", b"", NOW).retry_after == timedelta(seconds=7)
    assert refusal(400, "7", b"", NOW).retry_after is None


def test_the_error_holds_the_beginning_of_what_was_said_in_one_clean_line() -> None:
    said = b"no such\r\n\x1b[31morder\x00 \xff" + b"x" * 10_000
    error = refusal(422, None, said, NOW).error
    assert error.startswith("it answered 422 Unprocessable")
    assert ": no such [31morder \ufffdxxx" in error
    assert error.isprintable()
    assert len(error) < LONGEST_EXCERPT + 60


def test_a_status_that_nobody_knows_is_told_by_its_number() -> None:
    assert refusal(799, None, b"", NOW).error == "it answered 799"
