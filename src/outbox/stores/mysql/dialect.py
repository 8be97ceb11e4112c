"""MysqlDialect: how MariaDB and MySQL spell it, and what their errors mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    DateTime,
    Delete,
    Engine,
    Executable,
    Float,
    FromClause,
    Insert,
    Integer,
    Select,
    Table,
    Update,
    and_,
    case,
    func,
    insert,
    literal_column,
    null,
)
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Finding
from outbox.core.durations import LATEST
from outbox.core.errors import ConfigurationError, TransactionError
from outbox.core.store import Difference
from outbox.core.transaction_state import TransactionState
from outbox.stores.dialect import SqlDialect
from outbox.stores.mysql import examination, packets, transactions
from outbox.stores.mysql.schema_check import MysqlCheck, engines_of
from outbox.stores.mysql.shapes import ENGINE, MysqlShapes
from outbox.stores.mysql.statements import KeyedDelete, KeyedUpdate, by_key, json_ids, json_rows
from outbox.stores.tables import Tables

_MICROSECOND: ColumnElement[Any] = literal_column("MICROSECOND")
_SIX: ColumnElement[Any] = literal_column("6")
_ZERO = literal_column("0", Integer)
_MILLION: ColumnElement[Any] = literal_column("1000000")
_MILLIONTH: ColumnElement[Any] = literal_column("1e-6", Float)
_SYSDATE: ColumnElement[Any] = literal_column("SYSDATE(6)")  # SQLAlchemy's own would leave the digits out
_BEGINNING = "0000-01-01 00:00:00"

_LOCK = "outbox tables"
_LOCK_WITHIN = 30  # seconds for others who make tables


class MysqlDialect(MysqlShapes, SqlDialect):
    """MariaDB's words and MySQL's."""

    def now(self) -> ColumnElement[Any]:
        return func.utc_timestamp(_SIX, type_=DateTime())

    def clock(self) -> ColumnElement[Any]:
        # What the statement has taken so far is the difference of two times in the session's time zone.
        elapsed = func.timestampdiff(_MICROSECOND, func.now(_SIX), _SYSDATE)
        return func.timestampadd(_MICROSECOND, elapsed, func.utc_timestamp(_SIX), type_=DateTime())

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.timestampadd(_MICROSECOND, func.round(seconds * _MILLION), moment, type_=DateTime())

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        left: ColumnElement[Any] = func.timestampdiff(_MICROSECOND, func.utc_timestamp(_SIX), moment, type_=Float)
        return left * _MILLIONTH

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        if not isinstance(column.type, DateTime):
            return column
        known = (column >= literal_column("'0002-01-01'")) & (column < _time(LATEST))
        return case((known, column), else_=null() if otherwise is None else _time(otherwise))

    def before_all(self) -> ColumnElement[Any]:
        return literal_column(f"'{_BEGINNING}'", DateTime())

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column == json_ids(name).c.id

    def listed(self, values: Sequence[Any]) -> Any:
        return json.dumps(sorted(set(values)))  # a join would find one that is told twice twice

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        return json_rows(name, columns)

    def are_among(self, rows: FromClause, *columns: ColumnElement[Any]) -> ColumnElement[bool]:
        return and_(*(column == rows.c[column.name] for column in columns))

    def update(self, table: Table) -> Update:
        return KeyedUpdate(table)

    def delete(self, table: Table) -> Delete:
        return KeyedDelete(table)

    def ignoring(self, table: Table) -> Insert:
        # IGNORE would pass over what does not fit into its column too, and ON DUPLICATE KEY says how many rows there
        # are in a number that depends on a flag of the connection.
        return transactions.passing_over(insert(table))

    def enter(self, connection: Connection, statement: Executable, rows: Any = None) -> int:
        one_by_one = rows if isinstance(rows, list) else [rows]
        return sum(super(MysqlDialect, self).enter(connection, statement, row) for row in one_by_one)

    def is_already_there(self, error: BaseException) -> bool:
        return transactions.error_number(error) == transactions.DUPLICATE

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.right(text, length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement.with_for_update(skip_locked=True, of=_tables_of(statement))

    def locking(self, statement: Select[Any], table: Table) -> Select[Any]:
        return by_key(statement, table).with_for_update(of=table)

    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        return func.coalesce(func.octet_length(column), _ZERO, type_=Integer)

    # A caller's connection.

    def explained(self, error: BaseException, tables: Tables) -> TransactionError | None:
        if transactions.is_read_only(error):
            return TransactionError(
                f"this connection leads to a server that takes no writes, such as a replica: {error}"
            )
        return super().explained(error, tables)

    def is_missing_table(self, error: BaseException) -> bool:
        return transactions.error_number(error) == transactions.MISSING_TABLE

    def is_own_conflict(self, error: BaseException) -> bool:
        return transactions.error_number(error) in transactions.CONFLICTS

    def is_read_only(self, error: BaseException) -> bool:
        return transactions.is_read_only(error)

    def keeps_snapshot(self, connection: Connection) -> bool:
        return transactions.keeps_snapshot(connection)

    def driver_state_of(self, connection: Connection) -> TransactionState:
        return transactions.state_of(connection)

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        return transactions.is_rolled_back(connection)

    # Tables.

    def create(self, connection: Connection, tables: Tables, schema: str | None = None) -> None:
        if not self.missing(connection, tables, schema):
            return
        with _alone(connection):
            missing = self.missing(connection, tables, schema)
            tables.metadata.create_all(connection, tables=missing, checkfirst=False)
            self.missing(connection, tables, schema)  # a server may put them into another engine than it is told

    def missing(self, connection: Connection, tables: Tables, schema: str | None = None) -> list[Table]:
        needed = tables.metadata.sorted_tables
        engines = engines_of(connection, [each.name for each in needed], tables.messages.schema or schema)
        for name, engine in engines.items():
            if engine.lower() != ENGINE.lower():
                raise ConfigurationError(
                    f"the table {name!r} is in the engine {engine}, which has no transactions: run ALTER TABLE {name} "
                    f"ENGINE={ENGINE}"
                )
        return [each for each in needed if each.name not in engines]

    def differences(self, connection: Connection, tables: Tables) -> list[Difference]:
        return MysqlCheck(connection, tables).differences()

    def server(self, connection: Connection) -> str:
        return examination.server(connection)

    def findings(self, connection: Connection, tables: Tables) -> Iterator[Finding]:
        return examination.findings(connection)

    def largest_body(self, connection: Connection) -> int | None:
        return packets.largest_body(connection)

    def rows_written(self, connection: Connection, tables: Tables) -> int:
        return examination.rows_written(connection, tables)

    # Engines of our own.

    @classmethod
    def connect_args(cls, url: URL) -> dict[str, Any]:
        # A text that a connection's character set does not have would be read as a question mark.
        return {} if "charset" in url.query else {"charset": "utf8mb4"}

    @classmethod
    def set_up(cls, engine: Engine | AsyncEngine) -> None:
        plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        transactions.leave_replicas(plain)
        if plain is not engine:
            transactions.roll_back_what_is_open(plain.pool)


def _tables_of(statement: Select[Any]) -> list[Table]:
    """What FOR UPDATE names: MySQL would lock what JSON_TABLE makes. MariaDB has no word for it, and needs none."""
    return [each for each in statement.get_final_froms() if isinstance(each, Table)]


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Two processes that start at the same time make the tables one after the other. DDL ends no such lock."""
    if connection.exec_driver_sql(f"SELECT GET_LOCK('{_LOCK}', {_LOCK_WITHIN})").scalar() != 1:
        raise ConfigurationError(f"another process has been making tables for {_LOCK_WITHIN} s")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"SELECT RELEASE_LOCK('{_LOCK}')")


def _time(moment: datetime) -> ColumnElement[Any]:
    return literal_column(f"TIMESTAMP'{moment.replace(tzinfo=None).isoformat(sep=' ')}'", DateTime())
