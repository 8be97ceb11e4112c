"""TransactionState: what is known of a transaction whatever SQLAlchemy believes.

What the driver says of it, which text ends it, what was done on the driver's own connection, and that it has no second
connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, Transaction, TwoPhaseTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.core.callers_line import CallersLine
from outbox.core.errors import NotAtomicWarning, TransactionError


class TransactionState(Enum):
    """Where a driver's connection is."""

    IDLE = auto()  # no transaction is open; the next statement begins one
    OPEN = auto()
    ABORTED = auto()  # a statement failed, and the database keeps nothing of the transaction, COMMIT or not
    AUTOCOMMIT = auto()  # no transaction is open; the next statement is committed by itself
    RELEASED_BY_SAVEPOINT = auto()  # SQLite: a savepoint is all that is open, and releasing it commits
    UNKNOWN = auto()  # the connection is closed, or its driver does not say


# Where nothing would be atomic, and what to do.
NOT_ATOMIC = {
    TransactionState.AUTOCOMMIT: "on a connection in AUTOCOMMIT; use one with a transaction",
    TransactionState.RELEASED_BY_SAVEPOINT: (
        "in a SQLite transaction that began with a savepoint, whose release commits; call "
        "outbox.sqlite.prepare(engine) once for your engine"
    ),
}


def warn_not_atomic(where: str) -> None:
    text = f"emit {where}: the message is stored at once, whatever becomes of your data"
    CallersLine.here().warn(text, NotAtomicWarning)


# What PQtransactionStatus() answers, in psycopg and psycopg2.
_LIBPQ = {2: TransactionState.OPEN, 3: TransactionState.ABORTED}
_LIBPQ_IDLE = 0


def libpq_state(connection: Any) -> TransactionState:
    """The state of a connection of psycopg, plain or async, or of psycopg2."""
    status = int(connection.info.transaction_status)
    if status == _LIBPQ_IDLE:
        return TransactionState.AUTOCOMMIT if connection.autocommit else TransactionState.IDLE
    return _LIBPQ.get(status, TransactionState.UNKNOWN)


def begins_by_itself(connection: Any) -> bool:
    """Whether sqlite3 begins a transaction before a statement that writes. `autocommit` is new in Python 3.12.

    It may only be read in the connection's own thread.
    """
    autocommit = getattr(connection, "autocommit", -1)
    return connection.isolation_level is not None if autocommit == -1 else not autocommit


_IN_TRANSACTION = 1  # of the status that comes with each answer of MariaDB and MySQL


def mysql_status(driver: Any) -> int | None:
    """The status that came with the last answer on a connection of asyncmy or pymysql; other drivers tell none.

    asyncmy keeps the status of an earlier answer where the last one has none of the flags: its result has its own.
    A result of pymysql has one only where there are no rows.
    """
    last: int | None = getattr(getattr(driver, "_result", None), "server_status", None)
    return getattr(driver, "server_status", None) if last is None else last


# The first word of a statement decides.
FIRST_WORD = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*(?>.*?\*/))*+"  # never tried in another way: there may be many comments
    r"(?:(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b"
    r"|(ROLLBACK)\b(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b)"
    r"|(SET)\s+(?:LOCAL\s+|SESSION\s+)?(?:CHARACTERISTICS\s+AS\s+)?"
    r"(?:TRANSACTION\s[^;]*?\bISOLATION\b|(?:default_)?transaction_isolation\b))",
    re.IGNORECASE | re.DOTALL,
)


# What commits on MariaDB and MySQL, before it is carried out.
_DDL = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*(?>.*?\*/))*+"
    r"((?:CREATE|DROP)\s+(?!TEMPORARY\b)(?:OR\s+REPLACE\s+(?!TEMPORARY\b))?\w+|ALTER\s+\w+|RENAME\s+\w+|TRUNCATE\b"
    r"|GRANT\b|REVOKE\b|LOCK\s+TABLES?\b|(?:ANALYZE|OPTIMIZE|REPAIR)\s+(?:\w+\s+)?TABLES?\b)",
    re.IGNORECASE | re.DOTALL,
)
_COMMITS_AT_DDL = (
    "{words} would commit this transaction, as all DDL does on MariaDB and MySQL: message and data would not share one "
    "fate. Run it before, or in a transaction of its own"
)


# What a `;` or a word means nothing in. Two quotes in a row are two texts, and backslashes count behind an E alone.
_OPAQUE = re.compile(
    r"\bE'(?:[^'\\]|\\.|'')*+'|'[^']*+'|\"[^\"]*+\"|(?<![\w$])\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*+|/\*.*?\*/",
    re.IGNORECASE | re.DOTALL,
)
_BODY = re.compile(r"\s*CREATE\b.*\bBEGIN\b", re.IGNORECASE | re.DOTALL)  # of a function or a trigger: END closes it


def transaction_words(statement: str) -> Iterator[str]:
    """The words by which a text of one or more statements would end a transaction, begin one, or set its isolation."""
    is_body = False
    for part in _parts(statement):
        found = FIRST_WORD.match(part)
        word = None if found is None else (found[1] or found[2] or found[3]).upper()
        if is_body:
            is_body = word != "END"
        elif word is not None:
            yield word
        else:
            is_body = _BODY.match(part) is not None


def _parts(statement: str) -> list[str]:
    return [statement] if statement.find(";", 0, -1) < 0 else _OPAQUE.sub(" ", statement).split(";")


_EXECUTE = "_execute_context"  # through which a connection of SQLAlchemy sends each statement
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
    commits_at_ddl: bool = False  # what was before it


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
    if mysql_status(driver) is not None:
        return _Driver(
            pooled,
            driver.get_autocommit(),
            lambda: bool((mysql_status(driver) or 0) & _IN_TRANSACTION),
            partial(bool, True),
            int,
            commits_at_ddl=True,
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
            statement = getattr(arguments[2], "string", arguments[2])
            _refuse_end(statement)
            if self._driver.commits_at_ddl and (found := _DDL.match(statement)) is not None:
                raise TransactionError(_COMMITS_AT_DDL.format(words=" ".join(found[1].upper().split())))
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


# A session's transaction in which a message was written has no second one, which could end otherwise.
# Where a session chooses its connection by what it executes, with `binds` or a `get_bind` of its own, message and data
# would be written on two connections, and commit one after the other.

_tied: WeakKeyDictionary[SessionTransaction, Connection] = WeakKeyDictionary()


def connections_of(transaction: SessionTransaction) -> set[Connection]:
    """The connections on which a session's transaction has begun. SQLAlchemy has no public way to ask."""
    return {connection for connection, *_ in transaction._connections.values()}


def is_joined(session: Session | None, connection: Connection) -> bool:
    """Whether a session was given the connection, as by most fixtures for tests, instead of having connected itself."""
    transaction = None if session is None else session.get_transaction()
    if transaction is None or connection not in transaction._connections:
        return False
    *_, closes_it = transaction._connections[connection]
    return not closes_it


def tied(session: Session, connection: Connection) -> Connection:
    """The connection of a session's transaction, which from here on is its only one."""
    transaction = session.get_transaction()
    if transaction is not None and not session.twophase:  # in two phases several connections commit as one
        if len(connections_of(transaction)) > 1:
            raise _refusal()
        _tied[transaction] = connection
    return connection


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    if not _tied:
        return
    root = session.get_transaction()
    if root is not None and _tied.get(root, connection) is not connection:
        _let_go(transaction, connection)
        raise _refusal()


def _let_go(transaction: SessionTransaction, connection: Connection) -> None:
    """SQLAlchemy has taken note of it before it tells: if the refusal is caught, the next statement would find it."""
    _, begun, is_sessions_own, closes_it = transaction._connections.pop(connection)
    transaction._connections.pop(connection.engine, None)
    if is_sessions_own:
        begun.close()
    if closes_it:
        connection.close()


def _refusal() -> TransactionError:
    return TransactionError(
        "this session's transaction is on two connections, by its binds or its get_bind(): message and data would not "
        "share one fate. Use a session with one bind, and another session for what is read elsewhere"
    )
