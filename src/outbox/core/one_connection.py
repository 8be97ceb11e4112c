"""One connection: a session's transaction in which a message was written has no second one, which could end otherwise.

Where a session chooses its connection by what it executes, with `binds` or a `get_bind` of its own, message and data
would be written on two connections, and commit one after the other.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.core.errors import TransactionError

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
