"""Words: values as people read them. Whatever a stranger put into a message cannot steer the terminal."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

from outbox.core import durations

NOTHING = "-"


def printable(text: str) -> str:
    """The text with everything that has no shape of its own written as an escape: `\\x1b`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def lines(text: str) -> str:
    """The same for text of several lines, which stay several."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.rstrip().splitlines())


def first_line(text: str) -> str:
    """What fits in a table."""
    return printable(next(iter(text.strip().splitlines()), ""))


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


def _escape(character: str) -> str:
    return character.encode("unicode_escape", errors="surrogatepass").decode()
