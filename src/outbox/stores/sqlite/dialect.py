"""SqliteDialect: SQLite's own expressions, and what its driver knows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Float,
    FromClause,
    Insert,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    TypeDecorator,
    Uuid,
    bindparam,
    case,
    cast,
    event,
    func,
    literal_column,
    null,
    select,
    type_coerce,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Finding
from outbox.core.durations import LATEST, OLDEST
from outbox.core.errors import ConfigurationError, SnapshotConflict, TransactionError
from outbox.core.store import Difference
from outbox.core.transaction_state import TransactionState
from outbox.stores.dialect import SqlDialect
from outbox.stores.rows import as_utc
from outbox.stores.sqlite import examination
from outbox.stores.sqlite.engines import begin_first, files, in_memory, is_rolled_back, prepare, state_of
from outbox.stores.sqlite.schema_check import SqliteCheck
from outbox.stores.tables import PartialIndexes, Tables

_FORMAT = "%Y-%m-%d %H:%M:%f000"  # as SQLAlchemy writes datetimes: fixed width, so that text order is time order
_CONFLICTS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class SqliteDialect(PartialIndexes, SqlDialect):
    """SQLite's words."""

    connections_can_die = False

    def now(self) -> ColumnElement[Any]:
        return func.strftime(_FORMAT, "now")

    def clock(self) -> ColumnElement[Any]:
        return func.strftime(_FORMAT, "now")

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        moved = func.strftime(_FORMAT, moment, func.printf("%+.6f seconds", seconds))
        return case((seconds.is_(None), null()), else_=moved)

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        return cast((func.julianday(moment) - func.julianday("now")) * 86_400, Float)

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        if isinstance(column.type, DateTime):
            return type_coerce(column, _Time(otherwise))
        if isinstance(column.type, Uuid):
            return type_coerce(column, String)
        return type_coerce(column, _Bytes()) if isinstance(column.type, LargeBinary) else column

    def before_all(self) -> ColumnElement[Any]:
        return literal_column("-9e999")  # numbers are before texts

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column.in_(select(func.json_each(bindparam(name)).table_valued("value").c.value))

    def listed(self, values: Sequence[Any]) -> Any:
        return json.dumps(list(values))

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        rows = func.json_each(bindparam(name)).table_valued("value")
        fields = [
            func.json_extract(rows.c.value, f"$.{column}", type_=column_type).label(column)
            for column, column_type in columns.items()
        ]
        return select(*fields).subquery()

    def ignoring(self, table: Table) -> Insert:
        return sqlite_insert(table).on_conflict_do_nothing()

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.substr(text, -length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement  # a transaction that writes is the only one

    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        # Of a text it would count characters, and only those before a NUL; of bytes it reads none.
        is_bytes = func.typeof(column) == literal_column("'blob'")
        size = case((is_bytes, func.length(column)), else_=func.length(cast(column, LargeBinary)))
        return func.coalesce(size, literal_column("0"), type_=Integer)

    # A caller's connection.

    def explained(self, error: BaseException, tables: Tables) -> TransactionError | None:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT:
            return SnapshotConflict(
                "this transaction read before it wrote, and another one wrote meanwhile: SQLite cannot let it "
                "write any more. Roll it back and try again; to avoid it, begin with `async with transaction() as "
                "session`, call outbox.sqlite.prepare(engine) once for your own engine, or begin with BEGIN IMMEDIATE"
            )
        return super().explained(error, tables)

    def is_missing_table(self, error: BaseException) -> bool:
        return "no such table" in str(error)

    def is_own_conflict(self, error: BaseException) -> bool:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CONFLICTS  # what is above says which kind

    def driver_state_of(self, connection: Connection) -> TransactionState:
        return state_of(connection)

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        return is_rolled_back(connection)

    def isolation(self, level: str) -> Mapping[str, Any]:
        return {}  # every transaction is serializable, and that is more than any level asks for

    # Tables.

    def create(self, connection: Connection, tables: Tables, schema: str | None = None) -> None:
        for table in self.missing(connection, tables, schema):
            # Another process may make them at this moment: the look at what is missing takes no lock.
            connection.execute(CreateTable(table, if_not_exists=True))
            for index in sorted(table.indexes, key=lambda each: str(each.name)):
                connection.execute(CreateIndex(index, if_not_exists=True))
                found = connection.dialect.get_indexes(connection, table.name, schema=table.schema)
                if index.name not in {each["name"] for each in found}:
                    connection.execute(CreateIndex(index))  # a table of another name has it: SQLite says so

    def differences(self, connection: Connection, tables: Tables) -> list[Difference]:
        return SqliteCheck(connection, tables).differences()

    def server(self, connection: Connection) -> str:
        return examination.server(connection)

    def findings(self, connection: Connection, tables: Tables) -> Iterator[Finding]:
        return examination.findings(connection)

    def rows_written(self, connection: Connection, tables: Tables) -> int:
        found = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = ?", (tables.messages.name,))
        return int(found.scalar() or 0)

    # Engines of our own.

    @classmethod
    def set_up(cls, engine: Engine | AsyncEngine) -> None:
        plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if not in_memory(engine.url):
            prepare(engine)
            files.watch(plain)
        elif isinstance(engine, AsyncEngine):
            event.listen(plain, "savepoint", begin_first)
        else:
            raise ConfigurationError("a database in memory has one connection, which threads cannot share: use a file")


class _Time(TypeDecorator[datetime]):
    """Reads a time where any text may be, or a number: SQLite checks no types."""

    impl = String
    cache_ok = True

    def __init__(self, otherwise: datetime | None) -> None:
        super().__init__()
        self.otherwise = otherwise

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        try:
            moment = as_utc(datetime.fromisoformat(value))
        except (TypeError, ValueError, OverflowError):
            return self.otherwise
        return moment if OLDEST <= moment < LATEST else self.otherwise


class _Bytes(TypeDecorator[bytes]):
    """Reads bytes where there may be anything else."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> bytes | None:
        return value if isinstance(value, bytes) else None
