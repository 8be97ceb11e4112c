"""PostgresqlDialect: PostgreSQL's own expressions, and what its drivers and its server know of a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ARRAY,
    URL,
    BigInteger,
    ColumnElement,
    Connection,
    DateTime,
    Float,
    FromClause,
    Insert,
    Integer,
    Select,
    String,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
    null,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Finding
from outbox.core.durations import LATEST, OLDEST
from outbox.core.store import Difference
from outbox.core.transaction_state import TransactionState, libpq_state, query_counter
from outbox.stores.callers import IN_FAILED_TRANSACTION
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql import examination
from outbox.stores.postgresql.connection import as_array, unprepared
from outbox.stores.postgresql.schema_check import PostgresqlCheck, present_tables
from outbox.stores.tables import PartialIndexes, Tables

KEEPING = ("REPEATABLE READ", "SERIALIZABLE")


class Snapshots:
    """Knows what transactions are like, where nothing else is said, for each pool of connections."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Pool, bool] = WeakKeyDictionary()

    def are_kept(self, connection: Connection) -> bool:
        """Asks the server once for each pool: its role, its database or its engine may say what is usual there."""
        level = connection.get_execution_options().get("isolation_level")
        if level is not None:
            return _keeps(level)
        pool = connection.engine.pool
        usual = self._usual.get(pool)
        if usual is None:
            usual = self._usual[pool] = _keeps(connection.get_isolation_level())
        return usual


def _keeps(level: str) -> bool:
    return level.upper().replace("_", " ") in KEEPING


def state_of(connection: Connection) -> TransactionState:
    """The state of a connection. asyncpg says of an aborted transaction that it is open."""
    pooled: Any = connection.connection
    driver = pooled.driver_connection
    if not hasattr(driver, "is_in_transaction"):
        return libpq_state(driver) if hasattr(driver, "info") else TransactionState.UNKNOWN
    if driver.is_closed():
        return TransactionState.UNKNOWN
    if driver.is_in_transaction():
        return TransactionState.OPEN
    return TransactionState.AUTOCOMMIT if pooled.dbapi_connection.autocommit else TransactionState.IDLE


def is_aborted(connection: Connection, *, in_doubt: bool) -> bool:
    """Whether COMMIT would be answered by ROLLBACK. Asks the server if there is doubt and the driver cannot say."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "is_in_transaction"):
        return in_doubt and state_of(connection) is TransactionState.OPEN and _refuses(connection)
    return state_of(connection) is TransactionState.ABORTED


def _refuses(connection: Connection) -> bool:
    try:
        connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == IN_FAILED_TRANSACTION:
            return True
        raise
    return False


_CONFLICTS = ("40001", "40P01")  # a serialization failure, a deadlock
_UNDEFINED_TABLE = "42P01"  # a schema that is not there is one too
_ZERO = literal_column("0", Integer)
_LARGE = literal_column("700000000", Integer)
_SECOND: ColumnElement[Any] = literal_column("interval '1 second'")


class PostgresqlDialect(PartialIndexes, SqlDialect):
    """PostgreSQL's words, through asyncpg or psycopg."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()

    def now(self) -> ColumnElement[Any]:
        return func.now()

    def clock(self) -> ColumnElement[Any]:
        return func.clock_timestamp()

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        # A driver may leave a missing value without a type, for which an operator of another role could fit.
        return moment + cast(seconds, Float) * _SECOND

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        # Each on its own: a difference to infinity is an error before PostgreSQL 17.
        date_part = func.pg_catalog.date_part
        return date_part("epoch", moment, type_=Float) - date_part("epoch", func.now(), type_=Float)

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        if not isinstance(column.type, DateTime):
            return column
        known = (column >= _time(OLDEST)) & (column < _time(LATEST))
        return case((known, column), else_=null() if otherwise is None else _time(otherwise))

    def before_all(self) -> ColumnElement[Any]:
        return literal_column("timestamptz '-infinity'", DateTime(timezone=True))

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column == any_(cast(bindparam(name, type_=Text), ARRAY(BigInteger)))

    def listed(self, values: Sequence[Any]) -> Any:
        return as_array(values)

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        # Texts as TEXT, not VARCHAR: see `texts`.
        typed = [column(each, Text if types is String else types) for each, types in columns.items()]
        rows = cast(bindparam(name, type_=Text), JSON)
        return func.json_to_recordset(rows).table_valued(*typed).render_derived(with_types=True)

    def ignoring(self, table: Table) -> Insert:
        # Without naming a constraint: naming one would ask for the right to read.
        return postgresql_insert(table).on_conflict_do_nothing()

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.pg_catalog.right(text, length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement.with_for_update(skip_locked=True)

    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        # The length reads no value that is stored apart. Three are added up, and the sum must stay within an integer.
        return func.least(func.coalesce(func.pg_catalog.octet_length(column), _ZERO), _LARGE, type_=Integer)

    def locking(self, statement: Select[Any], table: Table) -> Select[Any]:
        return statement.with_for_update(of=table)

    # A caller's connection.

    def is_missing_table(self, error: BaseException) -> bool:
        return _state(error) == _UNDEFINED_TABLE

    def is_own_conflict(self, error: BaseException) -> bool:
        return _state(error) in _CONFLICTS

    def keeps_snapshot(self, connection: Connection) -> bool:
        return self._snapshots.are_kept(connection)

    def driver_state_of(self, connection: Connection) -> TransactionState:
        return state_of(connection)

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        return query_counter(connection)

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        return is_aborted(connection, in_doubt=in_doubt)

    # Tables.

    def create(self, connection: Connection, tables: Tables, schema: str | None = None) -> None:
        if self.missing(
            connection, tables, schema
        ):  # a role that may not create is fine when there is nothing to create
            # Two processes that start at the same time: CREATE TABLE IF NOT EXISTS alone would collide.
            connection.execute(text("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('outbox tables'))"))
            missing = self.missing(connection, tables, schema)
            # Without a look of SQLAlchemy's own, which compares names as VARCHAR.
            tables.metadata.create_all(connection, tables=missing, checkfirst=False)

    def missing(self, connection: Connection, tables: Tables, schema: str | None = None) -> list[Table]:
        needed = tables.metadata.sorted_tables
        present = present_tables(connection, [each.name for each in needed], tables.messages.schema or schema)
        return [each for each in needed if each.name not in present]

    def differences(self, connection: Connection, tables: Tables) -> list[Difference]:
        return PostgresqlCheck(connection, tables).differences()

    def server(self, connection: Connection) -> str:
        return examination.server(connection)

    def findings(self, connection: Connection, tables: Tables) -> Iterator[Finding]:
        return examination.findings(tables, connection)

    def rows_written(self, connection: Connection, tables: Tables) -> int:
        quoted = connection.dialect.identifier_preparer.format_table(tables.messages)
        sequence = func.pg_catalog.pg_get_serial_sequence(quoted, "id")
        return int(connection.scalar(select(func.pg_catalog.pg_sequence_last_value(sequence))) or 0)

    # Engines of our own.

    @classmethod
    def connect_args(cls, url: URL) -> dict[str, Any]:
        return unprepared(url)


def _time(moment: datetime) -> ColumnElement[Any]:
    """A constant: what is bound would be sent with every statement. Its year has four digits, or it is another one."""
    return literal_column(f"timestamptz '{moment.isoformat(sep=' ')}'", DateTime(timezone=True))


def _state(error: BaseException) -> object:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg2 has its own word
