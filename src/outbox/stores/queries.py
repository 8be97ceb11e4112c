"""SqlInspection: questions about what is in a store. They change nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, case, func, select

from outbox.core.diagnosis import Claimable, Examination
from outbox.core.durations import LONGEST
from outbox.core.errors import ConfigurationError
from outbox.core.states import State
from outbox.core.store import IN_ROUTES, Backlog, Circuit, QueueBacklog, StoredMessage
from outbox.stores.circuits import SqlCircuits
from outbox.stores.dialect import SqlDialect
from outbox.stores.rows import as_shown, as_stored, as_stored_dead_letter, as_utc
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, Tables


class SqlInspection:
    """How many messages are where, which they are, and what the database says of itself."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner, circuits: SqlCircuits) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._circuits = circuits

    async def backlog(self) -> Backlog:
        return await self._runner.survey(self._backlog)

    async def list_messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]:
        """Messages in the order of their rows, dead letters left out."""
        columns = self._messages.c
        statement = self._readable(self._messages).where(columns.id > after).order_by(columns.id).limit(limit)
        if queue is not None:
            statement = statement.where(columns.destination == queue)
        chosen = None if state is None else _state(state)

        def work(connection: Connection) -> list[StoredMessage]:
            now, routes = database_time(self._dialect, connection), self._routes(connection)
            listed = statement if chosen is None else statement.where(self._in_state(chosen, routes))
            return [as_stored(row, now, routes) for row in connection.execute(listed)]

        return await self._runner.look(work)

    async def find(self, message_id: str) -> list[StoredMessage]:
        """Every place where a message is."""
        live = self._readable(self._messages).where(self._messages.c.message_id == message_id)
        dead_letters = self._tables.dead_letters
        dead = self._readable(dead_letters).where(dead_letters.c.message_id == message_id)

        def work(connection: Connection) -> list[StoredMessage]:
            now, routes = database_time(self._dialect, connection), self._routes(connection)
            found = [as_stored(row, now, routes) for row in connection.execute(live.order_by(self._messages.c.id))]
            return found + [as_stored_dead_letter(row) for row in connection.execute(dead)]

        return await self._runner.survey(work)

    async def claimable(self) -> list[Claimable]:
        """What lies for each destination, and who holds it."""
        columns, now = self._messages.c, self._dialect.now()
        left = self._dialect.seconds_until(columns.lease_until)
        leased, expired = columns.lease_until > now, columns.lease_until <= now
        free = self._due & (columns.lease_until.is_(None) | expired)
        statement = (
            select(
                columns.destination,
                _count(free).label("due"),
                self._longest_due(free).label("overdue"),
                _count(leased).label("leased"),
                func.min(case((leased, left))).label("next_end"),
                _count(expired).label("expired"),
                func.max(case((expired, -left))).label("expired_for"),
                *self._retried(columns.attempts > 0),
            )
            .where(columns.done_at.is_(None))
            .group_by(columns.destination)
            .order_by(columns.destination)
        )
        rows = await self._runner.look(lambda connection: connection.execute(statement).all())
        return [
            Claimable(
                queue=as_shown(row.destination) or None,
                due=row.due,
                overdue=_age(row.overdue),
                leased=row.leased,
                next_end=_age(row.next_end),
                expired=row.expired,
                expired_for=_age(row.expired_for),
                retried=row.retried,
                retried_for=_age(row.retried_for),
            )
            for row in rows
        ]

    async def examine(self) -> Examination:
        return await self._runner.inspect(self._examine)

    def _examine(self, connection: Connection) -> Examination:
        """What the database says of itself."""
        return Examination(
            server=self._dialect.server(connection),
            skew=skew(self._dialect, connection),
            findings=tuple(self._dialect.findings(connection, self._tables)),
            largest_body=self._dialect.largest_body(connection),
        )

    def _backlog(self, connection: Connection) -> Backlog:
        by_destination = {as_shown(row.destination): row for row in connection.execute(self._counts())}
        dead = self._dead(connection, "destination")
        reasons = self._dead(connection, "reason")
        waiting = by_destination.get(NOT_ROUTED)
        queues = self._queues(connection, by_destination, dead)
        ages = [row.oldest for row in by_destination.values() if row.oldest is not None]
        by_relays = {NOT_ROUTED, *self._routes(connection)}
        return Backlog(
            waiting=waiting.open - waiting.unroutable if waiting else 0,
            due=waiting.due if waiting else 0,
            refused=waiting.retried if waiting else 0,
            refused_for=_age(waiting.retried_for) if waiting else None,
            oldest=_age(max(ages, default=None)),
            leased=sum(row.leased for row in by_destination.values()),
            unroutable=waiting.unroutable if waiting else 0,
            sent=sum(row.done for queue, row in by_destination.items() if queue in by_relays),
            handled=sum(row.done for queue, row in by_destination.items() if queue not in by_relays),
            dead=sum(dead.values()),
            dead_by_reason=reasons,
            rows_written=self._dialect.rows_written(connection, self._tables),
            queues=queues,
            circuits=self._asked_circuits(connection, queues),
        )

    def _counts(self) -> Select[Any]:
        columns = self._messages.c
        is_open = columns.done_at.is_(None)
        is_due = is_open & self._due
        return select(
            columns.destination,
            _count(is_open).label("open"),
            _count(is_due).label("due"),
            _count(is_open & columns.unroutable).label("unroutable"),
            _count(is_open & (columns.lease_until > self._dialect.now())).label("leased"),
            _count(is_open & (columns.attempts == 0)).label("fresh"),
            _count(columns.done_at.is_not(None)).label("done"),
            self._longest_due(is_due).label("oldest"),
            *self._retried(is_open & (columns.attempts > 0)),
        ).group_by(columns.destination)

    @property
    def _due(self) -> ColumnElement[bool]:
        columns = self._messages.c
        return (columns.due_at <= self._dialect.now()) & ~columns.unroutable

    def _longest_due(self, condition: ColumnElement[bool]) -> ColumnElement[Any]:
        """For how many seconds the oldest of these has been due."""
        return func.max(case((condition, -self._dialect.seconds_until(self._messages.c.due_at))))

    def _retried(self, condition: ColumnElement[bool]) -> tuple[ColumnElement[Any], ...]:
        """How many were tried in vain, and for how many seconds the oldest of them has waited. A retry is due later."""
        columns = self._messages.c
        waited = -self._dialect.seconds_until(func.coalesce(columns.first_due_at, columns.due_at))
        return _count(condition).label("retried"), func.max(case((condition, waited))).label("retried_for")

    def _dead(self, connection: Connection, by: str) -> dict[str, int]:
        column = self._tables.dead_letters.c[by]
        rows = connection.execute(select(column, func.count()).group_by(column).order_by(column))
        return {as_shown(row[0]): row[1] for row in rows}

    def _queues(self, connection: Connection, counts: dict[str, Any], dead: dict[str, int]) -> tuple[QueueBacklog, ...]:
        table = self._tables.bindings
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
                    queued=row.fresh if row else 0,
                    retrying=row.open - row.fresh if row else 0,
                    leased=row.leased if row else 0,
                    dead=dead.get(queue, 0),
                    oldest=_age(row.oldest) if row else None,
                )
            )
        return tuple(queues)

    def _asked_circuits(self, connection: Connection, queues: tuple[QueueBacklog, ...]) -> tuple[Circuit, ...]:
        """Those of destinations that still get messages, or have some: a route that was removed is not asked."""
        asked = {queue.queue for queue in queues if queue.binding_keys or queue.queued or queue.retrying}
        return tuple(each for each in self._circuits.read(connection) if each.destination in (None, *asked))

    def _routes(self, connection: Connection) -> frozenset[str]:
        """The queues that are emptied by relays, if the table belongs to an outbox with routes."""
        state, bindings = self._tables.state, self._tables.bindings
        has_routes = select(state.c.id).where(state.c.id == 1, state.c.transport == IN_ROUTES).exists()
        return frozenset(connection.scalars(select(bindings.c.queue).where(has_routes).distinct()))

    def _in_state(self, state: State, routes: Collection[str]) -> ColumnElement[bool]:
        columns = self._messages.c
        is_open, is_routed = columns.done_at.is_(None), columns.destination != NOT_ROUTED
        by_relays = columns.destination.in_([NOT_ROUTED, *sorted(routes)])
        return {
            State.WAITING: is_open & ~is_routed & ~columns.unroutable,
            State.UNROUTABLE: is_open & ~is_routed & columns.unroutable,
            State.QUEUED: is_open & is_routed & (columns.attempts == 0),
            State.RETRYING: is_open & is_routed & (columns.attempts > 0),
            State.SENT: ~is_open & by_relays,
            State.HANDLED: ~is_open & ~by_relays,
        }[state]

    def _readable(self, table: Table) -> Select[Any]:
        return select(*readable(self._dialect, table))


def readable(dialect: SqlDialect, table: Table) -> list[ColumnElement[Any]]:
    """All columns of a table, for rows that another program may have written."""
    return [column.label(name) for name, column in dialect.readable_columns(table).items()]


def skew(
    dialect: SqlDialect, connection: Connection, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> timedelta:
    """By how much the database's clock is ahead of ours, at least: the question takes its time too."""
    before = clock()
    theirs = database_time(dialect, connection)
    after = clock()
    return max(theirs - after, timedelta(0)) + min(theirs - before, timedelta(0))


def database_time(dialect: SqlDialect, connection: Connection) -> datetime:
    """What the database's clock says."""
    now: Any = connection.scalar(select(dialect.now()))
    return as_utc(datetime.fromisoformat(now) if isinstance(now, str) else now)


def _state(name: str) -> State:
    try:
        return State(name)
    except ValueError:
        raise ConfigurationError(f"no state is called {name!r}: one of {', '.join(State)}") from None


def _age(seconds: float | None) -> timedelta | None:
    """For people: a row of another program may be due since ever."""
    return None if seconds is None else timedelta(seconds=min(float(seconds), LONGEST.total_seconds()))


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count(case((condition, 1)))
