"""PostgresqlCallers: callers' connections to PostgreSQL, and where the tables are that their messages belong to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Float,
    Table,
    Text,
    cast,
    column,
    func,
    literal,
    select,
    table,
)
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool
from sqlalchemy.util import await_only

from outbox.core.errors import WrongDatabase
from outbox.core.prepared import SchemaNames, dialect_for, prepare
from outbox.core.reaching import REFUSED, sql_state
from outbox.core.store import Rows
from outbox.stores.callers import CallerConnections, execute, naming, qualified
from outbox.stores.dialect import SqlDialect, tables_missing
from outbox.stores.postgresql.connection import explained
from outbox.stores.runner import spare
from outbox.stores.tables import Tables

# Places: the database and the schema in which the tables are, found once and then always written.
# A caller's connection may be set to look elsewhere, by a search_path or a schema_translate_map.

Result = TypeVar("Result")

ASK_WITHIN = 10.0  # seconds for asking where our own tables are, while a caller waits

_CLASSES = table(
    "pg_class", column("oid"), column("relname"), column("relnamespace"), column("xmin"), schema="pg_catalog"
)
_SCHEMAS = table("pg_namespace", column("oid"), column("nspname"), schema="pg_catalog")
_SETTINGS = table("pg_settings", column("name"), column("setting"), column("reset_val"), schema="pg_catalog")


@dataclass(frozen=True, slots=True)
class Place:
    """Where tables are in PostgreSQL."""

    database: str  # its name, and since when its server has run: other servers have databases of the same name
    schema: str | None

    @property
    def name(self) -> str:
        return self.database.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Found:
    """What a connection sees of the tables."""

    place: Place
    as_connected: bool  # its search_path is the one it began with
    settled: bool  # all tables are there, and not by this connection's own transaction, which may yet roll back


def find(connection: Connection, tables: Tables, schema: str | None = None) -> Found:
    """Look for the tables in a schema, or where a statement without a schema would find or make them."""
    names = [each.name for each in tables.metadata.sorted_tables]
    known = schema or tables.messages.schema
    where: ColumnElement[Any] = cast(known, Text) if known else _visible(tables)
    namespace = select(_SCHEMAS.c.oid).where(_SCHEMAS.c.nspname == where).scalar_subquery()
    named = _CLASSES.c.relname.in_([cast(name, Text) for name in names])
    present = select(func.count()).where(
        named, _CLASSES.c.relnamespace == namespace, func.pg_catalog.age(_CLASSES.c.xmin) > 0
    )
    search_path = _SETTINGS.c.name == cast("search_path", Text)
    unchanged = select(_SETTINGS.c.setting == _SETTINGS.c.reset_val).where(search_path)
    started = func.pg_catalog.pg_postmaster_start_time()
    # In whole microseconds: how a fraction is written depends on a setting of the connection.
    since = cast(func.pg_catalog.date_part("epoch", started) * cast(literal(1_000_000.0), Float), BigInteger)
    database = func.pg_catalog.concat(func.pg_catalog.current_database(), " ", since)
    row = connection.execute(select(database, where, unchanged.scalar_subquery(), present.scalar_subquery())).one()
    return Found(Place(row[0], row[1]), bool(row[2]), row[3] == len(names))


def _visible(tables: Tables) -> ColumnElement[Any]:
    named = _CLASSES.c.relname == cast(tables.messages.name, Text)
    holds = named & func.pg_catalog.pg_table_is_visible(_CLASSES.c.oid)
    held = select(_SCHEMAS.c.nspname).join(_CLASSES, _CLASSES.c.relnamespace == _SCHEMAS.c.oid).where(holds)
    return func.coalesce(held.scalar_subquery(), func.pg_catalog.current_schema())


class Places:
    """Where callers' statements belong, by the pool of their connection."""

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        given: AsyncEngine | None,
        look: Callable[[Callable[[Connection], Place]], Awaitable[Place]],
    ) -> None:
        self._tables = tables
        self._dialect = dialect
        self._given: Engine | None = None if given is None else given.sync_engine
        self._look = look  # on a connection of our own, before it is known where the tables are
        self._own: Place | None = None
        self._prepared: WeakKeyDictionary[Pool, str | None] = WeakKeyDictionary()

    def locate(self, engine: Engine) -> None:
        """Say by a plain engine where our own tables are, for a store that has no engine."""
        self._given = engine
        self._own = None
        self._prepared = WeakKeyDictionary()

    async def find_own(self) -> None:
        """Ask once where our own tables are."""
        if self._own is None:
            self._own = await self._asked_here()

    def on(self, connection: Connection) -> Connection:
        """A caller's connection, on which our statements name their schema. Tables that are missing are made first."""
        schemas = self.schemas_on(connection)
        return qualified(connection, dict(schemas)) if schemas else connection

    def schemas_on(self, connection: Connection) -> SchemaNames:
        """What our statements call their schema on a caller's connection. Tables that are missing are made first."""
        pool = connection.engine.pool
        schema = self._prepared[pool] if pool in self._prepared else self._prepare(connection)
        return () if schema is None else ((self._tables.messages.schema, schema),)

    def _prepare(self, callers: Connection) -> str | None:
        """Find the schema, and see that its tables are there.

        Missing ones are made on a connection beside the caller's: DDL could abort the caller's transaction. Where
        nothing is missing none is opened: a pooler whose callers all wait for one more connection has none left.
        """
        found = find(callers, self._tables, self._own.schema if self._own else None)
        schema = self._place_of(callers, found).schema
        if schema != found.place.schema:
            found = find(callers, self._tables, schema)
        if found.settled or self._made_beside(callers, schema):
            self._prepared[callers.engine.pool] = schema
        return schema

    def _made_beside(self, callers: Connection, schema: str | None) -> bool:
        """Make what is missing; not if the caller's own transaction does so: another connection would wait for it."""
        tables, own = self._tables, spare(callers.engine)
        missing: list[Table] = []
        try:
            with own.begin() as connection:
                missing = self._dialect.missing(connection, tables, schema)
                if missing:
                    if not self._dialect.missing(callers, tables, schema):
                        return False
                    named = connection.execution_options(**naming({tables.messages.schema: schema}))
                    self._dialect.create(named, tables, schema)
            return True
        except ProgrammingError as error:  # a producer's role may make none
            if tables.messages not in missing:
                return True  # one that a newer version has added is not its own
            if sql_state(error) != REFUSED:
                raise
            raise tables_missing(tables, "this role may not make it") from None
        finally:
            own.dispose()

    def _place_of(self, callers: Connection, found: Found) -> Place:
        """Where a caller's messages belong: in our own tables, whatever its search_path says, or nowhere."""
        if self._given is None:
            return self._as_connected(callers, found)
        if self._own is None:
            ours = callers.engine.pool is self._given.pool
            self._own = self._as_connected(callers, found) if ours else self._asked(callers) or found.place
        if found.place.database != self._own.database:
            self._own = self._asked(callers) or self._own  # its server may have been started again meanwhile
        if found.place.database != self._own.database:
            raise WrongDatabase(
                f"this session leads to the database {found.place.name!r}, and the tables of this outbox are in "
                f"{self._own.name!r}, or on another server. Use a session on the database of the outbox, or an Outbox "
                "for each database"
            )
        return self._own

    def _as_connected(self, callers: Connection, found: Found) -> Place:
        """What a connection of the caller's engine sees before anybody sets its search_path."""
        if found.as_connected:
            return found.place
        own = spare(callers.engine)
        try:
            with own.connect() as connection:
                return find(connection, self._tables).place
        finally:
            own.dispose()

    def _asked(self, callers: Connection) -> Place | None:
        """Where our own tables are, asked on a connection of our own; none if there is no answer."""
        assert self._given is not None  # noqa: S101 - the caller has checked it
        try:
            if not self._given.dialect.is_async:
                asking = _in_thread(self._asked_plainly)
                return await_only(asking) if callers.dialect.is_async else _apart(asking)
            return await_only(self._asked_here()) if callers.dialect.is_async else _apart(self._asked_apart())
        except Exception:  # noqa: BLE001 - emit needs the caller's connection and no other
            return None

    async def _asked_here(self) -> Place:
        async with asyncio.timeout(ASK_WITHIN):
            return await self._look(lambda connection: find(connection, self._tables).place)

    async def _asked_apart(self) -> Place:
        """The same on an event loop of its own, whose connections no other loop may use."""
        assert self._given is not None  # noqa: S101 - the caller has checked it
        engine = AsyncEngine(spare(self._given))
        try:
            async with asyncio.timeout(ASK_WITHIN), engine.connect() as connection:
                return (await connection.run_sync(find, self._tables)).place
        finally:
            await engine.dispose()

    def _asked_plainly(self) -> Place:
        assert self._given is not None  # noqa: S101 - the caller has checked it
        engine = spare(self._given)
        try:
            with engine.connect() as connection:
                return find(connection, self._tables).place
        finally:
            engine.dispose()


async def _in_thread(ask: Callable[[], Place]) -> Place:
    """A plain driver may wait for its server for very long. The thread is left to itself then."""
    answer: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def work() -> None:
        try:
            found: Place | BaseException = ask()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            found = error
        with suppress(RuntimeError):  # nothing waits for it any more
            loop.call_soon_threadsafe(_tell, answer, found)

    threading.Thread(target=work, name="outbox-ask", daemon=True).start()
    async with asyncio.timeout(ASK_WITHIN):
        return await answer


def _tell(answer: asyncio.Future[Place], found: Place | BaseException) -> None:
    if answer.done():
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _apart(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work for a caller without an event loop, or one that blocks its own."""
    with ThreadPoolExecutor(1, thread_name_prefix="outbox-ask") as executor:
        return executor.submit(asyncio.run, work).result()


# A message costs its caller one statement. SQLAlchemy looks for the compiled form of a statement and writes its schema
# into it at each execution: for these drivers that is done once, as it is for a connection of the driver's own.
_PARAMSTYLES = {"asyncpg": "numeric_dollar", "psycopg": "format"}


class PostgresqlCallers(CallerConnections):
    """Statements name the schema in which the tables were found."""

    def __init__(self, places: Places, *, remember_engine: bool) -> None:
        self._places = places
        self._remember_engine = remember_engine
        self.engine: ref[Engine] | None = None  # a plain engine by which messages came, where there is no other

    def on(self, connection: Connection) -> Connection:
        return self._places.on(connection)

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        if self._remember_engine and not connection.dialect.is_async and (self.engine is None or not self.engine()):
            self.engine = ref(connection.engine)
        driver = connection.dialect.driver
        with explained(driver):
            if driver not in _PARAMSTYLES or rows is None or len(rows) != 1:
                return execute(self.on(connection), statement, rows)
            [row] = rows
            dialect = dialect_for(f"postgresql.{driver}", _PARAMSTYLES[driver])
            prepared = prepare(statement, tuple(row), dialect, self._places.schemas_on(connection))
            return connection.exec_driver_sql(prepared.text, prepared.parameters(row)).rowcount
