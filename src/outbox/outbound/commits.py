"""Commits: what is done when the caller's transaction has committed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.core.errors import NotAtomicWarning

Actions = list[Callable[[], None]]

_pending: WeakKeyDictionary[Session | Connection, Actions] = WeakKeyDictionary()


def after_commit(session: Session | Connection, action: Callable[[], None]) -> None:
    """Call the action once the outermost transaction has committed; never if it rolls back."""
    pending = _pending.get(session)
    if pending is None:
        pending = _pending[session] = []
        if isinstance(session, Connection):
            event.listen(session, "commit", _connection_committed)
            event.listen(session, "rollback", _connection_rolled_back)
    pending.append(action)


# For all sessions at once: a session lives for a transaction, and to listen to each costs more than to pass over most.


@event.listens_for(Session, "after_commit")
def _session_committed(session: Session) -> None:
    if session in _pending and not session.in_nested_transaction():  # a released savepoint has committed nothing yet
        _run(session)


@event.listens_for(Session, "after_rollback")
def _session_rolled_back(session: Session) -> None:
    if session in _pending and not session.in_nested_transaction():  # a savepoint takes its own, others may remain
        _pending[session].clear()


@event.listens_for(Session, "after_transaction_end")
def _session_transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    pending = _pending.get(session)
    if pending and transaction.parent is None:
        count = len(pending)
        pending.clear()
        warnings.warn(
            f"a session was closed without commit after {count} emit(s): neither messages nor data were stored. "
            "Call `await session.commit()`, or begin with `async with session.begin()`; if this was meant, say "
            "`await session.rollback()`",
            NotAtomicWarning,
            stacklevel=2,
        )


def _connection_committed(connection: Connection) -> None:
    _run(connection)


def _connection_rolled_back(connection: Connection) -> None:
    _pending[connection].clear()


def _run(session: Session | Connection) -> None:
    actions, _pending[session] = _pending[session], []
    for action in actions:
        action()
