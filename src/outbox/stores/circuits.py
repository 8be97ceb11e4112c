"""Circuits: how destinations are, in a table that all relays share. Every change asks how it was before."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Float, case, func, literal, null, select, update

from outbox.core.dead_letter import clean
from outbox.core.durations import NO_DELAY
from outbox.core.store import Circuit, CircuitState
from outbox.stores.rows import as_seconds

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore


def read(store: SqlStore, connection: Connection) -> list[Circuit]:
    """All that are known."""
    columns = store.tables.circuits.c
    remaining = store.seconds_until(columns.paused_until).label("remaining")
    refusing = store.seconds_until(columns.refusing_since).label("refusing")
    statement = select(columns.destination, columns.state, columns.failures, columns.error, remaining, refusing)
    return [
        Circuit(
            destination=row.destination or None,
            state=CircuitState(row.state),
            failures=row.failures,
            remaining=max(NO_DELAY, timedelta(seconds=float(row.remaining or 0))),
            error=row.error,
            refusing=None if row.refusing is None else timedelta(seconds=max(0.0, -float(row.refusing))),
        )
        for row in connection.execute(statement.order_by(columns.destination))
    ]


def open_circuit(
    store: SqlStore,
    connection: Connection,
    destination: str,
    pause: timedelta,
    error: str,
    probe: int | None,
    *,
    refusing: bool,
) -> bool:
    """Nobody asks before the pause is over. Whoever comes later than another with the same news changes nothing."""
    table = store.tables.circuits
    closed = {"destination": destination, "state": CircuitState.CLOSED.value, "failures": 0, "error": ""}
    connection.execute(store.ignoring(table), closed)
    ours = table.c.state == CircuitState.CLOSED.value
    if probe is not None:
        ours = (table.c.state == CircuitState.PROBING.value) & (table.c.failures == probe)
    since = {"refusing_since": func.coalesce(table.c.refusing_since, store.clock())} if refusing else {}
    opened = (
        update(table)
        .where(table.c.destination == destination, ours)
        .values(
            state=CircuitState.OPEN.value,
            failures=table.c.failures + 1,
            paused_until=_in(store, pause),
            error=clean(error),
            **since,
        )
    )
    return connection.execute(opened).rowcount > 0


def probe_circuit(store: SqlStore, connection: Connection, destination: str, lease: timedelta) -> int | None:
    """One of many gets it. A prober that never came back counts as one more failure, which fences its late word."""
    table = store.tables.circuits
    abandoned = case((table.c.state == CircuitState.PROBING.value, 1), else_=0)
    taken = (
        update(table)
        .where(
            table.c.destination == destination,
            table.c.state != CircuitState.CLOSED.value,
            table.c.paused_until <= store.clock(),
        )
        .values(state=CircuitState.PROBING.value, failures=table.c.failures + abandoned, paused_until=_in(store, lease))
        .returning(table.c.failures)
    )
    failures: int | None = connection.execute(taken).scalar()
    return failures


def close_circuit(store: SqlStore, connection: Connection, destination: str, *, refusing: bool = False) -> bool:
    """Whoever says so: an answer is an answer."""
    table = store.tables.circuits
    news: ColumnElement[bool] = table.c.state != CircuitState.CLOSED.value
    values: dict[str, Any] = {"state": CircuitState.CLOSED.value, "failures": 0, "paused_until": null(), "error": ""}
    if not refusing:
        news |= table.c.refusing_since.is_not(None)
        values["refusing_since"] = null()
    closed = update(table).where(table.c.destination == destination, news).values(values)
    return connection.execute(closed).rowcount > 0


def _in(store: SqlStore, delay: timedelta) -> ColumnElement[Any]:
    return store.later(store.clock(), literal(as_seconds(delay), Float))
