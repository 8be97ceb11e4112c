"""Message: one fact to deliver, and the ids that lead from an entry point to it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from urllib.parse import quote
from uuid import UUID

from outbox.core.binding import LONGEST_KEY
from outbox.core.durations import LATEST, NO_DELAY, OLDEST
from outbox.core.errors import (
    BodyTooLarge,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    MessageIdInvalid,
    RoutingKeyInvalid,
    TimeInvalid,
    TimerIdInvalid,
    TooManyHeaders,
    named,
)

MOST_IDS = 64  # brokers and HTTP servers limit what a message carries beside its body: the first id, and the last 63

LARGEST_IDS = 4096  # bytes of those that led here, as the header of a CloudEvent has them; the same reason

_tracking_ids: ContextVar[tuple[str, ...]] = ContextVar("outbox_tracking_ids", default=())


def get_tracking_ids() -> tuple[str, ...]:
    """The ids of the messages that led here, oldest first: of more than 64 the first and the last 63."""
    return _tracking_ids.get()


@contextmanager
def tracking() -> Iterator[tuple[str, ...]]:
    """Give what is emitted in this block a common first id, one for the entry point itself."""
    tracking_ids = next_tracking_ids()
    token = _tracking_ids.set(tracking_ids)
    try:
        yield tracking_ids
    finally:
        _tracking_ids.reset(token)


def follow(tracking_ids: tuple[str, ...]) -> None:
    """Let the rest of this task be what follows from the message with these tracking ids.

    Another program may have written them. One that `emit` would not take is left out: it would make every message that
    follows one that no broker, or no next service, takes.
    """
    tracking_ids = kept(tracking_ids)
    for id in tracking_ids:
        if not id.isascii() or not id.isprintable() or not 0 < len(id) <= LONGEST_KEY:
            tracking_ids = tuple(filter(_travels, tracking_ids))
            break
    text = ",".join(tracking_ids)
    if 5 * len(text) > LARGEST_IDS or not text.isascii():  # a character of ASCII takes five at most
        tracking_ids = _fitting(tracking_ids)
    _tracking_ids.set(tracking_ids)


def next_tracking_ids() -> tuple[str, ...]:
    """The tracking ids of what is made here: those that led here, and a new one."""
    return kept((*get_tracking_ids(), new_id()))


def kept(tracking_ids: tuple[str, ...]) -> tuple[str, ...]:
    """Of many ids those that are kept: the first and the last ones."""
    if len(tracking_ids) <= MOST_IDS:
        return tracking_ids
    return (tracking_ids[0], *tracking_ids[1 - MOST_IDS :])


def _fitting(tracking_ids: tuple[str, ...]) -> tuple[str, ...]:
    """The first one, and of the last ones as many as fit."""
    if _header_size(",".join(tracking_ids)) <= LARGEST_IDS:
        return tracking_ids
    first, *others = tracking_ids
    room = LARGEST_IDS - _header_size(first)
    last: list[str] = []
    for id in reversed(others):
        room -= _header_size(id) + 1
        if room < 0:
            break
        last.append(id)
    return (first, *reversed(last))


def _header_size(ids: str) -> int:
    """In a header of a binary CloudEvent, where the percent signs that quote an id are quoted again."""
    return len(quote(quote(ids, safe=","), safe=","))


def _travels(id: str) -> bool:
    """Whether an id is what `check_message_ids` takes."""
    try:
        size = len(id.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= LONGEST_KEY and not any(character < " " or character == "\x7f" for character in id)


def new_id() -> str:
    """A version 7 UUID: random, and in the order of time, which keeps indexes over ids small and warm."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76 | (random >> 68 & 0xFFF) << 64 | 0b10 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    return str(UUID(int=value))


JSON = "application/json"
BYTES = "application/octet-stream"

MOST_HEADERS = 64
LARGEST_HEADERS = 64 * 1024
LARGEST_BODY = 1024 * 1024
LARGEST_READ = 64 * 1024 * 1024  # bytes of a body that is read at all, whatever another program wrote

_HEADER_NAME = re.compile(r"[A-Za-z0-9\-_.]{1,255}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
_NAME = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_MEDIA_TYPE = re.compile(rf"\s*{_NAME}/{_NAME}\s*(;.*)?", re.ASCII | re.DOTALL)  # RFC 2046


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One fact to deliver, unchanged from emit to listener. Its id is its last tracking id."""

    routing_key: str
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    tracking_ids: tuple[str, ...] = field(default_factory=next_tracking_ids)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))  # by the emitter's clock
    expires_at: datetime | None = None
    due_at: datetime | None = field(default=None, compare=False)  # if that was much later: by an eta, a replay

    @property
    def id(self) -> str:
        return self.tracking_ids[-1]

    def __repr__(self) -> str:
        """The body is told by its size: what is in it belongs in no log."""
        values = {each.name: repr(getattr(self, each.name)) for each in fields(self)}
        values["body"] = f"<{len(self.body)} bytes>"
        return f"Message({', '.join(f'{name}={value}' for name, value in values.items())})"


# A frozen class sets its fields by the longest way there is. Relays and workers make a message from each row, and that
# was most of what they did: the fields' own setters take half the time.
_new = object.__new__
(
    _set_routing_key,
    _set_body,
    _set_content_type,
    _set_headers,
    _set_key,
    _set_tracking_ids,
    _set_created_at,
    _set_expires_at,
    _set_due_at,
) = (Message.__dict__[each.name].__set__ for each in fields(Message))


def remade(
    routing_key: str,
    body: bytes,
    content_type: str,
    headers: Mapping[str, str],
    key: str | None,
    tracking_ids: tuple[str, ...],
    created_at: datetime,
    expires_at: datetime | None,
    due_at: datetime | None,
) -> Message:
    """A message as it was, from all of its fields."""
    message = _new(Message)
    _set_routing_key(message, routing_key)
    _set_body(message, body)
    _set_content_type(message, content_type)
    _set_headers(message, headers)
    _set_key(message, key)
    _set_tracking_ids(message, tracking_ids)
    _set_created_at(message, created_at)
    _set_expires_at(message, expires_at)
    _set_due_at(message, due_at)
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a message is due and until when it is worth delivering."""

    due: datetime | timedelta = NO_DELAY
    expiration: timedelta | None = None  # counted from when the message is due
    timer_id: str | None = None


NOW = Schedule()


def check(message: Message, largest_body: int = LARGEST_BODY) -> None:
    """Refuse a message that some broker or database on its way could not carry."""
    _check_text(message.routing_key, "routing key", RoutingKeyInvalid)
    if message.key is not None:
        _check_text(message.key, "key", KeyInvalid)
    if len(message.body) > largest_body:
        raise BodyTooLarge(
            f"the body of {message.routing_key!r} has {len(message.body)} bytes, more than max_body_size="
            f"{largest_body}: send a reference to the data instead, or raise max_body_size"
        )
    kind = message.content_type
    if not isinstance(kind, str) or not kind.isascii() or not kind.isprintable() or not 0 < len(kind) <= LONGEST_KEY:
        raise HeaderInvalid(f"content type {named(kind)}: printable ASCII, at most {LONGEST_KEY} characters")
    if message.headers:
        _check_headers(message.headers)


def is_media_type(text: str) -> bool:
    """Whether a content type says a type and a subtype; others decline what has none."""
    return _MEDIA_TYPE.fullmatch(text) is not None


def check_message_ids(message: Message) -> None:
    """Refuse ids that could not be stored: those of a message from outside are not our own."""
    for id in message.tracking_ids:
        _check_text(id, "message id", MessageIdInvalid)


def check_times(message: Message) -> None:
    """Refuse times that some driver could not read again: those of a message from outside are not our own."""
    for what, moment in (("created_at", message.created_at), ("expires_at", message.expires_at)):
        if moment is None:
            continue
        if not isinstance(moment, datetime) or moment.tzinfo is None or not OLDEST <= moment < LATEST:
            years = f"from the year {OLDEST.year} until before {LATEST.year}"
            raise TimeInvalid(f"{what} {moment!r}: a datetime with a time zone, {years}")


def check_timer_id(timer_id: str) -> None:
    """Refuse a timer id that could not be stored."""
    _check_text(timer_id, "timer id", TimerIdInvalid)


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > MOST_HEADERS:
        raise TooManyHeaders(f"{len(headers)} headers, at most {MOST_HEADERS} travel with a message")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise HeaderInvalid(f"header name {named(name)}: only A-Z a-z 0-9 - _ . are allowed")
        if not isinstance(value, str):
            raise HeaderInvalid(f"header {name!r} is a {type(value).__name__}: header values are strings")
        if _UNSAFE.search(value):
            raise HeaderInvalid(f"header {name!r} contains a control character")
        size += len(name) + _size(value, f"header {name!r}", HeaderInvalid)
    if size > LARGEST_HEADERS:
        raise HeadersTooLarge(
            f"the headers have {size} bytes together, at most {LARGEST_HEADERS} travel with a message"
        )


def _check_text(text: str, what: str, error: type[Exception]) -> None:
    if not isinstance(text, str) or not text:
        raise error(f"a {what} must be a non-empty string, not {named(text)}")
    if _size(text, what, error) > LONGEST_KEY:
        raise error(f"a {what} has at most {LONGEST_KEY} bytes: {text[:40]!r}… has {len(text.encode())}")
    if _UNSAFE.search(text):
        raise error(f"a {what} must not contain control characters: {text!r}")


def _size(text: str, what: str, error: type[Exception]) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as cause:
        raise error(f"{what} is not valid Unicode: {cause}") from cause
