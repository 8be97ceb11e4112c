"""Driver use: what was done on the driver's own connection, of which SQLAlchemy does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from sqlalchemy import Connection, Transaction, TwoPhaseTransaction

from outbox.core.errors import TransactionError
from outbox.core.transaction_words import FIRST_WORD, transaction_words

_EXECUTE = "_execute_context"  # through which a connection of SQLAlchemy sends each statement
_LIBPQ_IDLE = 0  # what PQtransactionStatus() answers
_OPEN_STILL = ("BEGIN", "START", "SET")  # words after which the transaction goes on

ENDED_ON_DRIVER = (
    "this transaction was ended on the driver's own connection, or that was closed, and SQLAlchemy does not know: what "
    "was written before is not in it any more, and what would be written now would be another one. Leave the end to "
    "commit() and rollback() of the session"
)


def query_counter(connection: Connection) -> Callable[[], int] | None:
    """What asyncpg counts: it tells of queries that SQLAlchemy did not send. Other drivers know the state anyway."""
    driver: Any = connection.connection.driver_connection
    protocol: Any = getattr(driver, "_protocol", None)
    return partial(getattr, protocol, "queries_count") if hasattr(protocol, "queries_count") else None


def watch_driver(connection: Connection) -> None:
    """From here on look at the driver before and after each statement, if it tells anything."""
    own = vars(connection)
    if _EXECUTE not in own and (driver := _driver_of(connection)) is not None:
        own[_EXECUTE] = WatchedDriver(connection, driver)


def watched_driver(connection: Connection) -> WatchedDriver | None:
    """What is known of a connection that is watched."""
    executing = vars(connection).get(_EXECUTE)
    return executing if isinstance(executing, WatchedDriver) else None


class _Driver(NamedTuple):
    """What a driver tells of a connection without a round trip."""

    pooled: object  # what the pool calls it
    is_autocommit: bool
    is_open: Callable[[], bool]  # its transaction
    has_something_to_commit: Callable[[], bool]  # otherwise its commit() does nothing, on a closed connection too
    sent: Callable[[], int]  # how many queries


def _driver_of(connection: Connection) -> _Driver | None:
    pooled: Any = connection.connection
    driver: Any = pooled.driver_connection
    count = query_counter(connection)
    if count is not None:
        own: Any = pooled.dbapi_connection
        return _Driver(
            pooled,
            own.autocommit,
            driver._protocol.is_in_transaction,
            lambda: own._transaction is not None,
            count,
        )
    info: Any = getattr(driver, "info", None)  # of psycopg and psycopg2
    if not hasattr(info, "transaction_status"):
        return None
    return _Driver(
        pooled,
        driver.autocommit,
        lambda: info.transaction_status != _LIBPQ_IDLE,
        partial(bool, True),
        int,  # it counts none
    )


class WatchedDriver:
    """Sends a connection's statements, and sees whether its transaction is still the one that SQLAlchemy has begun."""

    __slots__ = ("_connection", "_driver", "_has_ended", "_queries", "_transaction")

    def __init__(self, connection: Connection, driver: _Driver) -> None:
        self._connection = ref(connection)
        self._driver = driver
        self._transaction: Callable[[], Transaction | None] = _none  # SQLAlchemy's, for which the driver had begun one
        self._has_ended = False
        self._look(connection)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        connection: Any = self._connection()  # it is the one that calls
        transaction = self._transaction()
        if transaction is not None and transaction is connection.get_transaction():
            if self._has_ended or not self._driver.is_open():
                self._has_ended = True
                raise TransactionError(ENDED_ON_DRIVER)
            _refuse_end(getattr(arguments[2], "string", arguments[2]))
        try:
            return type(connection)._execute_context(connection, *arguments, **options)
        finally:
            self._look(connection)

    def has_ended(self) -> bool:
        """Whether the transaction that SQLAlchemy believes in was ended without it."""
        transaction, connection = self._transaction(), self._connection()
        if transaction is None or connection is None or transaction is not connection.get_transaction():
            return False
        return self._has_ended or not (self._driver.is_open() and self._driver.has_something_to_commit())

    def was_used(self) -> bool:
        """Whether it has sent a query since SQLAlchemy's last statement."""
        return self._driver.sent() != self._queries

    def _look(self, connection: Connection) -> None:
        """Take note of what it has counted, and of the transaction that it has open."""
        transaction = connection.get_transaction()
        if transaction is not self._transaction():
            self._transaction, self._has_ended = _none, False
            if transaction is not None and not connection.invalidated:
                self._begun(connection, transaction)
        elif transaction is not None and not self._driver.is_open():
            self._has_ended = True
        self._queries = self._driver.sent()

    def _begun(self, connection: Connection, transaction: Transaction) -> None:
        if self._driver.pooled is not connection.connection:
            self._driver = _driver_of(connection) or self._driver
        # In two phases the driver's transaction ends before SQLAlchemy's does.
        is_judged = not (self._driver.is_autocommit or isinstance(transaction, TwoPhaseTransaction))
        if is_judged and self._driver.is_open():
            self._transaction = ref(transaction)


def _none() -> None:
    return None


def _refuse_end(statement: str) -> None:
    if FIRST_WORD.match(statement) is None and statement.find(";", 0, -1) < 0:
        return
    for word in transaction_words(statement):
        if not word.startswith(_OPEN_STILL):
            raise TransactionError(
                f"the text {word} would end a transaction without SQLAlchemy's knowledge, which goes on to commit it "
                "and to call what waits for that: call commit() or rollback() of the session, and run what may fail in "
                "`session.begin_nested()`"
            )
