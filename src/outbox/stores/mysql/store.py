"""MysqlStore: messages in MariaDB or MySQL, through asyncmy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Engine, Executable, Insert, Select, bindparam, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import Retention
from outbox.core.kept_property import kept_property
from outbox.core.message import NOW, Message, Schedule
from outbox.core.store import Rows
from outbox.stores.callers import SqlWriting
from outbox.stores.leases import unleased
from outbox.stores.mysql.callers import MysqlCallers
from outbox.stores.mysql.dialect import MysqlDialect
from outbox.stores.mysql.inbox import MysqlInbox
from outbox.stores.mysql.roles import roles_sql
from outbox.stores.mysql.runner import MysqlRunner
from outbox.stores.mysql.selecting import MysqlSelecting
from outbox.stores.mysql.settling import MysqlBurying, MysqlSettling
from outbox.stores.mysql.shapes import in_innodb
from outbox.stores.rows import message_row
from outbox.stores.sql import SqlStore
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.wakeup import Wakeup


class MysqlStore(SqlStore):
    """Messages in MariaDB or MySQL, through asyncmy, and plainly through pymysql or mysqlclient."""

    async_drivers = ("asyncmy",)
    sync_drivers = ("pymysql", "mysqldb")
    dialect_class = MysqlDialect
    settling_class = MysqlSettling
    burying_class = MysqlBurying
    inbox_class = MysqlInbox

    @classmethod
    def tables_named(cls, table_name: str, schema: str | None = None) -> Tables:
        return in_innodb(super().tables_named(table_name, schema))

    @classmethod
    def roles_sql(cls, tables: Tables, prefix: str) -> str | None:
        return roles_sql(tables, prefix)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = MysqlDialect()
        runner = MysqlRunner(tables, dialect, engine)
        callers = MysqlCallers(tables, dialect, engine)
        super().__init__(
            tables,
            dialect,
            runner,
            clean_up_after,
            callers=callers,
            wakeup=Wakeup(),
            selecting=MysqlSelecting(tables, dialect, runner),
        )
        self.writing = MysqlWriting(tables, dialect, callers, self.transactions, self.placing_class(tables, dialect))
        self._own_callers = callers

    def locate(self, engine: Engine) -> None:
        self._own_callers.locate(engine)


class MysqlWriting(SqlWriting):
    """A timer is looked for first: a DELETE that finds none would lock the gap in which others set theirs."""

    def insert(self, messages: Sequence[Message], schedule: Schedule) -> tuple[Executable, Rows]:
        """A short text for what most messages are: parameters are written into it, and the server reads all of it."""
        if schedule == NOW:
            return self._insert_now, [message_row(message) for message in messages]
        return super().insert(messages, schedule)

    @kept_property
    def _insert_now(self) -> Insert:
        statement = insert(self._messages).values(due_at=self._dialect.clock()).inline()
        return statement.execution_options(preserve_rowcount=True)

    def cancel_timer(self, connection: Connection, timer_id: str) -> bool:
        self._transactions.judge(connection)
        own = self._callers.on(connection)
        found = own.execute(self._timer, {"timer_id": timer_id}).scalar()
        return found is not None and own.execute(self._cancel_found, {"row_id": found}).rowcount > 0

    @kept_property
    def _timer(self) -> Select[Any]:
        return select(self._messages.c.id).where(*self._waiting_timer)

    @kept_property
    def _cancel_found(self) -> Executable:
        columns = self._messages.c
        waits = columns.timer_id.is_not(None), columns.destination == NOT_ROUTED, columns.done_at.is_(None)
        free = unleased(self._messages, self._dialect.clock())
        return delete(self._messages).where(columns.id == bindparam("row_id", type_=BigInteger), *waits, free)
