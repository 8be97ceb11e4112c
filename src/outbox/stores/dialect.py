"""SqlDialect: what databases spell, answer and set up differently."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

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
    Select,
    Table,
    Update,
    case,
    delete,
    literal,
    literal_column,
    null,
    select,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Finding
from outbox.core.durations import EARLIEST
from outbox.core.errors import TablesMissing, TransactionError
from outbox.core.store import Difference, Rows
from outbox.core.transaction_state import TransactionState
from outbox.stores.rows import LARGEST, TOO_LARGE, as_seconds
from outbox.stores.tables import Tables, TableShapes
from outbox.stores.texts import as_text


class SqlDialect(TableShapes, ABC):
    """One database's words, its answers about a caller's connection, its tables and its engines."""

    # Expressions.

    @abstractmethod
    def now(self) -> ColumnElement[Any]:
        """The database's time when the transaction began; indexes can be searched with it."""

    @abstractmethod
    def clock(self) -> ColumnElement[Any]:
        """The database's time at this very moment."""

    @abstractmethod
    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        """A moment that many seconds after another; NULL if the seconds are."""

    def ago(self, duration: timedelta) -> ColumnElement[Any]:
        """The time so long before the transaction began."""
        return self.later(self.now(), literal(-as_seconds(duration), Float))

    @abstractmethod
    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        """How many seconds from now a moment is."""

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        """A column for a driver to read: a value that some driver could not read is `otherwise`.

        A driver that cannot read one value gives up the whole result.
        """
        return column

    def before_all(self) -> ColumnElement[Any]:
        """What is not later than any time that a row may hold."""
        return literal(EARLIEST, DateTime(timezone=True))

    @abstractmethod
    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Whether a column's value is in the list bound under this name."""

    @abstractmethod
    def listed(self, values: Sequence[Any]) -> Any:
        """The list to bind for `among`."""

    @abstractmethod
    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        """A table whose rows are the JSON list of objects bound under this name."""

    @staticmethod
    def json(rows: Rows) -> str:
        """The rows to bind for `records`."""
        return json.dumps(rows)

    def are_among(self, rows: FromClause, *columns: ColumnElement[Any]) -> ColumnElement[bool]:
        """Whether these columns have the values that one of `records` has under their names."""
        names = [column.name for column in columns]
        own = [as_text(column) for column in columns]
        return tuple_(*own).in_(select(*(rows.c[name] for name in names)))

    def update(self, table: Table) -> Update:
        """An UPDATE of rows that are found by their primary key, alone, by `among`, or by `records`."""
        return update(table)

    def delete(self, table: Table) -> Delete:
        """A DELETE of rows that are found in the same way."""
        return delete(table)

    @abstractmethod
    def ignoring(self, table: Table) -> Insert:
        """An INSERT that does nothing where a unique index already has the row; `enter` executes it."""

    def enter(self, connection: Connection, statement: Executable, rows: Any = None) -> int:
        """Execute what `ignoring` has made, with one row or several; how many rows were new."""
        try:
            return connection.execute(statement, rows).rowcount
        except IntegrityError as error:
            if error.orig is None or not self.is_already_there(error.orig):
                raise
            return 0

    def is_already_there(self, error: BaseException) -> bool:
        """Whether a driver's own error of such an INSERT says that a unique index has the row."""
        return False

    @abstractmethod
    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        """The last characters of a text."""

    @abstractmethod
    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        """How many bytes a column of bytes or of text has, 0 for NULL. Values of many megabytes may count as less."""

    def readable_columns(self, table: Table) -> dict[str, ColumnElement[Any]]:
        """All columns of a table as they are read: rows may be of another program.

        What is larger than in any message stays in the database: one such row would fail all that are read with it.
        """
        columns = {column.name: self.readable(column) for column in table.c}
        for name in LARGEST.keys() & columns.keys():
            too_large = self.size(table.c[name]) > literal_column(str(LARGEST[name]))
            instead = null() if name == "body" else literal_column(f"'{TOO_LARGE}'")
            columns[name] = type_coerce(case((too_large, instead), else_=columns[name]), columns[name].type)
        return columns

    @abstractmethod
    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        """A SELECT that locks what it finds and passes over what others have locked."""

    def locking(self, statement: Select[Any], table: Table) -> Select[Any]:
        """A SELECT that locks the rows of a table that it finds by their primary key, and waits for other locks."""
        return statement.with_for_update()

    # A caller's connection.

    def explained(self, error: BaseException, tables: Tables) -> TransactionError | None:
        """What a driver's own error means to the caller, if there is something to be done about it."""
        return tables_missing(tables) if self.is_missing_table(error) else None

    @abstractmethod
    def is_missing_table(self, error: BaseException) -> bool:
        """Whether a driver's own error says that a table is not there."""

    def is_own_conflict(self, error: BaseException) -> bool:
        """Whether a driver's own error says that a transaction could not be fitted between others."""
        return False

    def is_read_only(self, error: BaseException) -> bool:
        """Whether a driver's own error says that the server takes no writes."""
        return False

    def keeps_snapshot(self, connection: Connection) -> bool:
        """Whether a transaction sees all along what its first statement saw."""
        return False

    def driver_state_of(self, connection: Connection) -> TransactionState:
        """What the driver itself says of a connection."""
        return TransactionState.UNKNOWN

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        """How many queries the driver has sent; none if it does not count them."""
        return None

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        """Whether the database keeps nothing of a connection's transaction, in which a statement may have failed."""
        return False

    def isolation(self, level: str) -> Mapping[str, Any]:
        """What to tell a connection, before it begins, to have a transaction isolated like this."""
        return {"isolation_level": level}

    # Tables.

    def create(self, connection: Connection, tables: Tables, schema: str | None = None) -> None:
        """Make what is missing."""
        tables.metadata.create_all(connection)

    def missing(self, connection: Connection, tables: Tables, schema: str | None = None) -> list[Table]:
        """The tables that are not there; in a schema, or where statements look for them."""
        has_table = connection.dialect.has_table
        return [
            each
            for each in tables.metadata.sorted_tables
            if not has_table(connection, each.name, schema=each.schema or schema)
        ]

    @abstractmethod
    def differences(self, connection: Connection, tables: Tables) -> list[Difference]:
        """How the tables differ from those that are needed."""

    @abstractmethod
    def server(self, connection: Connection) -> str:
        """The database's name and version."""

    def findings(self, connection: Connection, tables: Tables) -> Iterable[Finding]:
        """What a doctor should know of the database itself."""
        return ()

    def largest_body(self, connection: Connection) -> int | None:
        """How many bytes a body may have for the server to take it; None if it sets no limit of its own."""
        return None

    @abstractmethod
    def rows_written(self, connection: Connection, tables: Tables) -> int:
        """How many rows the messages table was ever given."""

    # Engines of our own.

    connections_can_die: ClassVar[bool] = True  # while they lie in a pool

    @classmethod
    def connect_args(cls, url: URL) -> dict[str, Any]:
        """What the driver is told when an engine of our own connects."""
        return {}

    @classmethod
    def set_up(cls, engine: Engine | AsyncEngine) -> None:
        """Make a new engine's transactions safe; ConfigurationError where it cannot be used like this."""
        return


def tables_missing(tables: Tables, why: str = "none is made on a driver's own connection") -> TablesMissing:
    """What to tell a caller on whose connection no table is made."""
    return TablesMissing(
        f"there is no table {tables.messages.fullname!r}, and {why}: run `outbox tables create`, or call "
        "create_tables(), before you emit"
    )
