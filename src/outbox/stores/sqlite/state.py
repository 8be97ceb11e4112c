"""What SQLite's drivers know of a transaction.

SQLite rolls some transactions back by itself: when the disk is full, on ON CONFLICT ROLLBACK, RAISE(ROLLBACK) or an
interrupt. And where its driver begins transactions, a savepoint that comes first is a transaction of its own.
SQLAlchemy knows of neither. Both are seen by comparing the driver before and after each statement.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, ExceptionContext, Transaction, event
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.util import await_only

from outbox.core.forks import ForkableLock
from outbox.core.transaction_state import TransactionState, begins_by_itself

sharing = ForkableLock()  # held while a store works on the one connection of a database in memory, in its thread
shared: WeakSet[Any] = WeakSet()  # these connections
_was_open: WeakKeyDictionary[Transaction, bool] = WeakKeyDictionary()  # before its last statement
_rolled_back: WeakSet[Transaction] = WeakSet()  # by SQLite
_savepoint_first: WeakSet[Transaction] = WeakSet()

_ENDING = tuple("CcEe")  # how COMMIT and END begin, and few other statements


def is_open(driver: Any) -> bool:
    """Whether a caller's transaction is open on a driver's connection: a store's own is over when this looks."""
    with sharing if driver in shared else nullcontext():
        return bool(driver.in_transaction)


def state_of(connection: Connection) -> TransactionState:
    """The state of a connection."""
    transaction = connection.get_transaction()
    if transaction in _rolled_back:
        return TransactionState.ABORTED
    if transaction in _savepoint_first:
        return TransactionState.RELEASED_BY_SAVEPOINT
    driver: Any = connection.connection.driver_connection
    if is_open(driver):
        return TransactionState.OPEN
    will_begin = transaction is None and any(True for _ in connection.dispatch.begin)  # such as that of `prepare`
    return TransactionState.IDLE if will_begin or _begins_by_itself(driver) else TransactionState.AUTOCOMMIT


def is_rolled_back(connection: Connection) -> bool:
    """Whether SQLite has rolled the connection's transaction back by itself, at a statement of the driver's too."""
    transaction = connection.get_transaction()
    if transaction in _rolled_back:
        return True
    if transaction is None or transaction in _savepoint_first:
        return False
    driver: Any = connection.connection.driver_connection
    return _was_open.get(transaction, False) and not is_open(driver)


def _begins_by_itself(driver: Any) -> bool:
    if hasattr(driver, "_conn"):  # of aiosqlite, whose connection is read in its own thread
        return bool(await_only(driver._execute(begins_by_itself, driver._conn)))
    return begins_by_itself(driver)


@event.listens_for(SQLiteDialect, "do_execute")
@event.listens_for(SQLiteDialect, "do_executemany")
def _executing(cursor: object, statement: str, parameters: object, context: Any) -> None:
    transaction = None if context is None else context.root_connection.get_transaction()
    if transaction is None:
        return
    driver = context.root_connection.connection.driver_connection
    if not hasattr(driver, "in_transaction"):  # another dialect that is made from SQLite's, and no store is for it
        return
    now_open = is_open(driver)
    if not now_open and _was_open.get(transaction) and transaction not in _savepoint_first:
        _rolled_back.add(transaction)  # at a statement of the driver's; with this one it may begin another
    _was_open[transaction] = now_open and statement[:1] not in _ENDING  # a caller's own COMMIT is no rollback
    if not now_open and statement.startswith("SAVEPOINT"):
        _savepoint_first.add(transaction)


@event.listens_for(SQLiteDialect, "handle_error")
def _failed(context: ExceptionContext) -> None:
    connection = context.connection
    transaction = None if connection is None else connection.get_transaction()
    if connection is None or transaction is None or not _was_open.get(transaction) or connection.invalidated:
        return
    driver: Any = connection.connection.driver_connection
    if not is_open(driver):
        _rolled_back.add(transaction)
