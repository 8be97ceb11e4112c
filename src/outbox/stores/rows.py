"""Rows: messages to rows and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any

from outbox.core.attempt import Attempt, Dead, Reason
from outbox.core.dead_letter import DeadLetter
from outbox.core.message import Message, remade
from outbox.core.store import StoredMessage
from outbox.stores.tables import NOT_ROUTED

LONGEST_HISTORY = 16 * 1024  # characters
EXPIRATION_PASSED = "its expiration passed"  # what a history says of it
MUCH_LATER = timedelta(minutes=1)  # what is due so long after it was made is told so

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
CLAIMED = (  # what a leasing statement returns, in this order
    *("due_at", "id", "first_due_at", "expired", "attempts", "starts", "isolated"),
    *_KEPT,
)

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
    return remade(
        routing_key,
        body,
        content_type,
        json.loads(headers) if headers else {},
        key,
        (*json.loads(tracking_ids), message_id) if tracking_ids else (message_id,),
        created_at if created_at.tzinfo is UTC else as_utc(created_at),
        as_utc(expires_at) if expires_at else None,
        due_at,
    )


def as_attempts(rows: Sequence[Sequence[Any]]) -> tuple[list[Attempt], dict[int, Dead]]:
    """The attempts that claimed rows stand for, in their order, and by their ids those that nobody can attempt.

    Their starts are counted already, but for isolated ones. The rows hold CLAIMED by position, and what a statement
    tells beyond it: there are many of them, and names cost more than all the rest.
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
        except (TypeError, ValueError) as error:  # somebody else wrote this row
            dead[id] = Dead(Reason.UNDECODABLE, f"its row cannot be read: {error}")
    return attempts, dead


def as_dead_letter(row: Any) -> DeadLetter:
    """The dead letter that a row keeps."""
    return DeadLetter(
        id=row.id,
        message=as_message(row),
        queue=row.destination or None,
        reason=Reason(row.reason),
        error=row.error,
        attempt_count=row.attempts,
        crash_count=max(0, row.starts - row.attempts),
        history=row.history or "",
        died_at=as_utc(row.died_at),
    )


def as_stored(row: Any, now: datetime) -> StoredMessage:
    """A message where it is now."""
    leased_until = as_utc(row.lease_until) if row.lease_until else None
    leased = leased_until is not None and leased_until > now
    return StoredMessage(
        row_id=row.id,
        message=as_message(row),
        state=_state(row),
        queue=row.destination or None,
        due_at=as_utc(row.due_at),
        routed_at=as_utc(row.routed_at) if row.routed_at else None,
        leased_until=leased_until if leased else None,
        done_at=as_utc(row.done_at) if row.done_at else None,
        attempt_count=row.attempts,
        crash_count=max(0, row.starts - row.attempts - leased),
        history=row.history or "",
        timer_id=row.timer_id,
    )


def as_stored_dead_letter(row: Any) -> StoredMessage:
    """A dead letter, told as the end of its message's walk."""
    return StoredMessage(
        row_id=row.id,
        message=as_message(row),
        state="dead",
        queue=row.destination or None,
        due_at=as_utc(row.due_at),
        routed_at=as_utc(row.routed_at) if row.routed_at else None,
        leased_until=None,
        done_at=as_utc(row.died_at),
        attempt_count=row.attempts,
        crash_count=max(0, row.starts - row.attempts),
        history=row.history or "",
        timer_id=row.timer_id,
        reason=row.reason,
        error=row.error,
    )


def history_line(what: str, error: str) -> str:
    """One line of a message's history: when, what, why. The clock is this process's, for people only."""
    first_line = next(iter(error.splitlines()), "")
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {what}: {first_line[:1000]}\n"


def as_utc(value: datetime) -> datetime:
    """Databases without time zones keep UTC; drivers with them answer in the session's."""
    if value.tzinfo is UTC:
        return value
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def as_seconds(delay: timedelta) -> float:
    """Durations go to the database as seconds, and it adds them to its own clock."""
    return delay.total_seconds()


def _state(row: Any) -> str:
    if row.done_at:
        return "sent"
    if row.destination == NOT_ROUTED:
        return "unroutable" if row.unroutable else "waiting"
    return "retrying" if row.attempts else "delivered"
