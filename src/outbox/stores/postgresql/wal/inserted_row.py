"""InsertedRow: one row of the outbox table as the log tells it, whatever wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox.core.attempt import Attempt, Dead, Reason
from outbox.core.durations import EARLIEST, LATEST, OLDEST
from outbox.core.errors import LogUnreadable
from outbox.stores.postgresql.wal.pgoutput import Binary, Insert, Value
from outbox.stores.rows import LARGEST, TOO_LARGE, UNREADABLE, ClaimedRow, UnreadableText, as_attempts
from outbox.stores.tables import NOT_ROUTED

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)  # what PostgreSQL counts from
MICROSECOND = timedelta(microseconds=1)
NEVER, ALWAYS = 2**63 - 1, -(2**63)  # infinity and -infinity, as PostgreSQL writes them

Microseconds = int  # since 2000


@dataclass(slots=True)  # not frozen, which takes three times as long to make: there is one for each message
class InsertedRow:
    """What decides of a row, and the attempt that it stands for; or why it cannot be attempted."""

    id: int
    due_at: Microseconds
    expires_at: Microseconds | None
    is_fresh: bool  # neither routed, done nor put off when it was inserted
    size: int  # bytes
    attempt: Attempt | None
    dead: Dead | None

    @classmethod
    def of(cls, insert: Insert) -> InsertedRow:
        """Reads a row; what cannot be read of it makes it dead, alone. Without an id it cannot even be that."""
        values = insert.values
        try:
            id = _number(values["id"])
        except (KeyError, ValueError, TypeError) as cause:
            raise LogUnreadable(
                f"a row of {insert.relation.namespace}.{insert.relation.name} has no id that can be read: {cause!r}"
            ) from cause
        sent: Any = filter(None, values.values())
        size = sum(map(len, sent))
        try:
            due_at, expires_at = _time(values["due_at"]), _time_or_none(values["expires_at"])
            is_fresh = _is_fresh(values)
            attempts, dead = as_attempts([_claimed(id, values)])
        except Exception as error:  # noqa: BLE001 - another program may have written it: the others are read
            why = Dead(Reason.UNDECODABLE, f"{UNREADABLE}: {str(error) or type(error).__name__}")
            return cls(id, ALWAYS, None, True, size, None, why)
        return cls(id, due_at, expires_at, is_fresh, size, attempts[0] if attempts else None, dead.get(id))


def local_time() -> Microseconds:
    """This process's clock, as PostgreSQL counts."""
    return int((time.time() - EPOCH.timestamp()) * 1_000_000)


def microseconds(moment: datetime) -> Microseconds:
    """A time as PostgreSQL counts it."""
    return (moment - EPOCH) // MICROSECOND


def _is_fresh(values: Any) -> bool:
    return _text(values["destination"]) == NOT_ROUTED and values["done_at"] is None and values["first_due_at"] is None


def _claimed(id: int, values: Any) -> ClaimedRow:
    """The row as a claim would tell it, whose start it has counted."""
    created_at = _moment(_time(values["created_at"]))
    expires_at = _time_or_none(values["expires_at"])
    return ClaimedRow._make(  # by position: names cost as much as all the rest
        (
            _moment(_time(values["due_at"])) or EARLIEST,
            id,
            None,  # the time at which it was due first
            False,  # whether it has expired: that is decided when it is sent
            _number(values["attempts"]),
            _number(values["starts"]) + 1,
            False,  # whether it is isolated
            _text(values["message_id"]),
            _text(values["routing_key"]),
            _text_or_none(values["key"]),
            _text(values["content_type"]),
            _short("tracking_ids", values["tracking_ids"]),
            _short("headers", values["headers"]),
            _bytes(values["body"]),
            created_at,  # `as_attempts` knows what to make of a row without
            None if expires_at is None else _moment(expires_at),
        )
    )


def _sent(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a value is missing" if value is None else "a value was not sent")


def _text(value: Value) -> str:
    raw = _sent(value)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return UnreadableText(raw.decode(errors="backslashreplace"))


def _text_or_none(value: Value) -> str | None:
    return None if value is None else _text(value)


def _short(column: str, value: Value) -> str | None:
    if isinstance(value, bytes) and len(value) > LARGEST[column]:
        return TOO_LARGE
    return _text_or_none(value)


def _number(value: Value) -> int:
    raw = _sent(value)
    return int.from_bytes(raw, "big", signed=True) if isinstance(raw, Binary) else int(raw)


def _bytes(value: Value) -> bytes:
    raw = _sent(value)
    read: Callable[[bytes], bytes] = bytes if isinstance(raw, Binary) else _from_hex
    if len(raw) > 2 * LARGEST["body"] + 2:
        raise ValueError(f"its body has more than {LARGEST['body']} bytes")
    body = read(raw)
    if len(body) > LARGEST["body"]:
        raise ValueError(f"its body has more than {LARGEST['body']} bytes")
    return body


def _from_hex(raw: bytes) -> bytes:
    if not raw.startswith(b"\\x"):
        raise ValueError("its body is not written as bytea_output = 'hex' does")
    return bytes.fromhex(raw[2:].decode("ascii"))


def _time(value: Value) -> Microseconds:
    raw = _sent(value)
    if isinstance(raw, Binary):
        if len(raw) != 8:
            raise ValueError(f"a time of {len(raw)} bytes")
        return int.from_bytes(raw, "big", signed=True)
    if raw in (b"infinity", b"-infinity"):
        return NEVER if raw == b"infinity" else ALWAYS
    if raw.endswith(b" BC"):
        return ALWAYS
    try:
        return microseconds(datetime.fromisoformat(raw.decode("ascii")))
    except ValueError:
        if len(raw.split(b"-")[0]) > 4:  # a year of five digits
            return NEVER - 1
        raise


def _time_or_none(value: Value) -> Microseconds | None:
    return None if value is None else _time(value)


_OLDEST, _LATEST = microseconds(OLDEST), microseconds(LATEST)


def _moment(at: Microseconds) -> datetime | None:
    """A time that can be read; none: it is outside of what drivers read."""
    return EPOCH + timedelta(microseconds=at) if _OLDEST <= at < _LATEST else None
