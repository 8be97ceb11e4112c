"""Answers: what a destination's status means for a message."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from outbox.core.transport import Refusal

AGAIN = frozenset({408, 425, 429})  # of 400 to 499 those that say nothing against the message
UNSPECIFIC = frozenset({401, 403, 404, 405})  # what a bad deploy or a changed password answers to everything
LONGEST_EXCERPT = 300  # characters of an answer's body that are kept with the error
LONGEST_WAIT = timedelta(days=1)  # whatever a destination asks for

_SECONDS = re.compile(r"[0-9]{1,12}")


def is_taken(status: int) -> bool:
    """Whether the destination has the message now."""
    return 200 <= status <= 299


def refusal(status: int, retry_after: str | None, body: bytes, now: datetime) -> Refusal:
    """What an answer other than 2xx means."""
    said = _excerpt(body)
    if status in AGAIN or status >= 500:
        return Refusal(f"it answered {_named(status)}{said}", retry_after=waiting_time(retry_after, now))
    if 300 <= status <= 399:
        advice = "; redirects are not followed: configure the URL it redirects to"
        return Refusal(f"it answered {_named(status)}{advice}", permanent=True)
    return Refusal(f"it answered {_named(status)}{said}", permanent=True, unspecific=status in UNSPECIFIC)


def waiting_time(retry_after: str | None, now: datetime) -> timedelta | None:
    """How long a Retry-After asks to wait: a number of seconds, or a date. None if it says neither."""
    if not retry_after:
        return None
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        return min(timedelta(seconds=int(text)), LONGEST_WAIT)
    try:
        date = parsedate_to_datetime(text)
        asked = (date if date.tzinfo else date.replace(tzinfo=UTC)) - now
    except (ValueError, OverflowError):
        return None
    return min(max(asked, timedelta(0)), LONGEST_WAIT)


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _excerpt(body: bytes) -> str:
    text = body[: 4 * LONGEST_EXCERPT].decode(errors="replace")
    words = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return f": {words[:LONGEST_EXCERPT]}" if words else ""
