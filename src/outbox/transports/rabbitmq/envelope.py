"""Envelope: the properties and headers of a delivered message.

What other publishers wrote is kept as the bytes it came in: a retry or a dead letter carries it on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from struct import error
from typing import Any

from pamqp import encode

from outbox.core.binding import LONGEST_KEY
from outbox.core.errors import Undecodable
from outbox.core.headers import (
    ALSO_ROUTING_KEY,
    ALSO_TRACKING_IDS,
    REROUTING,
    is_brokers,
    is_ours,
    is_reserved,
)
from outbox.core.message import BYTES, Message, kept, new_id, remade
from outbox.transports.rabbitmq.channel import Incoming
from outbox.transports.rabbitmq.headers import (
    ATTEMPT,
    CRASHES,
    CREATED_AT,
    DIED_AT,
    DUE_AT,
    EPOCH,
    ERROR,
    EXPIRES_AT,
    HISTORY,
    KEY,
    MICROSECOND,
    MOST_COUNTED,
    ON_TRIAL,
    PERSISTENT,
    QUEUE,
    REASON,
    ROUTING_KEY,
    Unsendable,
    microseconds,
)
from outbox.transports.rabbitmq.tables import (
    LONG,
    LONG_LONG,
    LONG_NUMBER,
    PROPERTIES,
    SHORT,
    Table,
    split_properties,
    split_table,
    value_of,
)
from outbox.transports.rabbitmq.tracking import TRACKING_IDS, as_text, from_text

LATEST = datetime(9999, 1, 1, tzinfo=UTC)  # later times cannot be written in every time zone

_OF_THIS_COPY = (ON_TRIAL, QUEUE, REASON, ERROR, DIED_AT)
_OF_THIS_LIFE = (*_OF_THIS_COPY, ATTEMPT, CRASHES, EXPIRES_AT)
# What a message says of its own past. It is believed only where this library wrote it: see `Envelope.of`.
_PRIVATE = frozenset((*_OF_THIS_COPY, ROUTING_KEY, ALSO_ROUTING_KEY, ATTEMPT, CRASHES, HISTORY))
_DELIVERED, _ACQUIRED = "x-delivery-count", "x-acquired-count"
_COUNTS = frozenset((_DELIVERED, _ACQUIRED))
_NEW_COUNTS = frozenset((_ACQUIRED,))  # written by the broker from RabbitMQ 4.3 on, by others before


# A user id must be that of the connection, and a time to live would cut a delay short: neither is carried on.
_NOT_CARRIED_ON = ("user_id", "cluster_id", "expiration")


class Envelope:
    """A delivered message's properties, read only as far as they are needed."""

    __slots__ = ("headers", "is_fresh", "properties")

    def __init__(self, properties: Table, headers: Table) -> None:
        self.properties = properties
        self.headers = headers
        # Whether it carries nothing but when it was made, and its own id: most messages do, at their first attempt.
        self.is_fresh = CREATED_AT in headers and (len(headers) == 1 or (len(headers) == 2 and self._is_the_first))

    @classmethod
    def read(cls, data: bytes) -> Envelope:
        """From the flags on; raises Undecodable."""
        try:
            properties = split_properties(data)
            headers = properties.pop("headers", None)
            return cls(properties, {} if headers is None else split_table(headers))
        except Exception as cause:
            raise Undecodable(f"its AMQP properties cannot be read: {cause}") from cause

    @classmethod
    def of(cls, incoming: Incoming, *, is_ours: bool = False, counts_acquired: bool = False) -> Envelope:
        """A delivery's; raises Undecodable.

        Copies of ours come by the default exchange, from the delay queues by the same one, and from a trial queue of
        this process. What came by another exchange is new, whatever its publisher wrote about its past; so is what the
        broker delivers for the first time. `counts_acquired` says whether the broker writes that count.
        """
        envelope = cls.read(incoming.properties)
        if not envelope.is_fresh:
            if incoming.exchange and not is_ours:
                envelope.forget(_PRIVATE)
            if not incoming.redelivered:
                envelope.forget(_COUNTS)
            elif not counts_acquired:
                envelope.forget(_NEW_COUNTS)
        return envelope

    def forget(self, names: frozenset[str]) -> None:
        for name in self.headers.keys() & names:
            del self.headers[name]

    def as_new(self) -> Envelope:
        """The same without what another program wrote about its past."""
        envelope = Envelope(self.properties, dict(self.headers))
        envelope.forget(_PRIVATE)
        return envelope

    def message(self, routing_key: str, body: bytes) -> Message:
        """The message as it was emitted, or what comes closest to one; raises Undecodable."""
        message_id = self._id() or new_id()
        created_at = self.moment(CREATED_AT) or self._timestamp()
        content_type = self.text("content_type") or BYTES
        if self.is_fresh:
            return remade(routing_key, body, content_type, {}, None, (message_id,), created_at, None, None)
        self.own(HISTORY, str)  # here, where what cannot be read is noticed
        return Message(
            routing_key=self.own(ROUTING_KEY, str) or self.own(ALSO_ROUTING_KEY, str) or routing_key,
            body=body,
            content_type=content_type,
            headers=self._user_headers(),
            key=self._key(),
            tracking_ids=self._tracking_ids(message_id),
            created_at=created_at,
            expires_at=self.moment(EXPIRES_AT),
            due_at=self.moment(DUE_AT),
        )

    @property
    def attempt_count(self) -> int:
        return 1 if self.is_fresh else max(1, self._count(ATTEMPT) or 1)

    @property
    def crashes(self) -> int | None:
        """How many starts without an end were counted when it was published; none: it was no suspect."""
        return self._count(CRASHES)

    @property
    def on_trial(self) -> bool:
        return ON_TRIAL in self.headers

    @property
    def history(self) -> str:
        return self.own(HISTORY, str) or ""

    @property
    def returned(self) -> int:
        """How often the broker got it back without an end: a worker died, lost its connection, or gave it back.

        From RabbitMQ 4.3 on what was given back raises the acquired count alone, and the other one may be what its
        publisher wrote, or come from another queue: the smaller one counts.
        """
        if not self.headers.keys() & _COUNTS:
            return 0
        count = self._returned(_DELIVERED)
        if _ACQUIRED in self.headers:
            count = min(count, self._returned(_ACQUIRED))
        return min(MOST_COUNTED, max(0, count))

    @property
    def returned_at_most(self) -> int:
        """The larger of both: what a broker that limits deliveries may have counted, in whatever queues."""
        counts = self.headers.keys() & _COUNTS
        return min(MOST_COUNTED, max(0, *map(self._returned, _COUNTS))) if counts else 0

    def text(self, name: str) -> str | None:
        """A property that is a short string. What is no UTF-8 is escaped, so that two of them stay two."""
        raw = self.properties.get(name)
        return None if raw is None else raw[1:].decode(errors="backslashreplace")

    def carried_on(self, routing_key: str, message: Message, more: Mapping[str, object]) -> bytes:
        """The properties of its next copy: everything but what the broker wrote, and `more` of our own headers.

        Those that are None are left out. Raises Unsendable.
        """
        try:
            return self._carried_on(routing_key, message, more)
        except (TypeError, ValueError, error) as cause:
            raise Unsendable(f"it cannot be carried on: {cause}") from cause

    @property
    def carried(self) -> Table:
        """The headers that every copy has."""
        return {
            name: raw
            for name, raw in self.headers.items()
            if name not in REROUTING and not is_brokers(name) and name not in _OF_THIS_COPY
        }

    @property
    def carried_size(self) -> int:
        """Bytes of what others wrote, in a copy."""
        others = sum(len(name) + len(raw) for name, raw in self.carried.items() if not is_ours(name))
        return others + sum(len(raw) for raw in self.properties.values())

    def _carried_on(self, routing_key: str, message: Message, more: Mapping[str, object]) -> bytes:
        headers = self.carried
        own: dict[str, object] = {ROUTING_KEY: routing_key, ALSO_ROUTING_KEY: routing_key}
        if len(message.tracking_ids) > 1:  # some may have been left out
            own |= {TRACKING_IDS: list(message.tracking_ids), ALSO_TRACKING_IDS: as_text(message.tracking_ids)}
        for name, value in {**own, **more}.items():
            if value is None:
                headers.pop(name, None)
            else:
                headers[name] = encode.encode_table_value(value)  # type: ignore[arg-type]
        table = b"".join(_name(name) + raw for name, raw in headers.items())
        properties = {name: raw for name, raw in self.properties.items() if name not in _NOT_CARRIED_ON}
        properties["headers"] = LONG.pack(len(table)) + table
        properties["delivery_mode"] = PERSISTENT
        if self.text("message_id") != message.id:
            properties["message_id"] = encode.short_string(message.id)
        flags = sum(bit for name, bit in PROPERTIES if name in properties)
        return SHORT.pack(flags) + b"".join(properties[name] for name, _ in PROPERTIES if name in properties)

    def rejectable(self, exchange: str) -> bool:
        """Whether the broker can be told to dead-letter it.

        RabbitMQ 3.10 stops all dead-lettering of its node, that of the delays included, over an `x-death` which it did
        not write itself. What came by the default exchange has one of its own, from a delay.
        """
        if "x-death" not in self.headers:
            return True
        try:
            deaths = self.value("x-death")
        except Undecodable:
            return False
        return not isinstance(deaths, list) or (not exchange and all(isinstance(death, dict) for death in deaths))

    def bare(self) -> Envelope:
        """What is left of it without headers."""
        kept = ("content_type", "message_id")
        return Envelope({name: raw for name, raw in self.properties.items() if name in kept}, {})

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
        return Envelope(self.properties, {name: raw for name, raw in self.headers.items() if not is_ours(name)})

    @property
    def _is_the_first(self) -> bool:
        """Whether its only tracking id is its own, written as `sending.py` does."""
        written, message_id = self.headers.get(ALSO_TRACKING_IDS, b""), self.properties.get("message_id", b"")
        if len(written) != len(message_id) + 8:  # brackets and quotes, and three bytes more before a long text
            return False
        return written[5:7] == b'["' and written[7:-2] == message_id[1:] and written[-2:] == b'"]'

    def _id(self) -> str | None:
        message_id = self.text("message_id")
        return None if message_id is None else _fitting(message_id, "message id")

    def _key(self) -> str | None:
        key: str | None = self.own(KEY, str)
        return None if key is None else _fitting(key, KEY)

    def _tracking_ids(self, message_id: str) -> tuple[str, ...]:
        name, ids = TRACKING_IDS, self.own(TRACKING_IDS, list)
        if ids is None and ALSO_TRACKING_IDS in self.headers:
            # Of the other library the last one is the message's own: its message ids are new in every copy.
            name, ids = ALSO_TRACKING_IDS, from_text(self.value(ALSO_TRACKING_IDS)) or [message_id]
        elif not ids:
            ids = [message_id]
        elif ids[-1] != message_id:
            ids.append(message_id)
        ids = kept(tuple(ids))
        for each in ids:
            if not isinstance(each, str):
                raise Undecodable(f"its header {name} is no list of texts")
            _fitting(each, name)
        return ids

    def _count(self, name: str) -> int | None:
        count: int | None = self.own(name, int)
        if count is not None and not 0 <= count <= MOST_COUNTED:
            raise Undecodable(f"its header {name} is {count}: counts go up to {MOST_COUNTED}")
        return count

    def _returned(self, name: str) -> int:
        try:
            count = self.value(name) if name in self.headers else 0
        except Undecodable:
            return 0
        return count if isinstance(count, int) else 0

    def _user_headers(self) -> dict[str, str]:
        headers = {name: _text_of(self.value(name)) for name in self.headers if not is_reserved(name)}
        for name in headers:
            if not name.isascii() and any("\udc80" <= character <= "\udcff" for character in name):
                raise Undecodable(f"the name of its header {name!r} is no UTF-8")
        return headers

    def moment(self, name: str) -> datetime | None:
        raw = self.headers.get(name)
        if raw is None:
            return None
        number: int = LONG_LONG.unpack_from(raw, 1)[0] if raw[0] == LONG_NUMBER else self.own(name, int)
        if not 0 <= number < _LATEST:
            raise Undecodable(f"its header {name} is no moment: {number}")
        return EPOCH + number * MICROSECOND

    def _timestamp(self) -> datetime:
        raw = self.properties.get("timestamp")
        seconds: int = -1 if raw is None else LONG_LONG.unpack(raw)[0]
        return EPOCH + timedelta(seconds=seconds) if 0 <= seconds < _LATEST // 1_000_000 else datetime.now(UTC)

    def own(self, name: str, kind: type) -> Any:
        """One of our own headers: another program may have written what it is not."""
        if name not in self.headers:
            return None
        value = self.value(name)
        if type(value) is not kind:
            raise Undecodable(f"its header {name} is {type(value).__name__}, not {kind.__name__}")
        return value

    def value(self, name: str) -> Any:
        try:
            return value_of(self.headers[name])
        except Exception as cause:
            raise Undecodable(f"its header {name} cannot be read: {cause}") from cause


_LATEST = microseconds(LATEST)


def _fitting(text: str, what: str) -> str:
    """A text that can be carried on and stored: what emit would refuse is not taken from others."""
    if text.isascii() and len(text) <= LONGEST_KEY:
        return text
    try:
        size = len(text.encode())
    except UnicodeEncodeError as cause:  # JSON can name half a character
        raise Undecodable(f"its {what} is not valid Unicode: {cause}") from cause
    if size > LONGEST_KEY:
        raise Undecodable(f"its {what} has {size} bytes, more than {LONGEST_KEY}: {text[:40]!r}…")
    return text


def _name(name: str) -> bytes:
    encoded = name.encode(errors="surrogateescape")
    return bytes((len(encoded),)) + encoded


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
