"""What PostgreSQL's drivers know of a transaction, and what only the server knows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outbox.core.transaction_state import TransactionState, libpq_state
from outbox.stores.failures import IN_FAILED_TRANSACTION


def state_of(connection: Connection) -> TransactionState:
    """The state of a connection. asyncpg says of an aborted transaction that it is open."""
    pooled: Any = connection.connection
    driver = pooled.driver_connection
    if not hasattr(driver, "is_in_transaction"):
        return libpq_state(driver) if hasattr(driver, "info") else TransactionState.UNKNOWN
    if driver.is_closed():
        return TransactionState.UNKNOWN
    if driver.is_in_transaction():
        return TransactionState.OPEN
    return TransactionState.AUTOCOMMIT if pooled.dbapi_connection.autocommit else TransactionState.IDLE


def is_aborted(connection: Connection, *, in_doubt: bool) -> bool:
    """Whether COMMIT would be answered by ROLLBACK. Asks the server if there is doubt and the driver cannot say."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "is_in_transaction"):
        return in_doubt and state_of(connection) is TransactionState.OPEN and _refuses(connection)
    return state_of(connection) is TransactionState.ABORTED


def _refuses(connection: Connection) -> bool:
    try:
        connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == IN_FAILED_TRANSACTION:
            return True
        raise
    return False
