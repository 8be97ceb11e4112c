"""Examination: what a doctor asks every SQL database alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, case, func, select

from outbox.core.diagnosis import Claimable, Examination
from outbox.stores.looks import age, database_time

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore


def examine(store: SqlStore, connection: Connection) -> Examination:
    """What the database says of itself."""
    return Examination(
        server=store.server(connection),
        skew=skew(store, connection),
        findings=tuple(store.findings(connection)),
    )


def skew(
    store: SqlStore, connection: Connection, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> timedelta:
    """By how much the database's clock is ahead of ours, at least: the question takes its time too."""
    before = clock()
    theirs = database_time(store, connection)
    after = clock()
    return max(theirs - after, timedelta(0)) + min(theirs - before, timedelta(0))


def claimable(store: SqlStore, connection: Connection) -> list[Claimable]:
    """What lies for each destination, and who holds it."""
    columns = store.messages.c
    until = columns.lease_until
    leased, expired = until > store.now(), until <= store.now()
    free = (columns.due_at <= store.now()) & (until.is_(None) | expired) & ~columns.unroutable
    left, due_in = store.seconds_until(until), store.seconds_until(columns.due_at)
    statement = (
        select(
            columns.destination,
            _count(free).label("due"),
            func.max(case((free, -due_in))).label("overdue"),
            _count(leased).label("leased"),
            func.min(case((leased, left))).label("next_end"),
            _count(expired).label("expired"),
            func.max(case((expired, -left))).label("expired_for"),
        )
        .where(columns.done_at.is_(None))
        .group_by(columns.destination)
        .order_by(columns.destination)
    )
    return [
        Claimable(
            queue=row.destination or None,
            due=row.due,
            overdue=_duration(row.overdue),
            leased=row.leased,
            next_end=_duration(row.next_end),
            expired=row.expired,
            expired_for=_duration(row.expired_for),
        )
        for row in connection.execute(statement)
    ]


def recorded_transport(store: SqlStore, connection: Connection) -> str | None:
    """The transport that the table belongs to; None if nobody has used it yet."""
    state = store.tables.state
    found: str | None = connection.scalar(select(state.c.transport).where(state.c.id == 1))
    return found


def _count(condition: ColumnElement[Any]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else age(seconds)
