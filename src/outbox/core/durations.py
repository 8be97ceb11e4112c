"""Durations: numbers and text at the door, `timedelta` inside."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from outbox.core.errors import ConfigurationError, TimeInvalid, named

Seconds = int | float | timedelta
Eta = datetime | timedelta | int | float
Retention = timedelta | Literal["IMMEDIATELY", "NEVER"]

IMMEDIATELY: Final = "IMMEDIATELY"
NEVER: Final = "NEVER"

NO_DELAY: Final = timedelta(0)
LONGEST: Final = timedelta(days=36_525)  # a century: everything beyond is a mistake in units
EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)  # nothing is due before it
# Python knows the years from 1 to 9999. A driver that answers in its session's time zone can read those between.
OLDEST: Final = datetime(2, 1, 1, tzinfo=UTC)
LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)  # excluded

_SURELY_LATER: Final = datetime(1970, 1, 2)  # noqa: DTZ001 - whatever the time zone, by less than a day
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def as_delay(value: Seconds, *, what: str = "delay") -> timedelta:
    """A duration that is not negative. A bare number is in seconds."""
    delay = _as_timedelta(value, unit=1.0, what=what)
    if delay < NO_DELAY:
        raise TimeInvalid(f"{what} is negative: {value!r}")
    return delay


def as_lifetime(value: Seconds, *, what: str = "expiration") -> timedelta:
    """A duration that is longer than nothing. A bare number is in seconds."""
    lifetime = as_delay(value, what=what)
    if lifetime <= NO_DELAY:
        raise TimeInvalid(f"{what} must be longer than nothing, not {value!r}")
    return lifetime


def as_due(eta: Eta | None) -> datetime | timedelta:
    """When a message is due: an instant in UTC, or a delay that the database adds to its own clock."""
    if eta is None:
        return NO_DELAY
    if isinstance(eta, datetime):
        if eta.replace(tzinfo=None) < _SURELY_LATER:  # before any conversion: UTC may not have such a time
            return EARLIEST
        try:
            # Without a zone it is local time; never early where clocks leave it out.
            due = eta.astimezone(UTC) if eta.tzinfo is not None else datetime.fromtimestamp(eta.timestamp(), UTC)
        except (OverflowError, ValueError, OSError) as error:
            raise TimeInvalid(f"eta cannot be expressed in UTC: {eta!r}") from error
        if due >= LATEST:
            raise TimeInvalid(f"eta is too late: {eta!r}; times before the year {LATEST.year} can be stored and read")
        return due
    return max(NO_DELAY, _as_timedelta(eta, unit=0.001, what="eta"))


def configured(check: Callable[..., timedelta], value: Seconds, *, what: str = "delay") -> timedelta:
    """A duration that belongs to the setup and not to a message."""
    try:
        return check(value, what=what)
    except TimeInvalid as error:
        raise ConfigurationError(str(error)) from None


def parse_duration(text: str) -> timedelta:
    """`90`, `1.5`, `500ms`, `1h30m`, `7d`: what environment variables and the command line may say."""
    text = text.strip()
    try:
        return as_delay(float(text))
    except ValueError:
        pass
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise TimeInvalid(f"not a duration: {text!r}; write seconds, or for example 500ms, 90s, 1h30m, 7d")
    return as_delay(sum(float(number) * _UNITS[unit] for number, unit in parts))


def in_words(delay: timedelta) -> str:
    """`1h30m`, `12s`, `250ms`: short, for people."""
    seconds = delay.total_seconds()
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    words, rest = [], round(seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words[:2])


def _as_timedelta(value: Seconds, *, unit: float, what: str) -> timedelta:
    if isinstance(value, timedelta):
        delay = value
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TimeInvalid(f"{what} must be a number or a timedelta, not {type(value).__name__}")
    else:
        try:
            if not math.isfinite(value):
                raise TimeInvalid(f"{what} must be finite, not {value!r}")
            delay = timedelta(seconds=value * unit)
        except OverflowError as error:
            raise TimeInvalid(f"{what} is out of range: {named(value)}") from error
    if abs(delay) > LONGEST:
        raise TimeInvalid(f"{what} is out of range: {value!r} is more than a hundred years")
    return delay
