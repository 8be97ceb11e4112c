"""Without: each fast path, and how it is switched off from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Executable

from outbox.core.message import Message
from outbox.core.store import Selection
from outbox.stores import rows
from outbox.stores.postgresql import selecting, wakeup
from outbox.stores.postgresql.connection import DirectConnection
from outbox.stores.postgresql.selecting import PostgresqlSelecting
from outbox.stores.routing import SqlRouting
from outbox.transports.database import DatabaseConsumer
from outbox.transports.rabbitmq import envelope

Patched: Any = setattr  # methods are replaced here, which no type checker likes


def hand_over() -> None:
    """What is routed goes to the table, and is claimed from there."""
    Patched(DatabaseConsumer, "reserve", lambda self: None)


def straight() -> None:
    """What is routed for a worker is claimed by a second statement, in the transaction that routes it."""
    Patched(SqlRouting, "_straight", lambda self, *_: None)


def direct() -> None:
    """Statements that a message waits for go through the pool and SQLAlchemy, like all others."""

    async def ask(self: DirectConnection, statement: Executable, parameters: Mapping[str, Any]) -> Any:
        return await self._runner.apply(lambda connection: connection.execute(statement, parameters).all())

    Patched(DirectConnection, "ask", ask)


def questions() -> None:
    """A claim is made without asking first whether anything is due."""

    async def anything_due(self: PostgresqlSelecting, selection: Selection) -> bool:
        return True

    Patched(PostgresqlSelecting, "anything_due", anything_due)


def scan() -> None:
    """Every look begins at the beginning."""
    Patched(selecting, "SLOW", 1e9)


def remade() -> None:
    """Messages are made by their constructor."""

    def constructed(routing_key: str, body: bytes, *given: Any) -> Message:
        names = ("content_type", "headers", "key", "tracking_ids", "created_at", "expires_at", "due_at")
        return Message(routing_key=routing_key, body=body, **dict(zip(names, given, strict=True)))

    Patched(rows, "remade", constructed)
    Patched(envelope, "remade", constructed)


def begin() -> None:
    """A notification is begun when its loop comes to it, not at once."""
    Patched(wakeup, "begin", lambda coroutine: asyncio.get_running_loop().create_task(coroutine))


PATHS: Mapping[str, Callable[[], None]] = {
    "hand-over": hand_over,
    "one statement": straight,
    "direct connection": direct,
    "questions": questions,
    "scan position": scan,
    "slots of messages": remade,
    "eager notification": begin,
}
