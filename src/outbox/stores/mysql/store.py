"""MysqlStore: messages in MariaDB or MySQL, through asyncmy."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import Retention
from outbox.core.kept_property import kept_property
from outbox.stores.mysql.callers import MysqlCallers
from outbox.stores.mysql.dialect import MysqlDialect
from outbox.stores.mysql.runner import MysqlRunner
from outbox.stores.mysql.shapes import in_innodb
from outbox.stores.selecting import SqlSelecting
from outbox.stores.sql import SqlStore
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup


class MysqlStore(SqlStore):
    """Messages in MariaDB or MySQL, through asyncmy, and plainly through pymysql or mysqlclient."""

    async_drivers = ("asyncmy",)
    sync_drivers = ("pymysql", "mysqldb")
    dialect_class = MysqlDialect

    @classmethod
    def tables_named(cls, table_name: str, schema: str | None = None) -> Tables:
        return in_innodb(super().tables_named(table_name, schema))

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = MysqlDialect()
        runner = MysqlRunner(tables, dialect, engine)
        super().__init__(
            tables,
            dialect,
            runner,
            clean_up_after,
            callers=MysqlCallers(tables, dialect),
            wakeup=Wakeup(),
            selecting=MysqlSelecting(tables, dialect, runner),
        )


class MysqlSelecting(SqlSelecting):
    """By the index in whose order messages are claimed: by any other one, each row that is read would be locked."""

    @kept_property
    def due(self) -> Select[Any]:
        return self._due().with_hint(self._messages, f"FORCE INDEX ({self._messages.name}_claim)")
