"""Failures: in which transactions a statement has failed, whatever the caller made of the error."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, ExceptionContext, Transaction, event

from outbox.core.errors import TransactionError

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
