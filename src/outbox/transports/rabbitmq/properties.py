"""Properties: a message as AMQP properties and headers, and back.

What other publishers wrote is kept as the bytes it came in: a retry or a dead letter carries it on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from struct import Struct, error
from typing import Any

from pamqp import decode, encode

from outbox.core.attempt import Attempt, Dead
from outbox.core.dead_letter import clean
from outbox.core.errors import Undecodable
from outbox.core.headers import OURS, REROUTING, is_brokers, is_reserved
from outbox.core.message import BYTES, Message
from outbox.core.tracking import new_id

TRACKING_IDS = "outbox-tracking-ids"
KEY = "outbox-key"
CREATED_AT = "outbox-created-at"  # this and the next three in microseconds since 1970
DUE_AT = "outbox-due-at"
EXPIRES_AT = "outbox-expires-at"
DIED_AT = "outbox-died-at"
ROUTING_KEY = "outbox-routing-key"  # the first one; a retry travels under the name of its queue
ATTEMPT = "outbox-attempt"
CRASHES = "outbox-crashes"
ON_TRIAL = "outbox-on-trial"  # this very copy is a start: if it comes back, its worker died of it
HISTORY = "outbox-history"
QUEUE = "outbox-queue"
REASON = "outbox-reason"
ERROR = "outbox-error"

LONGEST_HISTORY = 16 * 1024  # bytes: the oldest lines go first

_OF_THIS_COPY = (ON_TRIAL, QUEUE, REASON, ERROR, DIED_AT)
_OF_THIS_LIFE = (*_OF_THIS_COPY, ATTEMPT, CRASHES, EXPIRES_AT)
_COUNTS = ("x-delivery-count", "x-acquired-count")  # by version

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SHORT, _LONG, _LONG_LONG = Struct(">H"), Struct(">I"), Struct(">q")
_PERSISTENT = b"\x02"

# Properties in the order in which they travel, each with its bit.
_PROPERTIES = (
    ("content_type", 1 << 15),
    ("content_encoding", 1 << 14),
    ("headers", 1 << 13),
    ("delivery_mode", 1 << 12),
    ("priority", 1 << 11),
    ("correlation_id", 1 << 10),
    ("reply_to", 1 << 9),
    ("expiration", 1 << 8),
    ("message_id", 1 << 7),
    ("timestamp", 1 << 6),
    ("message_type", 1 << 5),
    ("user_id", 1 << 4),
    ("app_id", 1 << 3),
    ("cluster_id", 1 << 2),
)
_SIZES = {"delivery_mode": 1, "priority": 1, "timestamp": 8}
# A user id must be that of the connection, and a time to live would cut a delay short: neither is carried on.
_NOT_CARRIED_ON = ("user_id", "cluster_id", "expiration")
_FLAGS = _SHORT.pack(1 << 15 | 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6)

_FIXED_SIZES = {
    **dict.fromkeys(b"V\x00", 0),
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"sUu", 2),
    **dict.fromkeys(b"Iif", 4),
    b"D"[0]: 5,
    **dict.fromkeys(b"lLdT", 8),
}
_LENGTHS = frozenset(b"SxAF")  # these begin with their length

Table = dict[str, bytes]  # names with values as they travel: one byte for the type, then the value


class Unsendable(Exception):
    """A message that no broker could take as it is."""


# To the broker.


def encoded(message: Message) -> bytes:
    """A fresh message's properties; raises Unsendable."""
    created_at = microseconds(message.created_at)
    tracking_ids = message.tracking_ids
    try:
        entries = _CREATED_AT_NAME + _LONG_LONG.pack(created_at)
        if len(tracking_ids) > 1:
            entries += _entry(TRACKING_IDS, list(tracking_ids))
        if message.key is not None:
            entries += _entry(KEY, message.key)
        if message.due_at is not None:
            entries += _entry(DUE_AT, microseconds(message.due_at))
        if message.expires_at is not None:
            entries += _entry(EXPIRES_AT, microseconds(message.expires_at))
        if message.headers:
            entries += _user_entries(tuple(message.headers.items()))
        return b"".join(
            (
                _FLAGS,
                _content_type(message.content_type),
                _LONG.pack(len(entries)),
                entries,
                _PERSISTENT,
                encode.short_string(tracking_ids[-1]),
                _LONG_LONG.pack(created_at // 1_000_000),
            )
        )
    except (TypeError, ValueError, error) as cause:
        raise Unsendable(f"it cannot be written as AMQP: {cause}") from cause


@lru_cache(maxsize=256)
def _content_type(text: str) -> bytes:
    return encode.short_string(text)


@lru_cache(maxsize=1024)
def _user_entries(headers: tuple[tuple[str, str], ...]) -> bytes:
    for name, _ in headers:
        if is_reserved(name):
            raise Unsendable(f"the header {name!r} has a meaning of its own on RabbitMQ: give yours another name")
    return b"".join(_entry(name, value) for name, value in headers)


def _entry(name: str, value: Any) -> bytes:
    return encode.short_string(name) + encode.encode_table_value(value)


_CREATED_AT_NAME = encode.short_string(CREATED_AT) + b"l"


def microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


# From the broker.


class Envelope:
    """A delivered message's properties, read only as far as they are needed."""

    __slots__ = ("headers", "properties")

    def __init__(self, properties: Table, headers: Table) -> None:
        self.properties = properties
        self.headers = headers

    @classmethod
    def read(cls, data: bytes) -> Envelope:
        """From the flags on; raises Undecodable."""
        try:
            properties = _split_properties(data)
            headers = properties.pop("headers", None)
            return cls(properties, {} if headers is None else _split_table(headers))
        except (IndexError, ValueError, error) as cause:
            raise Undecodable(f"its AMQP properties cannot be read: {cause}") from cause

    @property
    def is_fresh(self) -> bool:
        """Whether it carries nothing but when it was made: most messages do, at their first attempt."""
        return len(self.headers) == 1 and CREATED_AT in self.headers

    def message(self, routing_key: str, body: bytes) -> Message:
        """The message as it was emitted, or what comes closest to one; raises Undecodable."""
        message_id = self.text("message_id") or new_id()
        created_at = self.moment(CREATED_AT) or self._timestamp()
        content_type = self.text("content_type") or BYTES
        if self.is_fresh:
            return Message(
                routing_key=routing_key,
                body=body,
                content_type=content_type,
                tracking_ids=(message_id,),
                created_at=created_at,
            )
        return Message(
            routing_key=self.own(ROUTING_KEY, str) or routing_key,
            body=body,
            content_type=content_type,
            headers=self._user_headers(),
            key=self.own(KEY, str),
            tracking_ids=self._tracking_ids(message_id),
            created_at=created_at,
            expires_at=self.moment(EXPIRES_AT),
            due_at=self.moment(DUE_AT),
        )

    @property
    def attempt_count(self) -> int:
        return max(1, self.own(ATTEMPT, int) or 1)

    @property
    def crashes(self) -> int | None:
        """How many starts without an end were counted when it was published; none: it was no suspect."""
        crashes: int | None = self.own(CRASHES, int)
        return crashes

    @property
    def on_trial(self) -> bool:
        return ON_TRIAL in self.headers

    @property
    def history(self) -> str:
        return self.own(HISTORY, str) or ""

    @property
    def returned(self) -> int:
        """How often the broker got it back without an end: a worker died, lost its connection, or gave it back."""
        counts = [self.value(name) for name in _COUNTS if name in self.headers]
        return max((count for count in counts if isinstance(count, int)), default=0) if counts else 0

    def text(self, name: str) -> str | None:
        """A property that is a short string."""
        raw = self.properties.get(name)
        return None if raw is None else raw[1:].decode(errors="replace")

    def carried_on(self, routing_key: str, message: Message, more: Mapping[str, object]) -> bytes:
        """The properties of its next copy: everything but what the broker wrote, and `more` of our own headers.

        Those that are None are left out.
        """
        headers = {
            name: raw
            for name, raw in self.headers.items()
            if name not in REROUTING and not is_brokers(name) and name not in _OF_THIS_COPY
        }
        for name, value in {ROUTING_KEY: routing_key, **more}.items():
            if value is None:
                headers.pop(name, None)
            else:
                headers[name] = encode.encode_table_value(value)  # type: ignore[arg-type]
        table = b"".join(encode.short_string(name) + raw for name, raw in headers.items())
        properties = {name: raw for name, raw in self.properties.items() if name not in _NOT_CARRIED_ON}
        properties["headers"] = _LONG.pack(len(table)) + table
        properties["delivery_mode"] = _PERSISTENT
        properties["message_id"] = encode.short_string(message.id)
        flags = sum(bit for name, bit in _PROPERTIES if name in properties)
        return _SHORT.pack(flags) + b"".join(properties[name] for name, _ in _PROPERTIES if name in properties)

    @property
    def is_dead_letter(self) -> bool:
        return REASON in self.headers

    def revived(self) -> Envelope:
        """The same with all attempts before it, no expiration, and due by now; its history stays."""
        headers = {name: raw for name, raw in self.headers.items() if name not in _OF_THIS_LIFE}
        headers[DUE_AT] = encode.encode_table_value(microseconds(datetime.now(UTC)))
        return Envelope(self.properties, headers)

    def without_ours(self) -> Envelope:
        """The same without our own headers, if they are not what they should be."""
        return Envelope(self.properties, {name: raw for name, raw in self.headers.items() if not name.startswith(OURS)})

    def _tracking_ids(self, message_id: str) -> tuple[str, ...]:
        ids = self.own(TRACKING_IDS, list) or [message_id]
        if not all(isinstance(each, str) for each in ids):
            raise Undecodable(f"its header {TRACKING_IDS} is no list of texts")
        return tuple(ids) if ids[-1] == message_id else (*ids, message_id)

    def _user_headers(self) -> dict[str, str]:
        return {name: _text_of(self.value(name)) for name in self.headers if not is_reserved(name)}

    def moment(self, name: str) -> datetime | None:
        number = self.own(name, int)
        try:
            return None if number is None else _EPOCH + number * _MICROSECOND
        except OverflowError:
            raise Undecodable(f"its header {name} is no moment: {number}") from None

    def _timestamp(self) -> datetime:
        raw = self.properties.get("timestamp")
        try:
            return datetime.now(UTC) if raw is None else _EPOCH + timedelta(seconds=_LONG_LONG.unpack(raw)[0])
        except OverflowError:
            return datetime.now(UTC)

    def own(self, name: str, kind: type) -> Any:
        """One of our own headers: somebody else may have written what it is not."""
        if name not in self.headers:
            return None
        value = self.value(name)
        if type(value) is not kind:
            raise Undecodable(f"its header {name} is {type(value).__name__}, not {kind.__name__}")
        return value

    def value(self, name: str) -> Any:
        raw = self.headers[name]
        if raw[0] == _LONG_TEXT:
            return raw[5:].decode(errors="replace")
        if raw[0] == _LONG_NUMBER:
            return _LONG_LONG.unpack_from(raw, 1)[0]
        try:
            return decode.embedded_value(raw)[1]
        except (ValueError, OverflowError, OSError, IndexError) as cause:
            raise Undecodable(f"its header {name} cannot be read: {cause}") from cause


_LONG_TEXT, _LONG_NUMBER = b"S"[0], b"l"[0]


def _split_properties(data: bytes) -> Table:
    if data.startswith(_FLAGS):
        return _split_ours(data)
    flags = _SHORT.unpack_from(data)[0]
    if flags & 1:
        raise ValueError("there are more properties than AMQP 0-9-1 has")
    found: Table = {}
    start = 2
    for name, bit in _PROPERTIES:
        if not flags & bit:
            continue
        if name == "headers":
            end = start + 4 + _LONG.unpack_from(data, start)[0]
        else:
            end = start + (_SIZES.get(name) or 1 + data[start])
        if end > len(data):
            raise ValueError(f"{name} is cut off")
        found[name] = data[start:end]
        start = end
    return found


def _split_ours(data: bytes) -> Table:
    """The same for messages of our own, which all have the same properties."""
    headers = 3 + data[2]
    mode = headers + 4 + _LONG.unpack_from(data, headers)[0]
    timestamp = mode + 2 + data[mode + 1]
    if timestamp + 8 > len(data):
        raise ValueError("they are cut off")
    return {
        "content_type": data[2:headers],
        "headers": data[headers:mode],
        "delivery_mode": data[mode : mode + 1],
        "message_id": data[mode + 1 : timestamp],
        "timestamp": data[timestamp : timestamp + 8],
    }


def _split_table(data: bytes) -> Table:
    found: Table = {}
    start, end = 4, len(data)
    while start < end:
        value = start + 1 + data[start]
        name = data[start + 1 : value].decode()
        kind = data[value]
        size = _FIXED_SIZES.get(kind)
        if size is None:
            if kind not in _LENGTHS:
                raise ValueError(f"the header {name!r} has the unknown type {chr(kind)!r}")
            size = 4 + _LONG.unpack_from(data, value + 1)[0]
        start = value + 1 + size
        if start > end:
            raise ValueError(f"the header {name!r} is cut off")
        found[name] = data[value:start]
    return found


def _text_of(value: object) -> str:
    """A header's value where only texts are: other publishers write what they like."""
    match value:
        case str():
            return value
        case bytes() | bytearray():
            return bytes(value).decode(errors="replace")
        case bool() | int() | float() | None | dict() | list():
            return json.dumps(value, default=str)
        case _:
            return str(value)


# What a copy says of the attempts behind it.


def after_failure(attempt: Attempt, envelope: Envelope, failure: str) -> dict[str, object]:
    """The headers of the next attempt."""
    line = _line(f"attempt {attempt.attempt_count} failed", failure)
    return {ATTEMPT: attempt.attempt_count + 1, HISTORY: _ending(envelope.history + line)}


def of_dead_letter(attempt: Attempt, envelope: Envelope, queue: str, outcome: Dead) -> dict[str, object]:
    """The headers of a dead letter."""
    failure = clean(outcome.error)
    line = _line(f"attempt {attempt.attempt_count} was the last, {outcome.reason}", failure)
    return {
        ATTEMPT: attempt.attempt_count,
        CRASHES: attempt.crash_count,
        HISTORY: _ending(envelope.history + line),
        QUEUE: queue,
        REASON: str(outcome.reason),
        ERROR: failure,
        DIED_AT: microseconds(datetime.now(UTC)),
    }


def of_replay(envelope: Envelope) -> dict[str, object]:
    """The headers of a dead letter's new beginning."""
    history = _ending(envelope.history + _line("replayed", "attempts start again"))
    return {
        ATTEMPT: None,
        CRASHES: None,
        EXPIRES_AT: None,
        DUE_AT: microseconds(datetime.now(UTC)),
        HISTORY: history,
    }


def _line(what: str, failure: str) -> str:
    first_line = next(iter(clean(failure).splitlines()), "")
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {what}: {first_line[:1000]}\n"


def _ending(history: str) -> str:
    return history.encode(errors="replace")[-LONGEST_HISTORY:].decode(errors="ignore")
