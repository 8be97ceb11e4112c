"""Looks: questions about what lies in a store. They change nothing."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Table, case, func, select

from outbox.core.durations import LONGEST
from outbox.core.errors import ConfigurationError
from outbox.core.store import Backlog, Circuit, QueueBacklog, StoredMessage
from outbox.stores import circuits
from outbox.stores.rows import as_stored, as_stored_dead_letter, as_utc
from outbox.stores.tables import NOT_ROUTED

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

STATES = ("waiting", "unroutable", "delivered", "retrying", "sent")


def backlog(store: SqlStore, connection: Connection) -> Backlog:
    """How much lies where."""
    by_destination = {row.destination: row for row in connection.execute(_counts(store))}
    dead = _dead(store, connection, "destination")
    reasons = _dead(store, connection, "reason")
    waiting = by_destination.get(NOT_ROUTED)
    queues = _queues(store, connection, by_destination, dead)
    ages = [row.oldest for row in by_destination.values() if row.oldest is not None]
    return Backlog(
        waiting=waiting.open - waiting.unroutable if waiting else 0,
        due=waiting.due if waiting else 0,
        oldest=age(max(ages)) if ages else None,
        leased=sum(row.leased for row in by_destination.values()),
        unroutable=waiting.unroutable if waiting else 0,
        sent=sum(row.sent for row in by_destination.values()),
        dead=sum(dead.values()),
        dead_by_reason=reasons,
        rows_written=store.rows_written(connection),
        queues=queues,
        circuits=_circuits(store, connection, queues),
    )


def messages(
    store: SqlStore, connection: Connection, state: str | None, queue: str | None, limit: int, after: int
) -> list[StoredMessage]:
    """Messages in the order of their rows, dead letters left out."""
    columns = store.messages.c
    statement = select(*readable(store, store.messages)).where(columns.id > after).order_by(columns.id).limit(limit)
    if state is not None:
        statement = statement.where(_in_state(store, state))
    if queue is not None:
        statement = statement.where(columns.destination == queue)
    now = database_time(store, connection)
    return [as_stored(row, now) for row in connection.execute(statement)]


def find(store: SqlStore, connection: Connection, message_id: str) -> list[StoredMessage]:
    """Every place where a message is."""
    live = select(*readable(store, store.messages)).where(store.messages.c.message_id == message_id)
    dead_letters = store.tables.dead_letters
    dead = select(*readable(store, dead_letters)).where(dead_letters.c.message_id == message_id)
    now = database_time(store, connection)
    found = [as_stored(row, now) for row in connection.execute(live.order_by(store.messages.c.id))]
    return found + [as_stored_dead_letter(row) for row in connection.execute(dead)]


def readable(store: SqlStore, table: Table) -> list[ColumnElement[Any]]:
    """All columns of a table, for rows that another program may have written."""
    return [store.readable(column).label(column.name) for column in table.c]


def _counts(store: SqlStore) -> Any:
    columns = store.messages.c
    is_open = columns.done_at.is_(None)
    is_due = is_open & (columns.due_at <= store.now()) & ~columns.unroutable
    return select(
        columns.destination,
        _count(is_open).label("open"),
        _count(is_due).label("due"),
        _count(is_open & columns.unroutable).label("unroutable"),
        _count(is_open & (columns.lease_until > store.now())).label("leased"),
        _count(is_open & (columns.attempts == 0)).label("fresh"),
        _count(columns.done_at.is_not(None)).label("sent"),
        func.max(case((is_due, -store.seconds_until(columns.due_at)))).label("oldest"),
    ).group_by(columns.destination)


def _dead(store: SqlStore, connection: Connection, by: str) -> dict[str, int]:
    column = store.tables.dead_letters.c[by]
    rows = connection.execute(select(column, func.count()).group_by(column).order_by(column))
    return {row[0]: row[1] for row in rows}


def _queues(
    store: SqlStore, connection: Connection, counts: dict[str, Any], dead: dict[str, int]
) -> tuple[QueueBacklog, ...]:
    table = store.tables.bindings
    binding_keys: defaultdict[str, list[str]] = defaultdict(list)
    for queue, binding_key in connection.execute(select(table.c.queue, table.c.binding_key).order_by(*table.c)):
        binding_keys[queue].append(binding_key)
    queues = []
    for queue in sorted({*binding_keys, *counts, *dead} - {NOT_ROUTED}):
        row = counts.get(queue)
        queues.append(
            QueueBacklog(
                queue=queue,
                binding_keys=tuple(binding_keys.get(queue, ())),
                delivered=row.fresh if row else 0,
                retrying=row.open - row.fresh if row else 0,
                leased=row.leased if row else 0,
                dead=dead.get(queue, 0),
                oldest=age(row.oldest) if row and row.oldest is not None else None,
            )
        )
    return tuple(queues)


def age(seconds: float) -> timedelta:
    """For people: a row of another program may be due since ever."""
    return timedelta(seconds=min(float(seconds), LONGEST.total_seconds()))


def _circuits(store: SqlStore, connection: Connection, queues: tuple[QueueBacklog, ...]) -> tuple[Circuit, ...]:
    """Those of destinations that still get messages, or have some: of a route that was removed nobody asks any more."""
    asked = {queue.queue for queue in queues if queue.binding_keys or queue.delivered or queue.retrying}
    return tuple(each for each in circuits.read(store, connection) if each.destination in (None, *asked))


def _in_state(store: SqlStore, state: str) -> ColumnElement[bool]:
    columns = store.messages.c
    is_open, is_routed = columns.done_at.is_(None), columns.destination != NOT_ROUTED
    states = {
        "waiting": is_open & ~is_routed & ~columns.unroutable,
        "unroutable": is_open & ~is_routed & columns.unroutable,
        "delivered": is_open & is_routed & (columns.attempts == 0),
        "retrying": is_open & is_routed & (columns.attempts > 0),
        "sent": columns.done_at.is_not(None),
    }
    if state not in states:
        raise ConfigurationError(f"no state is called {state!r}: one of {', '.join(STATES)}")
    return states[state]


def database_time(store: SqlStore, connection: Connection) -> datetime:
    """What the database's clock says."""
    now: Any = connection.scalar(select(store.now()))
    return as_utc(datetime.fromisoformat(now) if isinstance(now, str) else now)


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
