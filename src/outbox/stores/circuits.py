"""SqlCircuits: how destinations are, in a table that all relays share. Every change asks how it was before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, func, literal, null, select, update

from outbox.core.dead_letter import clean
from outbox.core.durations import NO_DELAY
from outbox.core.store import Circuit, CircuitState
from outbox.stores.dialect import SqlDialect
from outbox.stores.rows import as_seconds
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, Tables


class SqlCircuits:
    """A row for each destination that once did not answer."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner) -> None:
        self._table = tables.circuits
        self._dialect = dialect
        self._runner = runner

    async def all(self) -> list[Circuit]:
        return await self._runner.look(self.read)

    def read(self, connection: Connection) -> list[Circuit]:
        """All that are known."""
        columns = self._table.c
        remaining = self._dialect.seconds_until(columns.paused_until).label("remaining")
        refusing = self._dialect.seconds_until(columns.refusing_since).label("refusing")
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

    async def open(
        self, destination: str | None, pause: timedelta, error: str, *, probe: int | None = None, refusing: bool = False
    ) -> bool:
        """No relay asks before the pause is over. The second relay with the same news changes nothing."""
        table, name = self._table, destination or NOT_ROUTED
        closed = {"destination": name, "state": CircuitState.CLOSED.value, "failures": 0, "error": ""}
        ours = table.c.state == CircuitState.CLOSED.value
        if probe is not None:
            ours = (table.c.state == CircuitState.PROBING.value) & (table.c.failures == probe)
        since = {"refusing_since": func.coalesce(table.c.refusing_since, self._dialect.clock())} if refusing else {}
        opened = (
            update(table)
            .where(table.c.destination == name, ours)
            .values(
                state=CircuitState.OPEN.value,
                failures=table.c.failures + 1,
                paused_until=self._in(pause),
                error=clean(error),
                **since,
            )
        )

        def work(connection: Connection) -> bool:
            self._dialect.enter(connection, self._dialect.ignoring(table), closed)
            return connection.execute(opened).rowcount > 0

        return await self._runner.transact(work)

    async def probe(self, destination: str | None, lease: timedelta) -> int | None:
        """One of many gets it. A prober that never came back counts as one more failure, which fences its late word."""
        table, name = self._table, destination or NOT_ROUTED
        free = self._dialect.locking(
            select(table.c.state, table.c.failures).where(
                table.c.destination == name,
                table.c.state != CircuitState.CLOSED.value,
                table.c.paused_until <= self._dialect.clock(),
            ),
            table,
        )

        def work(connection: Connection) -> int | None:
            found = connection.execute(free).first()
            if found is None:
                return None
            abandoned = found.state == CircuitState.PROBING.value
            failures: int = found.failures + abandoned
            taken = {"state": CircuitState.PROBING.value, "failures": failures, "paused_until": self._in(lease)}
            connection.execute(update(table).where(table.c.destination == name).values(taken))
            return failures

        return await self._runner.transact(work)

    async def close(self, destination: str | None, *, refusing: bool = False) -> bool:
        return await self._runner.apply(
            lambda connection: self.closed(connection, destination or NOT_ROUTED, refusing=refusing)
        )

    def closed(self, connection: Connection, destination: str, *, refusing: bool = False) -> bool:
        """An answer counts, whichever relay got it."""
        table = self._table
        news: ColumnElement[bool] = table.c.state != CircuitState.CLOSED.value
        values: dict[str, Any] = {
            "state": CircuitState.CLOSED.value,
            "failures": 0,
            "paused_until": null(),
            "error": "",
        }
        if not refusing:
            news |= table.c.refusing_since.is_not(None)
            values["refusing_since"] = null()
        closed = update(table).where(table.c.destination == destination, news).values(values)
        return connection.execute(closed).rowcount > 0

    def _in(self, delay: timedelta) -> ColumnElement[Any]:
        return self._dialect.later(self._dialect.clock(), literal(as_seconds(delay), Float))
