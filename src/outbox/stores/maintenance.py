"""SqlMaintenance: the tables themselves, whose they are, and what is removed from them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Select, String, Text, literal, select, update

from outbox.core.attempt import Reason
from outbox.core.kept_property import kept_property
from outbox.core.store import TRANSPORT, Difference
from outbox.stores.burying import SqlBurying
from outbox.stores.circuits import SqlCircuits
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import unleased, with_line
from outbox.stores.owners import SqlOwners
from outbox.stores.rows import EXPIRATION_PASSED, history_line
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.wakeup import Wakeup

PART = 10_000  # messages that one transaction lets be tried anew


class SqlMaintenance:
    """Makes tables, records the transport, deletes what is over."""

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        runner: Runner,
        *,
        burying: SqlBurying,
        circuits: SqlCircuits,
        owners: SqlOwners,
        wakeup: Wakeup,
    ) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._burying = burying
        self._circuits = circuits
        self._owners = owners
        self._wakeup = wakeup

    async def create_tables(self) -> None:
        await self._runner.create_tables()

    async def has_tables(self) -> bool:
        return await self._runner.has_tables()

    async def check_tables(self) -> list[Difference]:
        return await self._runner.inspect(lambda connection: self._dialect.differences(connection, self._tables))

    async def recorded_transport(self) -> str | None:
        return await self._runner.look(self._transport)

    async def record_transport(self, name: str, *, switch: bool = False) -> str:
        def work(connection: Connection) -> str:
            make_state(connection, self._tables, self._dialect)
            state = self._tables.state
            ours = update(state).where(state.c.id == 1)
            connection.execute((ours if switch else ours.where(state.c.transport.is_(None))).values(transport=name))
            if switch:
                self._circuits.closed(connection, NOT_ROUTED)
                self._owners.released(connection, TRANSPORT)
            return str(self._transport(connection))

        if switch:
            await self._try_anew()
        return await self._runner.transact(work)

    def _transport(self, connection: Connection) -> str | None:
        """The transport that the table belongs to; None if no process has used it yet."""
        state = self._tables.state
        found: str | None = connection.scalar(select(state.c.transport).where(state.c.id == 1))
        return found

    async def purge(self, keep: timedelta, limit: int) -> int:
        columns = self._messages.c
        old = select(columns.id).where(columns.done_at < self._dialect.ago(keep)).order_by(columns.done_at).limit(limit)
        chosen = self._dialect.skipping_locked(old)

        def work(connection: Connection) -> int:
            ids = connection.execute(chosen).scalars().all()
            return connection.execute(self._delete, {"ids": self._dialect.listed(ids)}).rowcount if ids else 0

        return await self._runner.transact(work)

    async def expire(self, limit: int) -> int:
        columns = self._messages.c
        past = columns.expires_at <= self._dialect.now()
        line = literal(history_line("given up", EXPIRATION_PASSED), Text)
        chosen = self._dialect.skipping_locked(
            select(
                columns.id,
                literal(Reason.EXPIRED.value, String).label("reason"),
                literal("", Text).label("error"),
                columns.attempts,
                columns.starts,
                with_line(self._dialect, columns.history, line).label("history"),
            )
            .where(past, self._waits())
            .order_by(columns.expires_at)
            .limit(limit)
        )
        return len(await self._runner.transact(lambda connection: self._burying.bury(connection, chosen, {})))

    def _waits(self) -> ColumnElement[bool]:
        """Whether a message waits in the table, and no relay and no worker has it."""
        return self._messages.c.done_at.is_(None) & unleased(self._messages, self._dialect.now())

    async def _try_anew(self) -> None:
        """Let what was refused or found no queue be due at once, as if it had not been tried."""

        def work(connection: Connection) -> int:
            ids = connection.execute(self._tried).scalars().all()
            if ids:
                connection.execute(self._anew, {"ids": self._dialect.listed(ids)})
            return len(ids)

        while await self._runner.transact(work):
            pass  # in parts: there may be millions
        self._wakeup.announce(None)

    @kept_property
    def _tried(self) -> Select[Any]:
        columns = self._messages.c
        tried = (columns.destination == NOT_ROUTED) & columns.done_at.is_(None) & (columns.attempts > 0)
        return self._dialect.skipping_locked(select(columns.id).where(tried).order_by(columns.id).limit(PART))

    @kept_property
    def _anew(self) -> Executable:
        again = self._dialect.update(self._messages).where(self._dialect.among(self._messages.c.id, "ids"))
        return again.values(due_at=self._dialect.clock(), attempts=0, starts=0, unroutable=False)

    @kept_property
    def _delete(self) -> Executable:
        return self._dialect.delete(self._messages).where(self._dialect.among(self._messages.c.id, "ids"))


def make_state(connection: Connection, tables: Tables, dialect: SqlDialect) -> None:
    """Make the first row of the state table if it is missing: migrations make tables, not rows."""
    dialect.enter(connection, dialect.ignoring(tables.state), {"id": 1, "bindings_version": 0})
