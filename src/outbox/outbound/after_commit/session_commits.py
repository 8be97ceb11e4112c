"""SessionCommits: what is done when the caller's transaction has committed."""

from __future__ import annotations

import warnings

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.core.errors import NotAtomicWarning, TransactionError
from outbox.core.transaction_state import connections_of, watch_driver
from outbox.outbound.after_commit.connection_commits import commits_on, waiting_on
from outbox.outbound.after_commit.waiting import Aborted, Action, Hook, Waiting


class SessionCommits:
    """One session's transactions, savepoint by savepoint."""

    def __init__(self) -> None:
        self.aborted: Aborted | None = None  # asked before a commit
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
        outer = next((each for each in connections_of(transaction) if each.in_transaction()), None)
        if outer is not None:  # the session was joined to a transaction of its connection, and that goes on
            waiting_on(outer).take(waiting)
            if self.aborted is not None:
                guard(outer, self.aborted)
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


def commits_of(session: Session) -> SessionCommits:
    """What is known of a session's transactions."""
    found: SessionCommits | None = session.info.get(_KEY)
    if found is None:
        found = session.info[_KEY] = SessionCommits()
    return found


def waiting_in(session: Session) -> Waiting:
    """What waits for the end of the savepoint in which a session is, or of its transaction."""
    transaction = _innermost(session)
    if transaction is None:
        raise TransactionError("the session has no transaction yet: begin one with `session.begin()`, or write first")
    return commits_of(session).waiting(transaction)


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


def guard(session: Session | Connection, aborted: Aborted) -> None:
    """Let the commit fail, instead of do nothing in silence, if the database would keep nothing of the transaction."""
    if isinstance(session, Session):
        commits = commits_of(session)
        transaction = session.get_transaction() if commits.aborted is None else None
        commits.aborted = aborted
        for connection in () if transaction is None else connections_of(transaction):
            watch_driver(connection)
    else:
        commits_on(session).aborted = aborted
        watch_driver(session)


def after_commit(session: Session | Connection, action: Action) -> None:
    """Call the action once the outermost transaction has committed; never if it rolls back."""
    waiting = waiting_in(session) if isinstance(session, Session) else waiting_on(session)
    waiting.actions.append(action)


# For all sessions at once: a session lives for a transaction, and to listen to each costs more than to pass over most.


@event.listens_for(Session, "after_begin")
def _session_began(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    commits = session.info.get(_KEY)
    if commits is not None and commits.aborted is not None:
        watch_driver(connection)


@event.listens_for(Session, "before_commit")
def _session_committing(session: Session) -> None:
    commits = session.info.get(_KEY)
    if commits is None or commits.aborted is None:
        return
    transaction = _innermost(session)
    if transaction is None or transaction.parent is not None:
        return
    for connection in connections_of(transaction):
        error = commits.aborted(connection)
        if error is not None:
            commits.rolled_back(transaction)
            raise error


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
