"""Durations: numbers, text and moments at the door."""

# ruff: noqa: DTZ001, DTZ901 - datetimes without a time zone are part of what comes to the door

import math
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import OutboxError, TimeInvalid
from outbox.core.durations import EARLIEST, LONGEST, as_delay, as_due, as_lifetime, in_words, parse_duration
from outbox.stores.postgresql.selecting import BEGINNING
from tests.support.zones import Broken

DELAYS = st.timedeltas(min_value=timedelta(0), max_value=LONGEST)
SECOND = timedelta(seconds=1)


@pytest.fixture
def central_europe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time with a gap on 31 March and an overlap on 27 October 2030, without a database of time zones."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@given(DELAYS)
def test_a_timedelta_is_taken_as_it_is(delay: timedelta) -> None:
    assert as_delay(delay) == delay
    assert as_due(delay) == delay


@given(st.integers(min_value=0, max_value=86_400 * 365 * 50))
def test_a_bare_number_is_seconds_for_delays_and_milliseconds_for_eta(number: int) -> None:
    assert as_delay(number) == timedelta(seconds=number)
    assert as_due(number) == timedelta(milliseconds=number)


@given(st.integers(min_value=0, max_value=10**9), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_text_means_what_its_unit_says(number: int, unit: str) -> None:
    one = {"ms": SECOND / 1000, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND, "d": 86_400 * SECOND}[unit]
    if number > LONGEST // one:
        with pytest.raises(TimeInvalid):
            parse_duration(f"{number}{unit}")
    else:
        assert parse_duration(f"{number}{unit}") == number * one


@given(DELAYS)
def test_words_for_people_can_be_read_back_and_are_hardly_off(delay: timedelta) -> None:
    words = in_words(delay)
    off = abs(parse_duration(words) - delay)
    assert off <= max(delay * 0.05, timedelta(milliseconds=0.5)), words
    assert len(words) <= 12


@pytest.mark.parametrize(
    ("delay", "words"),
    [
        (timedelta(0), "0ms"),
        (timedelta(milliseconds=250), "250ms"),
        (SECOND, "1s"),
        (timedelta(seconds=1.5), "1.5s"),
        (timedelta(seconds=12), "12s"),
        (timedelta(seconds=59.7), "1m"),
        (timedelta(seconds=90), "1m30s"),
        (timedelta(minutes=90), "1h30m"),
        (timedelta(hours=24), "1d"),
        (timedelta(days=1, minutes=5), "1d5m"),
        (timedelta(days=30, hours=1, seconds=1), "30d1h"),
    ],
)
def test_durations_are_told_in_few_words(delay: timedelta, words: str) -> None:
    assert in_words(delay) == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90 * SECOND),
        ("1.5", 1.5 * SECOND),
        ("0", timedelta(0)),
        (" 90s ", 90 * SECOND),
        ("500ms", 0.5 * SECOND),
        ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("1d1h1m1s1ms", timedelta(days=1, hours=1, minutes=1, seconds=1, milliseconds=1)),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        "h1",
        "5 s",
        "1h30",
        "1h-3m",
        "-5",
        "-5s",
        "nan",
        "inf",
        "1e400",
        "0x10",
        "1,5",
        "5w",
        "9" * 400 + "d",
    ],
)
def test_text_that_is_no_duration_is_refused_with_examples_or_the_reason(text: str) -> None:
    with pytest.raises(TimeInvalid) as caught:
        parse_duration(text)
    assert "500ms" in str(caught.value) or "delay" in str(caught.value)


NO_DURATIONS: list[Any] = [
    pytest.param(True, id="bool"),
    pytest.param("5", id="text"),
    pytest.param(Decimal(5), id="Decimal"),
    pytest.param(5j, id="complex"),
    pytest.param([5], id="list"),
    pytest.param(date(2030, 1, 1), id="date"),
    pytest.param(math.nan, id="nan"),
    pytest.param(math.inf, id="infinity"),
    pytest.param(-math.inf, id="minus infinity"),
    pytest.param(1e308, id="a float out of range"),
    pytest.param(10**12, id="more than a century"),
    pytest.param(10**20, id="more than a timedelta holds"),
    pytest.param(10**400, id="more than a float holds"),
    pytest.param(-(10**400), id="less than a float holds"),
    pytest.param(10**5000, id="more than can be printed"),
    pytest.param(timedelta.max, id="the longest timedelta"),
    pytest.param(timedelta.min, id="the shortest timedelta"),
    pytest.param(LONGEST + timedelta(microseconds=1), id="a century and a microsecond"),
]


@pytest.mark.parametrize("value", NO_DURATIONS)
def test_what_is_no_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TimeInvalid, match="grace"):
        as_delay(value, what="grace")
    with pytest.raises(TimeInvalid, match="expiration"):
        as_lifetime(value)


@pytest.mark.parametrize("value", [each for each in NO_DURATIONS if each.id != "more than a century"])
def test_what_is_no_eta_is_refused(value: Any) -> None:
    with pytest.raises(TimeInvalid, match="eta"):
        as_due(value)


@pytest.mark.parametrize("value", [-1, -0.001, timedelta(microseconds=-1), -LONGEST])
def test_a_negative_delay_is_refused_but_a_negative_eta_is_due_at_once(value: Any) -> None:
    with pytest.raises(TimeInvalid, match="negative"):
        as_delay(value)
    assert as_due(value) == timedelta(0)


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0), 1e-9])
def test_a_lifetime_of_nothing_is_refused(value: Any) -> None:
    assert as_delay(value) == timedelta(0)
    with pytest.raises(TimeInvalid, match="longer than nothing"):
        as_lifetime(value)


def test_no_eta_means_now() -> None:
    assert as_due(None) == timedelta(0)


@pytest.mark.parametrize(
    ("eta", "expected"),
    [
        pytest.param(datetime(2030, 1, 1, 12), datetime(2030, 1, 1, 11, tzinfo=UTC), id="winter"),
        pytest.param(datetime(2030, 7, 1, 12), datetime(2030, 7, 1, 10, tzinfo=UTC), id="summer"),
        pytest.param(datetime(2030, 10, 27, 2, 30), datetime(2030, 10, 27, 0, 30, tzinfo=UTC), id="overlap, first"),
        pytest.param(
            datetime(2030, 10, 27, 2, 30, fold=1), datetime(2030, 10, 27, 1, 30, tzinfo=UTC), id="overlap, second"
        ),
        pytest.param(datetime(2030, 3, 31, 1, 59), datetime(2030, 3, 31, 0, 59, tzinfo=UTC), id="before the gap"),
        pytest.param(datetime(2030, 3, 31, 3, 0), datetime(2030, 3, 31, 1, 0, tzinfo=UTC), id="after the gap"),
    ],
)
@pytest.mark.usefixtures("central_europe")
def test_a_naive_datetime_is_local_time_also_where_clocks_change(eta: datetime, expected: datetime) -> None:
    assert as_due(eta) == expected


@pytest.mark.usefixtures("central_europe")
def test_a_time_that_the_clocks_leave_out_is_never_due_before_they_have_passed_it() -> None:
    due = as_due(datetime(2030, 3, 31, 2, 30))
    assert isinstance(due, datetime)
    assert due >= datetime(2030, 3, 31, 1, 0, tzinfo=UTC), "three o'clock in summer time follows two in winter time"


@given(
    st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1)),
    st.integers(min_value=-14 * 60, max_value=14 * 60),
)
def test_an_aware_datetime_is_the_same_instant_in_utc(moment: datetime, minutes: int) -> None:
    aware = moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    due = as_due(aware)
    assert isinstance(due, datetime)
    assert due == aware
    assert due.tzinfo is UTC


@pytest.mark.parametrize(
    "eta",
    [
        pytest.param(datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), id="year 9999, west"),
        pytest.param(datetime(2030, 1, 1, tzinfo=Broken()), id="a broken time zone"),
    ],
)
@pytest.mark.usefixtures("central_europe")
def test_a_moment_that_utc_does_not_have_is_refused(eta: datetime) -> None:
    with pytest.raises(TimeInvalid, match="UTC"):
        as_due(eta)


def test_a_moment_in_the_past_is_an_instant_like_any_other() -> None:
    assert as_due(datetime(1999, 1, 1, tzinfo=UTC)) == datetime(1999, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "eta",
    [
        pytest.param(datetime(1969, 12, 31, tzinfo=UTC), id="the day before"),
        pytest.param(datetime(1970, 1, 1), id="naive, east of Greenwich"),
        pytest.param(datetime(1970, 1, 1, 11, tzinfo=timezone(timedelta(hours=12))), id="only in the east"),
        pytest.param(datetime.min, id="year 1, naive"),
        pytest.param(datetime.min.replace(tzinfo=UTC), id="year 1"),
        pytest.param(datetime.min.replace(tzinfo=timezone(timedelta(hours=12))), id="year 1, east"),
    ],
)
@pytest.mark.usefixtures("central_europe")
def test_what_lies_before_1970_is_the_earliest_time_that_claims_find(eta: datetime) -> None:
    assert as_due(eta) == EARLIEST == BEGINNING


def test_every_refusal_is_an_error_of_this_library_and_a_value_error() -> None:
    assert issubclass(TimeInvalid, OutboxError)
    assert issubclass(TimeInvalid, ValueError)
