"""Losing: a connection that is lost under a listener's transaction, before its COMMIT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from outbox.inbound.inbox import CommitUnknown, NotStarted


class ConnectionLost(Exception):
    """The connection was lost before COMMIT was sent: nothing of the transaction is kept, and it can run again."""

    def __init__(self, error: Exception) -> None:
        super().__init__("the connection was lost before COMMIT")
        self.error = error  # how it was noticed


@contextmanager
def noticing_loss(connection: Connection, is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Around what happens on a connection between BEGIN and the answer to COMMIT.

    It is the connection that counts, not the error: a listener may wrap an error or catch it, and one that comes from
    its own call of something else is its own failure. `is_over` says whether its time was over, and it was cut off.
    """
    try:
        yield
    except (NotStarted, CommitUnknown):
        raise  # known already
    except Exception as error:
        if is_over() or _was_cut(error) or not _is_lost(connection, error):
            raise
        raise ConnectionLost(error) from error


def _is_lost(connection: Connection, error: Exception) -> bool:
    if connection.invalidated or connection.closed:
        return connection.invalidated
    # Errors of the socket are not the driver's own: SQLAlchemy hands them on and leaves the connection as it is.
    return connection.dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]


def _was_cut(error: BaseException | None) -> bool:
    """Whether it began with a cancellation: that of a statement costs its connection, and is the listener's doing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, asyncio.CancelledError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
