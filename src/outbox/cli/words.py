"""Words: values as people read them. Nothing that another program put into a message can control the terminal."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

from outbox.core import durations
from outbox.core.printing import printable

NOTHING = "-"
UNKNOWN = "unknown"

__all__ = ["NOTHING", "UNKNOWN", "body", "count", "duration", "first_line", "indented", "lines", "moment", "printable"]


def lines(text: str) -> str:
    """Text of several lines, which stay several. Only a line feed ends one: what else might is escaped."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.rstrip().replace("\r\n", "\n").split("\n"))


def indented(text: str) -> str:
    """The same with all lines but the first indented, so that none of them looks like one of the program's own."""
    return lines(text).replace("\n", "\n  ")


def first_line(text: str) -> str:
    """What fits in a table."""
    return printable(text.strip().partition("\n")[0].rstrip())


def moment(value: datetime) -> str:
    """An instant, in UTC: servers and people are seldom in one time zone."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def duration(value: timedelta | None) -> str:
    return NOTHING if value is None else durations.in_words(max(value, timedelta(0)))


def count(number: int, what: str, several: str = "") -> str:
    """`1 message`, `3 messages`."""
    return f"{number} {what if number == 1 else several or what + 's'}"


def body(value: bytes) -> tuple[str, str]:
    """A body as text if it is text, and in which way it is written: text or base64."""
    try:
        return value.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), "base64"
