"""Callers: what a store does on a caller's connection, in the caller's transaction, and what it knows of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    DateTime,
    Engine,
    ExceptionContext,
    Executable,
    Float,
    Insert,
    String,
    Transaction,
    bindparam,
    case,
    delete,
    event,
    exists,
    insert,
    select,
)

from outbox.core.attempt import Reason
from outbox.core.errors import TransactionError, causes
from outbox.core.kept_property import kept_property
from outbox.core.message import Message, Schedule
from outbox.core.roles import Setback
from outbox.core.store import Reception, Rows, Statement
from outbox.core.transaction_state import (
    ENDED_ON_DRIVER,
    NOT_ATOMIC,
    TransactionState,
    warn_not_atomic,
    watched_driver,
)
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import unleased
from outbox.stores.rows import GIVEN, as_seconds, history_line, message_row, placed_row
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, TIMER_ONCE, Tables

IN_FAILED_TRANSACTION = "25P02"  # how PostgreSQL refuses everything after a failure
_ON_DRIVER = "on the driver's own connection"

# Only the text: an error holds on to the frames it passed through, and by them to the transaction.
_failures: WeakKeyDictionary[Transaction, str] = WeakKeyDictionary()


def failure_in(connection: Connection) -> str | None:
    """The last failure of a statement in the connection's transaction; it may have been in a savepoint."""
    transaction = connection.get_transaction()
    return None if transaction is None else _failures.get(transaction)


def nothing_is_kept(connection: Connection) -> TransactionError:
    """What to tell the owner of an aborted transaction."""
    failure = failure_in(connection) or _ON_DRIVER
    return TransactionError(
        f"a statement failed in this transaction ({failure}), and the database keeps nothing of it, although the error "
        "was caught: let the error out, or run what may fail in `session.begin_nested()`"
    )


@event.listens_for(Engine, "handle_error")
def _failed(context: ExceptionContext) -> None:
    if context.connection is not None and (transaction := context.connection.get_transaction()) is not None:
        error = context.original_exception
        if getattr(error, "sqlstate", None) == IN_FAILED_TRANSACTION:
            _failures.setdefault(transaction, _ON_DRIVER)
            return
        _failures[transaction] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


Schemas = Mapping[str | None, str | None]  # what a table's schema is called in statements


class _Qualified:
    """For `execute` alone. A map of the caller's own does not count there."""

    def __init__(self, connection: Connection, schemas: Schemas) -> None:
        self._connection = connection
        self._options = naming(schemas)

    def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters, execution_options=self._options)


def qualified(connection: Connection, schemas: Schemas) -> Connection:
    """The connection, for executing statements on our own tables."""
    return cast(Connection, _Qualified(connection, schemas))


def naming(schemas: Schemas) -> dict[str, Any]:
    """The option for a connection, or for one execution, with which tables are looked for in these schemas."""
    return {"schema_translate_map": schemas}


class CallerConnections:
    """Executes on a caller's connection, never commits there, and leaves it as the database leaves it."""

    def on(self, connection: Connection) -> Connection:
        """A caller's connection, for statements on our own tables whatever the caller set it to."""
        return connection

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute a statement; how many rows it wrote."""
        return execute(self.on(connection), statement, rows)


def execute(connection: Connection, statement: Executable, rows: Rows | None) -> int:
    """One row goes as a plain statement, several as one batch."""
    return connection.execute(statement, rows[0] if rows and len(rows) == 1 else rows).rowcount


class SqlTransactions:
    """Answers from what SQLAlchemy and the driver know; a round trip only where there is doubt."""

    def __init__(self, dialect: SqlDialect, runner: Runner) -> None:
        self._dialect = dialect
        self._runner = runner

    @property
    def writes_side_by_side(self) -> bool:
        return self._runner.writes_side_by_side

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        return self._runner.turn(for_caller=for_caller)

    def setback(self, error: BaseException) -> Setback | None:
        raised = list(causes(error))
        if any(map(self._dialect.is_read_only, raised)):
            return Setback.READ_ONLY
        return Setback.CONFLICT if any(map(self._dialect.is_own_conflict, raised)) else None

    def keeps_snapshot(self, connection: Connection) -> bool:
        return self._dialect.keeps_snapshot(connection)

    def state_of(self, connection: Connection) -> TransactionState:
        if connection.closed or connection.invalidated:
            return TransactionState.UNKNOWN
        level = connection.get_execution_options().get("isolation_level")
        if level is None:
            level = getattr(connection.dialect, "_on_connect_isolation_level", None)
        return TransactionState.AUTOCOMMIT if level == "AUTOCOMMIT" else self._dialect.driver_state_of(connection)

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        return self._dialect.query_counter(connection)

    def aborted(self, connection: Connection, *, in_doubt: bool = False) -> TransactionError | None:
        if connection.closed or connection.invalidated:
            return None
        driver = watched_driver(connection)
        if driver is not None:
            if driver.has_ended():
                return TransactionError(ENDED_ON_DRIVER)
            in_doubt = in_doubt or driver.was_used()
        in_doubt = in_doubt or failure_in(connection) is not None
        return nothing_is_kept(connection) if self._dialect.is_aborted(connection, in_doubt=in_doubt) else None

    def judge(self, connection: Connection) -> None:
        """Warn of a write that would be stored at once, and refuse one of which the database would keep nothing."""
        where = NOT_ATOMIC.get(self.state_of(connection))
        if where is not None:
            warn_not_atomic(where)
        aborted = self.aborted(connection)
        if aborted is not None:
            raise aborted

    def isolation(self, level: str) -> Mapping[str, Any]:
        return self._dialect.isolation(level)


class PlacingStatements:
    """Statements that store messages in their queues."""

    def __init__(self, tables: Tables, dialect: SqlDialect) -> None:
        self._tables = tables
        self._dialect = dialect

    def place_all(self, connection: Connection, rows: Rows) -> None:
        """Write messages that have their queues, as one batch."""
        connection.execute(self.place, rows)

    def reception(self, queue: str, message: Message) -> Reception:
        """The statements for one message, in the caller's transaction."""
        placed = placed_row(queue, message)

        def bury(reason: Reason, error: str) -> Statement:
            because = {"reason": reason.value, "error": error, "history": history_line("not delivered", error)}
            return self._bury, [placed | because]

        return Reception(
            enter=(self._enter, [{"queue": queue, "message_id": message.id}]),
            place=(self.place, [placed]),
            place_if_bound=(self._place_if_bound, [placed]),
            bury=bury,
        )

    @kept_property
    def _enter(self) -> Any:
        entry = self._dialect.ignoring(self._tables.inbox).values(entered_at=self._dialect.clock())
        return entry.execution_options(preserve_rowcount=True)

    @kept_property
    def place(self) -> Any:
        """Stores messages in their queues, due at once."""
        placing = insert(self._tables.messages).values(self._in_queue()).inline()
        return placing.execution_options(preserve_rowcount=True)

    @kept_property
    def _place_if_bound(self) -> Any:
        bindings = self._tables.bindings
        columns = self._as_given() | self._in_queue()
        bound = exists().where(bindings.c.queue == bindparam("queue", type_=String))
        source = select(*columns.values()).where(bound)
        placing = insert(self._tables.messages).from_select(list(columns), source)
        return placing.execution_options(preserve_rowcount=True)

    @kept_property
    def _bury(self) -> Any:
        died = {"died_at": self._dialect.clock()}
        burying = insert(self._tables.dead_letters).values(self._in_queue() | died).inline()
        return burying.execution_options(preserve_rowcount=True)

    def _in_queue(self) -> dict[str, ColumnElement[Any]]:
        return {
            "destination": bindparam("queue", type_=String),
            "expires_at": bindparam("expires", type_=DateTime(timezone=True)),
            "due_at": self._dialect.clock(),
            "routed_at": self._dialect.clock(),
        }

    def _as_given(self) -> dict[str, ColumnElement[Any]]:
        columns = self._tables.messages.c
        return {name: bindparam(name, type_=columns[name].type) for name in GIVEN}


class SqlWriting:
    """Messages in, timers out."""

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        callers: CallerConnections,
        transactions: SqlTransactions,
        placing: PlacingStatements,
    ) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._callers = callers
        self._transactions = transactions
        self._placing = placing

    def emit(self, connection: Connection, messages: Sequence[Message], schedule: Schedule) -> bool:
        self._transactions.judge(connection)
        written = self.write(connection, *self.insert(messages, schedule))
        return schedule.timer_id is None or written > 0

    def cancel_timer(self, connection: Connection, timer_id: str) -> bool:
        self._transactions.judge(connection)
        return self.write(connection, *self.cancel(timer_id)) > 0

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

    def is_already_there(self, error: BaseException) -> bool:
        return self._dialect.is_already_there(error)

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
        free = unleased(self._messages, self._dialect.clock())
        return delete(self._messages).where(*self._waiting_timer, free)

    @property
    def _waiting_timer(self) -> tuple[ColumnElement[bool], ...]:
        """Conditions by which an index finds it."""
        columns, timer_id = self._messages.c, bindparam("timer_id", type_=String)
        if TIMER_ONCE in columns:
            return (columns[TIMER_ONCE] == timer_id,)
        return columns.timer_id == timer_id, columns.destination == NOT_ROUTED, columns.done_at.is_(None)

    def _times(self) -> dict[str, ColumnElement[Any]]:
        given = bindparam("due", type_=DateTime(timezone=True))
        delay = bindparam("delay", type_=Float)
        due = case((given.is_not(None), given), else_=self._dialect.later(self._dialect.clock(), delay))
        return {"due_at": due, "expires_at": self._dialect.later(due, bindparam("expiration", type_=Float))}
