"""Rows: messages to rows and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from outbox.core.attempt import Attempt, Dead, Reason
from outbox.core.binding import LONGEST_KEY
from outbox.core.dead_letter import DeadLetter
from outbox.core.durations import EARLIEST, LATEST, OLDEST
from outbox.core.history import LONGEST_HISTORY as LONGEST_HISTORY
from outbox.core.history import history_line as history_line
from outbox.core.message import LARGEST_HEADERS, LARGEST_READ, MOST_IDS, Message, remade
from outbox.core.states import State
from outbox.core.store import StoredMessage
from outbox.stores.tables import NOT_ROUTED

EXPIRATION_PASSED = "its expiration passed"  # what a history says of it
MUCH_LATER = timedelta(minutes=1)  # what is due so long after it was made is told so
MOST_TRIES = 1_000_000_000  # attempts or starts that a message can have had
# What emit writes as JSON is shorter: there a character takes up to three times the bytes that it has in UTF-8.
LONGEST_HEADERS = 3 * LARGEST_HEADERS + 1024  # characters
LONGEST_IDS = MOST_IDS * (3 * LONGEST_KEY + 4)
# Bytes that are read of these columns; in UTF-8 a character has up to four.
LARGEST = {"body": LARGEST_READ, "headers": 4 * LONGEST_HEADERS, "tracking_ids": 4 * LONGEST_IDS}
TOO_LARGE = "too large to be read"  # in place of headers or tracking ids that are; no JSON
UNREADABLE = "its row cannot be read"
_NO_TEXT = "its routing key, message id, key or content type is not text in UTF-8"
_OTHER_TYPE = (
    f"created_at is not between the years {OLDEST.year} and {LATEST.year}, a column has a wrong type, or its body has "
    f"more than {LARGEST_READ} bytes"
)

_SURELY_SHORT = LONGEST_KEY // 4  # characters: no text of so many has more bytes than brokers allow

T = TypeVar("T")

_KEPT = (
    "message_id",
    "routing_key",
    "key",
    "content_type",
    "tracking_ids",
    "headers",
    "body",
    "created_at",
    "expires_at",
)
GIVEN = tuple(name for name in _KEPT if name != "expires_at")  # what `message_row` fills
EMITTED = (*GIVEN, "due_at", "expires_at", "timer_id")  # what emit fills


class ClaimedRow(NamedTuple):
    """What a leasing statement tells of a row, in this order. A driver's row has the same by position."""

    due_at: datetime
    id: int
    first_due_at: datetime | None
    expired: bool | None
    attempts: int
    starts: int
    isolated: bool
    message_id: str
    routing_key: str
    key: str | None
    content_type: str
    tracking_ids: str | None
    headers: str | None
    body: bytes
    created_at: datetime
    expires_at: datetime | None


CLAIMED = ClaimedRow._fields
BODY = CLAIMED.index("body")


class UnreadableText(str):
    """A text that is not UTF-8 in its database, as people can read it. No message is made of it."""

    __slots__ = ()


_in_order = itemgetter(0, 1)
_kept_by = attrgetter(*_KEPT)


def message_row(message: Message) -> dict[str, Any]:
    """The columns that a message fills by itself."""
    return {
        "message_id": message.id,
        "routing_key": message.routing_key,
        "key": message.key,
        "content_type": message.content_type,
        "tracking_ids": json.dumps(message.tracking_ids[:-1]) if len(message.tracking_ids) > 1 else None,
        "headers": json.dumps(dict(message.headers)) if message.headers else None,
        "body": message.body,
        "created_at": message.created_at,
    }


def placed_row(queue: str, message: Message) -> dict[str, Any]:
    """What a message that already has its queue fills."""
    return message_row(message) | {"queue": queue, "expires": message.expires_at}


def as_message(row: Any) -> Message:
    """The message that a row keeps."""
    if row.created_at is None or type(row.body) is not bytes:
        raise ValueError(_OTHER_TYPE)
    return _message(*_kept_by(row))


def _message(
    message_id: str,
    routing_key: str,
    key: str | None,
    content_type: str,
    tracking_ids: str | None,
    headers: str | None,
    body: bytes,
    created_at: datetime,
    expires_at: datetime | None,
    due_at: datetime | None = None,
) -> Message:
    if not (type(routing_key) is type(message_id) is type(content_type) is str and (key is None or type(key) is str)):
        raise ValueError(_NO_TEXT)
    return remade(
        routing_key,
        body,
        content_type,
        _as_headers(headers) if headers else {},
        key,
        (*_as_ids(tracking_ids), message_id) if tracking_ids else (message_id,),
        created_at if created_at.tzinfo is UTC else as_utc(created_at),
        as_utc(expires_at) if expires_at else None,
        due_at,
    )


def _as_headers(text: str) -> dict[str, str]:
    if text == TOO_LARGE:
        raise ValueError(f"its headers have more than {LARGEST['headers']} bytes")
    if len(text) > LONGEST_HEADERS:
        raise ValueError(f"its headers have {len(text)} characters, more than {LONGEST_HEADERS}")
    headers = None if type(text) is UnreadableText else json.loads(text)
    if type(headers) is not dict:
        raise ValueError("its headers are no JSON object")
    for value in headers.values():
        if type(value) is not str:
            raise ValueError("a header's value is no text")
        if not value.isascii():
            _check_unicode(value, "a header's value")
    for name in headers:
        if not name.isascii():
            _check_unicode(name, "a header's name")
    return headers


def _as_ids(text: str) -> list[str]:
    if text == TOO_LARGE:
        raise ValueError(f"its tracking ids have more than {LARGEST['tracking_ids']} bytes")
    if len(text) > LONGEST_IDS:
        raise ValueError(f"its tracking ids have {len(text)} characters, more than {LONGEST_IDS}")
    ids = None if type(text) is UnreadableText else json.loads(text)
    if type(ids) is not list:
        raise ValueError("its tracking ids are no JSON list")
    for id in ids:
        if type(id) is not str:
            raise ValueError("a tracking id is no text")
        if not id.isascii():
            _check_unicode(id, "a tracking id")
    return ids


def _check_unicode(text: str, what: str) -> None:
    """JSON can name half a character, which nothing can carry on."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError(f"{what} is not valid Unicode: {cause}") from cause


def as_attempts(rows: Sequence[Sequence[Any]]) -> tuple[list[Attempt], dict[int, Dead]]:
    """The attempts that claimed rows stand for, in their order, and by their ids those that cannot be attempted.

    Their starts are counted already, but for isolated ones. The rows hold CLAIMED by position, and what a statement
    tells beyond it: there are many of them, and names cost more than all the rest.
    A row may be written by another program. One that emit would not have written takes no other with it.
    """
    attempts: list[Attempt] = []
    dead: dict[int, Dead] = {}
    for (
        due_at,
        id,
        first_due_at,
        expired,
        ended,
        begun,
        isolated,
        message_id,
        routing_key,
        key,
        content_type,
        tracking_ids,
        headers,
        body,
        created_at,
        expires_at,
        *_,
    ) in sorted(rows, key=_in_order):
        try:
            if expired:
                dead[id] = Dead(Reason.EXPIRED)
                continue
            if len(routing_key) > _SURELY_SHORT or len(message_id) > _SURELY_SHORT:
                _check_lengths(routing_key, message_id)
            if not (0 <= ended < MOST_TRIES > begun >= 0):
                raise ValueError(f"{ended} attempts and {begun} starts are no numbers that were counted")
            if created_at is None or type(body) is not bytes:
                raise ValueError(_OTHER_TYPE)
            message = _message(
                message_id,
                routing_key,
                key,
                content_type,
                tracking_ids,
                headers,
                body,
                created_at,
                expires_at,
                as_utc(due) if (due := first_due_at or due_at) - created_at > MUCH_LATER else None,
            )
            crashes = begun - ended if isolated else begun - ended - 1
            attempts.append(Attempt(message, ended + 1, id, crashes, bool(isolated)))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the others are read
            dead[id] = Dead(Reason.UNDECODABLE, _unreadable(error))
    return attempts, dead


def _check_lengths(*texts: str) -> None:
    for text in texts:
        if len(text.encode()) > LONGEST_KEY:
            raise ValueError(f"{text[:40]!r}… has more than {LONGEST_KEY} bytes")


def _unreadable(error: Exception) -> str:
    return f"{UNREADABLE}: {str(error)[:500] or type(error).__name__}"


def as_dead_letter(row: Any) -> DeadLetter:
    """The dead letter that a row keeps."""
    message, unreadable = _shown(row)
    attempts, starts = _number(row.attempts), _number(row.starts)
    return DeadLetter(
        id=row.id,
        message=message,
        queue=as_shown(row.destination) or None,
        reason=_readable_or(lambda: Reason(row.reason), Reason.UNDECODABLE),
        error=as_shown(row.error) or unreadable,
        attempt_count=attempts,
        crash_count=max(0, starts - attempts),
        history=as_shown(row.history),
        died_at=as_utc(row.died_at),
    )


def as_stored(row: Any, now: datetime, routes: Collection[str] = ()) -> StoredMessage:
    """A message where it is now. From the queues of `routes` relays send."""
    leased_until = as_utc(row.lease_until) if row.lease_until else None
    leased = leased_until is not None and leased_until > now
    message, unreadable = _shown(row)
    attempts, starts = _number(row.attempts), _number(row.starts)
    return StoredMessage(
        row_id=row.id,
        message=message,
        state=_state(row, routes),
        queue=as_shown(row.destination) or None,
        due_at=as_utc(row.due_at or EARLIEST),
        routed_at=as_utc(row.routed_at) if row.routed_at else None,
        leased_until=leased_until if leased else None,
        done_at=as_utc(row.done_at) if row.done_at else None,
        attempt_count=attempts,
        crash_count=max(0, starts - attempts - leased),
        history=as_shown(row.history),
        timer_id=as_shown(row.timer_id) or None,
        error=unreadable or None,
    )


def as_stored_dead_letter(row: Any) -> StoredMessage:
    """A dead letter, told as the end of its message's walk."""
    message, unreadable = _shown(row)
    attempts, starts = _number(row.attempts), _number(row.starts)
    return StoredMessage(
        row_id=row.id,
        message=message,
        state="dead",
        queue=as_shown(row.destination) or None,
        due_at=as_utc(row.due_at or EARLIEST),
        routed_at=as_utc(row.routed_at) if row.routed_at else None,
        leased_until=None,
        done_at=as_utc(row.died_at),
        attempt_count=attempts,
        crash_count=max(0, starts - attempts),
        history=as_shown(row.history),
        timer_id=as_shown(row.timer_id) or None,
        reason=as_shown(row.reason),
        error=as_shown(row.error) or unreadable,
    )


def as_shown(value: Any) -> str:
    """A text for people. In SQLite another program may have stored bytes or a number in its place."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def _shown(row: Any) -> tuple[Message, str]:
    """The message of a row for people, and what is wrong with it: what cannot be read is left out."""
    try:
        return as_message(row), ""
    except Exception as error:  # noqa: BLE001 - a list goes on behind it
        headers: dict[str, str] = _readable_or(lambda: _as_headers(row.headers), {}) if row.headers else {}
        ids: list[str] = _readable_or(lambda: _as_ids(row.tracking_ids), []) if row.tracking_ids else []
        message = remade(
            str(row.routing_key),
            row.body if type(row.body) is bytes else b"",
            str(row.content_type),
            headers,
            None if row.key is None else str(row.key),
            (*ids, str(row.message_id)),
            as_utc(row.created_at or EARLIEST),
            as_utc(row.expires_at) if row.expires_at else None,
            None,
        )
        return message, _unreadable(error)


def _readable_or(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except Exception:  # noqa: BLE001 - a list goes on behind it
        return otherwise


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def as_utc(value: datetime) -> datetime:
    """Databases without time zones keep UTC; drivers with them answer in the session's."""
    if value.tzinfo is UTC:
        return value
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def as_seconds(delay: timedelta) -> float:
    """Durations go to the database as seconds, and it adds them to its own clock."""
    return delay.total_seconds()


def _state(row: Any, routes: Collection[str]) -> State:
    if row.done_at:
        return State.SENT if row.destination == NOT_ROUTED or row.destination in routes else State.HANDLED
    if row.destination == NOT_ROUTED:
        return State.UNROUTABLE if row.unroutable else State.WAITING
    return State.RETRYING if row.attempts else State.QUEUED
