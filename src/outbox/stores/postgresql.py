"""PostgreSQL: leases in one statement, wake-ups by NOTIFY from a connection of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Float,
    FromClause,
    Insert,
    Row,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    func,
    insert,
    literal_column,
    not_,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.types import TypeEngine

from outbox.core.durations import Retention
from outbox.core.errors import ConfigurationError
from outbox.core.store import Rows
from outbox.stores.claims import BURIAL
from outbox.stores.notify import Notifier
from outbox.stores.sql import SqlStore
from outbox.stores.tables import MESSAGE_COLUMNS, Tables

Result = TypeVar("Result")

_SECOND: ColumnElement[Any] = literal_column("interval '1 second'")


class PostgresqlStore(SqlStore):
    """Messages in PostgreSQL, through asyncpg or psycopg."""

    async_drivers = ("asyncpg", "psycopg")
    sync_drivers = ("psycopg", "psycopg2")

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        super().__init__(tables, clean_up_after)
        self._given = engine
        self._own: AsyncEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prepared: WeakSet[Engine] = WeakSet()
        self._notifier = Notifier(self)

    @property
    def engine(self) -> AsyncEngine:
        """Connections of our own, made as the given engine makes its: listeners may use up the given pool."""
        loop = asyncio.get_running_loop()
        if self._own is None or self._loop is not loop:  # connections belong to the loop that made them
            if self._given is None:
                raise ConfigurationError(
                    "this needs an async database: call setup(db_engine_url=…) with an async driver"
                )
            own = AsyncEngine(spare(self._given.sync_engine))
            # Rows are locked and looked at anew: a stricter level, if the application likes one, would only fail.
            self._own, self._loop = own.execution_options(isolation_level="READ COMMITTED"), loop
        return self._own

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        async with self.engine.begin() as connection:
            return await connection.run_sync(work)

    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        async with self.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            return await connection.run_sync(work)

    _look = _apply

    async def close(self) -> None:
        await self._notifier.close()
        if self._own is not None:
            await self._own.dispose()
            self._own = None

    # The caller's connection.

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        if connection.engine not in self._prepared:
            self._prepare(connection.engine)
        return self.execute(connection, statement, rows)

    def _prepare(self, engine: Engine) -> None:
        """Make the tables on a connection beside the caller's: DDL could abort the caller's transaction."""
        own = spare(engine)
        try:
            with own.begin() as connection:
                self.create(connection)
        finally:
            own.dispose()
        self._prepared.add(engine)

    def create(self, connection: Connection) -> None:
        missing = [
            table
            for table in self.tables.metadata.sorted_tables
            if not connection.dialect.has_table(connection, table.name, schema=table.schema)
        ]
        if missing:  # a role that may not create is fine when there is nothing to create
            # Two processes that start at the same time: CREATE TABLE IF NOT EXISTS alone would collide.
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('outbox tables'))"))
            self.tables.metadata.create_all(connection)

    # Waking up.

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        await self._notifier.listen()
        await super().wait(longest, destination=destination)

    def announce(self, *destinations: str | None) -> None:
        super().announce(*destinations)
        if self._given is not None:
            self._notifier.notify(destinations)

    def heard(self, destination: str) -> None:
        """Another process has work for this destination."""
        self._wakeup.ring(destination)

    def heard_everything(self) -> None:
        """Nobody listened until now: there may be work for anybody."""
        self._wakeup.ring_all()

    # How PostgreSQL spells it.

    def now(self) -> ColumnElement[Any]:
        return func.now()

    def clock(self) -> ColumnElement[Any]:
        return func.clock_timestamp()

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        return moment + seconds * _SECOND

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        return cast(func.extract("epoch", moment - func.now()), Float)

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column == any_(bindparam(name, type_=ARRAY(BigInteger)))

    def listed(self, values: Sequence[Any]) -> Any:
        return list(values)

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        typed = [column(column_name, column_type) for column_name, column_type in columns.items()]
        rows = cast(bindparam(name, type_=Text), JSON)
        return func.json_to_recordset(rows).table_valued(*typed).render_derived(with_types=True)

    def ignoring(self, table: Table) -> Insert:
        # Without naming a constraint: naming one would ask for the right to read.
        return postgresql_insert(table).on_conflict_do_nothing()

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.right(text, length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement.with_for_update(skip_locked=True)

    def rows_written(self, connection: Connection) -> int:
        quoted = connection.dialect.identifier_preparer.format_table(self.messages)
        sequence = func.pg_get_serial_sequence(quoted, "id")
        return int(connection.scalar(select(func.pg_sequence_last_value(sequence))) or 0)

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        """One statement: whoever sees the row gone sees the dead letter."""
        messages, dead_letters = self.messages, self.tables.dead_letters
        said = [name for name in BURIAL if name != "id"]
        kept = [name for name in MESSAGE_COLUMNS if name not in BURIAL]
        chosen = statement.cte("chosen")
        gone = (
            delete(messages)
            .where(messages.c.id == chosen.c.id)
            .returning(messages.c.id, *(chosen.c[name] for name in said), *(messages.c[name] for name in kept))
            .cte("gone")
        )
        source = select(self.clock(), *(gone.c[name] for name in (*said, *kept)))
        buried = insert(dead_letters).from_select(["died_at", *said, *kept], source).cte("buried")
        return list(connection.execute(select(gone.c.id).add_cte(buried), parameters).scalars())

    # Claiming in one round trip.

    def _take(self, connection: Connection, wanted: Mapping[str, Any], lease: Mapping[str, Any]) -> list[Row[Any]]:
        return list(connection.execute(self._take_statement, {**wanted, **lease}).all())

    @cached_property
    def _take_statement(self) -> Any:
        found = self.due.cte("found")
        first = select(found.c.id, found.c.lease_until).limit(1).cte("first")
        first_id = select(first.c.id).scalar_subquery()
        first_is_suspect = select(first.c.lease_until.is_not(None)).scalar_subquery()
        # A message whose last start never ended is taken alone, so that it condemns no other if it kills again.
        chosen = select(found.c.id).where(
            case((first_is_suspect, found.c.id == first_id), else_=not_(found.c.lease_until.is_not(None)))
        )
        ids = func.array(chosen.scalar_subquery(), type_=ARRAY(BigInteger))
        return self.leasing(self.messages.c.id == any_(ids))


def spare(engine: Engine) -> Engine:
    """An engine that connects exactly as the given one, beside its pool: a full pool cannot block it."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
