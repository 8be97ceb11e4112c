"""PostgresqlStore: leases in one statement, many messages in one, wake-ups by NOTIFY from a connection of our own."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

from sqlalchemy import URL, Connection, DateTime, Engine, Executable, Select, String, Text, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import Retention
from outbox.core.events import Observer
from outbox.core.kept_property import kept_property
from outbox.core.log import LogOptions
from outbox.core.store import Rows
from outbox.stores.burying import KEPT, SAID, SqlBurying
from outbox.stores.callers import PlacingStatements
from outbox.stores.claiming import SqlFeed
from outbox.stores.postgresql.callers import PostgresqlCallers
from outbox.stores.postgresql.dialect import PostgresqlDialect
from outbox.stores.postgresql.maintenance import PostgresqlMaintenance
from outbox.stores.postgresql.roles import roles_sql
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.selecting import PostgresqlSelecting
from outbox.stores.postgresql.wakeup import PostgresqlWakeup
from outbox.stores.postgresql.wal.reader import PostgresqlLogReader
from outbox.stores.postgresql.wal.slot import LogSlot, slot_name
from outbox.stores.postgresql.wal.table import LeftSelecting, LoggedTable
from outbox.stores.postgresql.wal.waking import LogWaking
from outbox.stores.returning import ReturningInbox, ReturningSettling
from outbox.stores.rows import GIVEN
from outbox.stores.sql import SqlStore
from outbox.stores.tables import Tables


class PostgresqlBurying(SqlBurying):
    """Deletes and copies at once."""

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        messages, dead_letters = self._tables.messages, self._tables.dead_letters
        chosen = statement.cte("chosen")
        gone = (
            delete(messages)
            .where(messages.c.id == chosen.c.id)
            .returning(messages.c.id, *(chosen.c[name] for name in SAID), *(messages.c[name] for name in KEPT))
            .cte("gone")
        )
        source = select(self._dialect.clock(), *(gone.c[name] for name in (*SAID, *KEPT)))
        buried = insert(dead_letters).from_select(["died_at", *SAID, *KEPT], source).cte("buried")
        return list(connection.execute(select(gone.c.id).add_cte(buried), parameters).scalars())


MOST_AS_JSON = 4 * 1024 * 1024  # bytes of bodies; of larger ones the copies in memory weigh more than the statements

_TYPES: dict[str, Any] = {
    **dict.fromkeys(GIVEN, Text),
    "created_at": DateTime(timezone=True),
    "queue": String,
    "expires": DateTime(timezone=True),
}


class PostgresqlPlacing(PlacingStatements):
    """Many messages in one statement."""

    def place_all(self, connection: Connection, rows: Rows) -> None:
        if sum(len(row["body"]) for row in rows) <= MOST_AS_JSON:
            connection.execute(self._place_all, {"rows": self._dialect.json([as_record(row) for row in rows])})
        else:
            super().place_all(connection, rows)

    @kept_property
    def _place_all(self) -> Executable:
        rows = self._dialect.records("rows", _TYPES).alias("placed")
        columns: dict[str, Any] = {name: rows.c[name] for name in GIVEN} | {
            "body": func.pg_catalog.decode(rows.c.body, "base64"),
            "destination": rows.c.queue,
            "expires_at": rows.c.expires,
            "due_at": self._dialect.clock(),
            "routed_at": self._dialect.clock(),
        }
        return insert(self._tables.messages).from_select(list(columns), select(*columns.values()))


def as_record(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `placed_row`, as JSON can say it."""
    expires = row["expires"]
    return {
        **row,
        "body": b2a_base64(row["body"], newline=False).decode(),
        "created_at": row["created_at"].isoformat(),
        "expires": expires and expires.isoformat(),
    }


class PostgresqlStore(SqlStore):
    """Messages in PostgreSQL, through asyncpg or psycopg."""

    async_drivers = ("asyncpg", "psycopg")
    sync_drivers = ("psycopg", "psycopg2")
    dialect_class = PostgresqlDialect
    settling_class = ReturningSettling
    inbox_class = ReturningInbox
    burying_class = PostgresqlBurying
    placing_class = PostgresqlPlacing
    maintenance_class = PostgresqlMaintenance

    @classmethod
    def roles_sql(cls, tables: Tables, prefix: str) -> str | None:
        return roles_sql(tables, prefix)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = PostgresqlDialect()
        self.runner: PostgresqlRunner
        runner = PostgresqlRunner(tables, dialect, engine)
        self._places = runner.places
        callers = PostgresqlCallers(self._places, remember_engine=engine is None)
        self.wakeup = PostgresqlWakeup(tables, dialect, runner, callers)
        selecting = PostgresqlSelecting(tables, dialect, runner, self.wakeup)
        super().__init__(
            tables, dialect, runner, clean_up_after, callers=callers, wakeup=self.wakeup, selecting=selecting
        )

    def log_administration(self, url: URL, slot: str | None) -> LogSlot:
        return self._log_slot(url, slot, self._logged_table())

    def log_reader(self, options: LogOptions, observe: Observer) -> PostgresqlLogReader:
        table = self._logged_table()
        slot = self._log_slot(options.url, options.slot, table)
        return PostgresqlLogReader(slot, table, LogWaking(table, self.wakeup.announce), options, observe)

    def _log_slot(self, url: URL, name: str | None, table: LoggedTable) -> LogSlot:
        chosen = name or slot_name(url.database or url.username or "", self.tables)
        return LogSlot(self.tables, self.runner, self.owners, table, chosen)

    def _logged_table(self) -> LoggedTable:
        """With a feed of its own for what the log leaves to the table, so that no claim takes anything else."""
        selecting = LeftSelecting(self.tables, self.dialect, self.runner, self.wakeup)
        feed = SqlFeed(
            self.tables,
            self.dialect,
            self.runner,
            callers=self.callers,
            selecting=selecting,
            settling=self.feed.settling,
            burying=self.feed.burying,
            wakeup=self.wakeup,
        )
        return LoggedTable(self.tables, self.dialect, self.runner, feed, selecting)

    def locate(self, engine: Engine) -> None:
        self._places.locate(engine)

    @property
    def notifies_in_thread(self) -> bool:
        return self.wakeup.notifies_in_thread

    @notifies_in_thread.setter
    def notifies_in_thread(self, value: bool) -> None:
        self.wakeup.notifies_in_thread = value
