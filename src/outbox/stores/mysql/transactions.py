"""Transactions: what the server and its drivers tell of a caller's, and what an error has done to it.

A failed statement is rolled back alone. After a deadlock the server has rolled back everything, the savepoints too,
and the next statement begins another transaction without a word: a COMMIT would keep the second half of the caller's
work. So an error of that kind is remembered for as long as SQLAlchemy believes in the transaction.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, ExceptionContext, Executable, Insert, Transaction, event
from sqlalchemy.pool import Pool, PoolResetState
from sqlalchemy.pool.base import ResetStyle

from outbox.core.errors import TransactionError
from outbox.core.transaction_state import TransactionState, mysql_status
from outbox.stores.mysql.shapes import DIALECTS

DUPLICATE = 1062
DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205
CHANGED_SINCE_SNAPSHOT = 1020  # with MariaDB's innodb_snapshot_isolation
MISSING_TABLE = 1146
MISSING_DATABASE = 1049
READ_ONLY = (1290, 1792, 1836)  # a replica, transactions that are READ ONLY by default, a server that writes nothing
DENIED = (1044, 1142)  # to this role

_PASSES_OVER = {"outbox_passes_over": True}

_ROLLED_BACK = (DEADLOCK, CHANGED_SINCE_SNAPSHOT, 1613, 1614)  # the last two within XA
CONFLICTS = (DEADLOCK, LOCK_WAIT_TIMEOUT, CHANGED_SINCE_SNAPSHOT)

# Of the status that comes with each answer.
_IN_TRANSACTION, _AUTOCOMMIT, _NO_BACKSLASH_ESCAPES = 1, 2, 512

_rolled_back: WeakSet[Transaction] = WeakSet()
_waited_too_long: WeakSet[Transaction] = WeakSet()
_loses_all: WeakKeyDictionary[Pool, bool] = WeakKeyDictionary()
_keeps: WeakKeyDictionary[Pool, bool] = WeakKeyDictionary()


def passing_over(statement: Insert) -> Insert:
    """An INSERT whose error says that a unique index has the row, which is an answer."""
    return statement.execution_options(**_PASSES_OVER)


def passes_over(statement: Executable) -> bool:
    return "outbox_passes_over" in statement.get_execution_options()


def error_number(error: BaseException | None) -> int | None:
    """The server's number of an error, as each driver has it."""
    first = error.args[0] if error is not None and error.args else None
    return first if type(first) is int else None


def is_read_only(error: BaseException) -> bool:
    """Whether the server takes no writes. 1290 has other reasons, too.

    A listener cannot make its transaction READ ONLY, because it has begun: its session is so by default.
    """
    number, words = error_number(error), str(error).lower()
    return number in READ_ONLY and (number != READ_ONLY[0] or "read-only" in words or "read_only" in words)


def leave_replicas(engine: Engine) -> None:
    """Let go of connections that lead to such a server: after a failover the next ones lead to the one that writes."""
    event.listen(engine, "handle_error", _left)


def _left(context: ExceptionContext) -> None:
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def roll_back_what_is_open(pool: Pool) -> None:
    """Let a connection come back without a ROLLBACK where the server's last answer says that no transaction is open.

    After each COMMIT there would be a round trip for nothing. It is for asyncmy: other drivers do not know the state
    after an answer with rows.
    """
    pool._reset_on_return = ResetStyle.reset_none
    if not event.contains(pool, "reset", _roll_back_if_open):
        event.listen(pool, "reset", _roll_back_if_open)


def _roll_back_if_open(connection: Any, record: Any, state: PoolResetState) -> None:
    if state.terminate_only or not state.asyncio_safe or state.transaction_was_reset:
        return
    status = mysql_status(record.driver_connection)
    if status is None or status & _IN_TRANSACTION:
        connection.rollback()


def check_escapes(connection: Connection) -> None:
    """Refuse asyncmy where a backslash escapes nothing: it would store one before each quote of a body."""
    driver: Any = connection.connection.driver_connection
    if type(driver).__module__.startswith("asyncmy") and driver.server_status & _NO_BACKSLASH_ESCAPES:
        raise TransactionError(
            "asyncmy writes bytes wrongly in the sql_mode NO_BACKSLASH_ESCAPES: take it out of the session's sql_mode, "
            "or emit through pymysql"
        )


@event.listens_for(Engine, "handle_error")
def _failed(context: ExceptionContext) -> None:
    if context.dialect.name not in DIALECTS or context.connection is None:
        return
    transaction, number = context.connection.get_transaction(), error_number(context.original_exception)
    if transaction is None:
        return
    if number in _ROLLED_BACK:
        _rolled_back.add(transaction)
    elif number == LOCK_WAIT_TIMEOUT:
        _waited_too_long.add(transaction)


def is_rolled_back(connection: Connection) -> bool:
    """Whether the server has rolled the connection's transaction back by itself."""
    transaction = connection.get_transaction()
    if transaction is None:
        return False
    if transaction in _waited_too_long:
        _waited_too_long.discard(transaction)
        if _asked(connection, _loses_all, "innodb_rollback_on_timeout"):
            _rolled_back.add(transaction)
    return transaction in _rolled_back


def keeps_snapshot(connection: Connection) -> bool:
    """Whether a row that was written since the transaction began cannot be written by it.

    InnoDB reads anew what it writes, whatever the level of isolation is, unless MariaDB is told to compare.
    """
    return _asked(connection, _keeps, "innodb_snapshot_isolation")


def _asked(connection: Connection, known: WeakKeyDictionary[Pool, bool], variable: str) -> bool:
    """Whether a variable of the server is on. One that it does not have is off."""
    pool = connection.engine.pool
    found = known.get(pool)
    if found is None:
        row = connection.exec_driver_sql(f"SHOW VARIABLES LIKE '{variable}'").first()
        found = known[pool] = row is not None and str(row[1]).upper() in ("ON", "1")
    return found


def state_of(connection: Connection) -> TransactionState:
    """The state of a connection, by the server's last answer. mysqlclient does not hand it out."""
    if connection.get_transaction() in _rolled_back:
        return TransactionState.ABORTED
    driver: Any = connection.connection.driver_connection
    status = mysql_status(driver)
    if status is None:
        return TransactionState.UNKNOWN
    if status & _IN_TRANSACTION:
        return TransactionState.OPEN
    return TransactionState.AUTOCOMMIT if status & _AUTOCOMMIT else TransactionState.IDLE
