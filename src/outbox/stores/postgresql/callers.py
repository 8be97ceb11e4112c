"""PostgresqlCallers: callers' connections to PostgreSQL, whose search_path may lead elsewhere."""

from __future__ import annotations

from weakref import ref

from sqlalchemy import Connection, Engine, Executable

from outbox.core.prepared import dialect_for, prepare
from outbox.core.store import Rows
from outbox.stores.callers import CallerConnections, execute
from outbox.stores.postgresql.pgbouncer import explained
from outbox.stores.postgresql.places import Places

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
