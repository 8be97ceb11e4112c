"""Commits: what is done when the caller's transaction has committed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.core.errors import NotAtomicWarning, TransactionError

Action = Callable[[], None]


class Hook(Protocol):
    """What a caller wants done after the commit. It does not raise."""

    def run(self) -> None: ...

    async def run_and_await(self) -> None: ...


@dataclass(slots=True)
class Waiting:
    """What waits for the end of one transaction or savepoint."""

    actions: list[Action] = field(default_factory=list)
    hooks: list[Hook] = field(default_factory=list)

    def take(self, other: Waiting) -> None:
        self.actions += other.actions
        self.hooks += other.hooks


class Commits:
    """One session's transactions, savepoint by savepoint."""

    def __init__(self) -> None:
        self.keeps_hooks = False  # for somebody who runs them later
        self._waiting: dict[SessionTransaction, Waiting] = {}
        self._committed: list[Hook] = []

    def waiting(self, transaction: SessionTransaction) -> Waiting:
        found = self._waiting.get(transaction)
        if found is None:
            found = self._waiting[transaction] = Waiting()
        return found

    def committed(self, transaction: SessionTransaction) -> None:
        waiting = self._waiting.pop(transaction, None)
        if waiting is None:
            return
        if transaction.parent is not None:  # a released savepoint shares the fate of what is around it
            self.waiting(transaction.parent).take(waiting)
            return
        self._committed += waiting.hooks
        for action in waiting.actions:
            action()

    def rolled_back(self, transaction: SessionTransaction) -> None:
        self._waiting.pop(transaction, None)

    def ended(self, transaction: SessionTransaction) -> None:
        waiting = self._waiting.pop(transaction, None)  # neither committed nor rolled back
        if transaction.parent is not None:
            return
        if waiting is not None and waiting.actions:
            _warn_of_forgotten_commit(len(waiting.actions))
        if not self.keeps_hooks:
            for hook in self.taken():
                hook.run()

    def taken(self) -> list[Hook]:
        """The hooks of what has committed, for whoever runs them now."""
        taken, self._committed = self._committed, []
        return taken


_KEY = "outbox"  # in what a session carries with it: there it is forgotten together with the session


def commits_of(session: Session) -> Commits:
    """What is known of a session's transactions."""
    found: Commits | None = session.info.get(_KEY)
    if found is None:
        found = session.info[_KEY] = Commits()
    return found


def waiting_in(session: Session) -> Waiting:
    """What waits for the end of the savepoint in which a session is, or of its transaction."""
    transaction = _innermost(session)
    if transaction is None:
        raise TransactionError("the session has no transaction yet: begin one with `session.begin()`, or write first")
    return commits_of(session).waiting(transaction)


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


_pending: WeakKeyDictionary[Connection, list[Action]] = WeakKeyDictionary()


def after_commit(session: Session | Connection, action: Action) -> None:
    """Call the action once the outermost transaction has committed; never if it rolls back."""
    if isinstance(session, Session):
        waiting_in(session).actions.append(action)
        return
    pending = _pending.get(session)
    if pending is None:
        pending = _pending[session] = []
        event.listen(session, "commit", _connection_committed)
        event.listen(session, "rollback", _connection_rolled_back)
    pending.append(action)


# For all sessions at once: a session lives for a transaction, and to listen to each costs more than to pass over most.


@event.listens_for(Session, "after_commit")
def _session_committed(session: Session) -> None:
    commits = session.info.get(_KEY)
    if commits is not None and (transaction := _innermost(session)) is not None:
        commits.committed(transaction)


@event.listens_for(Session, "after_rollback")
def _session_rolled_back(session: Session) -> None:
    commits = session.info.get(_KEY)
    if commits is not None and (transaction := _innermost(session)) is not None:
        commits.rolled_back(transaction)


@event.listens_for(Session, "after_transaction_end")
def _session_transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    commits = session.info.get(_KEY)
    if commits is not None:
        commits.ended(transaction)


def _warn_of_forgotten_commit(count: int) -> None:
    warnings.warn(
        f"a session was closed without commit after {count} emit(s): neither messages nor data were stored. "
        "Call `await session.commit()`, or begin with `async with session.begin()`; if this was meant, say "
        "`await session.rollback()`",
        NotAtomicWarning,
        stacklevel=3,
    )


def _connection_committed(connection: Connection) -> None:
    actions, _pending[connection] = _pending[connection], []
    for action in actions:
        action()


def _connection_rolled_back(connection: Connection) -> None:
    _pending[connection].clear()
