"""Sending: a fresh message as AMQP properties and headers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from json.encoder import encode_basestring
from struct import error
from typing import Any

from pamqp import encode

from outbox.core.binding import LONGEST_KEY
from outbox.core.headers import ALSO_OURS, ALSO_TRACKING_IDS, is_reserved
from outbox.core.message import Message
from outbox.transports.rabbitmq.confirms import Outgoing
from outbox.transports.rabbitmq.headers import (
    CREATED_AT,
    DUE_AT,
    EPOCH,
    EXPIRES_AT,
    KEY,
    LARGEST_PROPERTIES,
    MICROSECOND,
    PERSISTENT,
    Unsendable,
    microseconds,
)
from outbox.transports.rabbitmq.tables import EXPIRING_FLAGS, LONG, LONG_LONG, OUR_FLAGS
from outbox.transports.rabbitmq.topology import LONGEST_DELAY
from outbox.transports.rabbitmq.tracking import TRACKING_IDS, as_text

_MILLISECOND = timedelta(milliseconds=1)
_SURELY_SHORT = LONGEST_KEY // 4  # characters, none of which has more than four bytes


def outgoing(exchange: str, message: Message) -> Outgoing:
    """A fresh message as it is published; raises Unsendable."""
    properties = encoded(message)
    if len(properties) > LARGEST_PROPERTIES:
        raise Unsendable(f"its headers have {len(properties)} bytes, and RabbitMQ takes {LARGEST_PROPERTIES}")
    if len(message.routing_key) > _SURELY_SHORT and len(message.routing_key.encode()) > LONGEST_KEY:
        raise Unsendable(f"its routing key has more than {LONGEST_KEY} bytes")
    return Outgoing(exchange, message.routing_key, properties, message.body, message.id)


def why_unsendable(error: Exception) -> str:
    """What an error says that kept a message from being written."""
    return str(error) if isinstance(error, Unsendable) else f"it cannot be written as AMQP: {error!r}"


def encoded(message: Message) -> bytes:
    """A fresh message's properties; raises Unsendable."""
    created_at = (message.created_at - EPOCH) // MICROSECOND
    tracking_ids = message.tracking_ids
    flags, time_to_live = OUR_FLAGS, b""
    try:
        entries = _CREATED_AT_NAME + LONG_LONG.pack(created_at) + _also_tracking_ids(tracking_ids)
        if len(tracking_ids) > 1:
            entries += _entry(TRACKING_IDS, list(tracking_ids))
        if message.key is not None:
            entries += _entry(KEY, message.key)
        if message.due_at is not None:
            entries += _entry(DUE_AT, microseconds(message.due_at))
        if message.expires_at is not None:
            entries += _entry(EXPIRES_AT, microseconds(message.expires_at))
            left = message.expires_at - datetime.now(UTC)
            if left <= LONGEST_DELAY:
                flags, time_to_live = EXPIRING_FLAGS, _time_to_live(left)
        if message.headers:
            entries += _user_entries(tuple(message.headers.items()))
        return b"".join(
            (
                flags,
                _content_type(message.content_type),
                LONG.pack(len(entries)),
                entries,
                PERSISTENT,
                time_to_live,
                encode.short_string(tracking_ids[-1]),
                LONG_LONG.pack(created_at // 1_000_000),
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
        if is_reserved(name) and name not in ALSO_OURS:
            raise Unsendable(f"the header {name!r} has a meaning of its own on RabbitMQ: give yours another name")
    # Rows from before these names were reserved may have them: ours take their place.
    return b"".join(_entry(name, value) for name, value in headers if name not in ALSO_OURS)


def _entry(name: str, value: Any) -> bytes:
    return encode.short_string(name) + encode.encode_table_value(value)


_CREATED_AT_NAME = encode.short_string(CREATED_AT) + b"l"
_ALSO_TRACKING_IDS_NAME = encode.short_string(ALSO_TRACKING_IDS) + b"S"


def _also_tracking_ids(ids: tuple[str, ...]) -> bytes:
    text = (as_text(ids) if len(ids) > 1 else f"[{encode_basestring(ids[0])}]").encode()  # the usual one by a short way
    return _ALSO_TRACKING_IDS_NAME + LONG.pack(len(text)) + text


def _time_to_live(left: timedelta) -> bytes:
    """In milliseconds, rounded up: the broker never drops what is still worth delivering."""
    return encode.short_string(str(max(0, -(-left // _MILLISECOND))))
