"""TransactionState: what a driver knows of the transaction on its connection, whatever SQLAlchemy believes."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any


class TransactionState(Enum):
    """Where a driver's connection is."""

    IDLE = auto()  # no transaction is open; the next statement begins one
    OPEN = auto()
    ABORTED = auto()  # a statement failed, and the database keeps nothing of the transaction, COMMIT or not
    AUTOCOMMIT = auto()  # no transaction is open; the next statement is committed by itself
    RELEASED_BY_SAVEPOINT = auto()  # SQLite: a savepoint is all that is open, and releasing it commits
    UNKNOWN = auto()  # the connection is closed, or its driver does not say


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
