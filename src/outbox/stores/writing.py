"""SqlWriting: statements that a caller executes in a transaction of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, DateTime, Executable, Float, Insert, bindparam, case, delete, insert

from outbox.core.errors import TransactionError
from outbox.core.kept_property import kept_property
from outbox.core.message import Message, Schedule
from outbox.core.store import Reception, Rows
from outbox.stores.callers import CallerConnections
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import unleased
from outbox.stores.receiving import PlacingStatements
from outbox.stores.rows import as_seconds, message_row
from outbox.stores.tables import NOT_ROUTED, Tables


class SqlWriting:
    """Messages in, timers out."""

    def __init__(
        self, tables: Tables, dialect: SqlDialect, callers: CallerConnections, placing: PlacingStatements
    ) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._callers = callers
        self._placing = placing

    def insert(self, messages: Sequence[Message], schedule: Schedule) -> tuple[Executable, Rows]:
        statement = self._insert if schedule.timer_id is None else self._insert_timer
        due = schedule.due
        times = {
            "due": due if isinstance(due, datetime) else None,
            "delay": as_seconds(due) if isinstance(due, timedelta) else 0.0,
            "expiration": as_seconds(schedule.expiration) if schedule.expiration else None,
            "timer_id": schedule.timer_id,
        }
        return statement, [message_row(message) | times for message in messages]

    def cancel(self, timer_id: str) -> tuple[Executable, Rows]:
        return self._cancel, [{"timer_id": timer_id}]

    def reception(self, queue: str, message: Message) -> Reception:
        return self._placing.reception(queue, message)

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        return self._callers.write(connection, statement, rows)

    def explained(self, error: BaseException) -> TransactionError | None:
        return self._dialect.explained(error, self._tables)

    @kept_property
    def _insert(self) -> Insert:
        return insert(self._messages).values(**self._times()).inline().execution_options(preserve_rowcount=True)

    @kept_property
    def _insert_timer(self) -> Insert:
        timer = self._dialect.ignoring(self._messages).values(**self._times()).inline()
        return timer.execution_options(preserve_rowcount=True)

    @kept_property
    def _cancel(self) -> Executable:
        return delete(self._messages).where(
            self._messages.c.timer_id == bindparam("timer_id"),
            self._messages.c.destination == NOT_ROUTED,
            self._messages.c.done_at.is_(None),
            unleased(self._messages, self._dialect.clock()),
        )

    def _times(self) -> dict[str, ColumnElement[Any]]:
        given = bindparam("due", type_=DateTime(timezone=True))
        delay = bindparam("delay", type_=Float)
        due = case((given.is_not(None), given), else_=self._dialect.later(self._dialect.clock(), delay))
        return {"due_at": due, "expires_at": self._dialect.later(due, bindparam("expiration", type_=Float))}
