"""Without: each fast path, and how it is switched off from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Executable

from outbox.core.message import Message
from outbox.core.store import Selection
from outbox.stores import rows
from outbox.stores.postgresql import selecting, wakeup
from outbox.stores.postgresql.connection import DirectConnection
from outbox.stores.postgresql.runner import PostgresqlRunner
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


def straight_to_one() -> None:
    """Each queue's room is counted, also where there is one queue alone."""
    told = SqlRouting._straight

    def with_a_second_queue(self: SqlRouting, *given: Any) -> Any:
        route = told(self, *given)
        return route and replace(route, rooms={**route.rooms, " no queue": 0})

    Patched(SqlRouting, "_straight", with_a_second_queue)


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


def fetch() -> None:
    """Rows are read through SQLAlchemy."""

    def through_sqlalchemy(
        self: PostgresqlRunner, connection: Connection, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        return connection.execute(statement, parameters).all()

    Patched(PostgresqlRunner, "fetch", through_sqlalchemy)


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
    "one queue": straight_to_one,
    "direct connection": direct,
    "questions": questions,
    "rows by position": fetch,
    "scan position": scan,
    "slots of messages": remade,
    "eager notification": begin,
}
