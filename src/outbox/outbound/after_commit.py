"""AfterCommit: what is done when the caller's transaction has committed, on a session or on a connection alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from outbox.core.callables import is_async
from outbox.core.callers_line import CallersLine
from outbox.core.errors import NotAtomicWarning, TransactionError
from outbox.core.events import HookFailed, Observer
from outbox.core.loops import cancelled_from_outside
from outbox.core.transaction_state import connections_of, watch_driver

Action = Callable[[], None]
Aborted = Callable[[Connection], TransactionError | None]  # why the database would keep nothing of a transaction


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

    def run(self) -> None:
        """The transaction has committed."""
        for action in self.actions:
            action()
        for hook in self.hooks:
            hook.run()


class ConnectionCommits:
    """One connection's transaction, savepoint by savepoint. The event of a savepoint does not tell its name."""

    def __init__(self) -> None:
        self.aborted: Aborted | None = None  # asked before a commit
        self._levels = [Waiting()]

    @property
    def innermost(self) -> Waiting:
        return self._levels[-1]

    def began(self) -> None:
        self._levels.append(Waiting())

    def released(self) -> None:
        if len(self._levels) > 1:  # otherwise it was begun before there was anything to wait for
            ended = self._levels.pop()
            self.innermost.take(ended)

    def rolled_back_to(self) -> None:
        if len(self._levels) > 1:
            self._levels.pop()
        else:
            self.rolled_back()

    def rolled_back(self) -> None:
        self._levels = [Waiting()]

    def committed(self) -> None:
        while len(self._levels) > 1:
            self.released()
        everything = self.innermost
        self.rolled_back()
        everything.run()


_known: WeakKeyDictionary[Connection, ConnectionCommits] = WeakKeyDictionary()


def waiting_on(connection: Connection) -> Waiting:
    """What waits for the end of the savepoint in which a connection is, or of its transaction."""
    return commits_on(connection).innermost


def commits_on(connection: Connection) -> ConnectionCommits:
    """What is known of a connection's transactions."""
    commits = _known.get(connection)
    if commits is None:
        commits = _known[connection] = ConnectionCommits()
        _listen(connection)
    return commits


def _listen(connection: Connection) -> None:
    """Listen for the ends of a connection's transactions and savepoints."""
    event.listen(connection, "savepoint", lambda connection, _: _known[connection].began())
    event.listen(connection, "release_savepoint", lambda connection, *_: _known[connection].released())
    event.listen(connection, "rollback_savepoint", lambda connection, *_: _known[connection].rolled_back_to())
    event.listen(connection, "rollback", lambda connection: _known[connection].rolled_back())
    event.listen(connection, "rollback_twophase", lambda connection, *_: _known[connection].rolled_back())
    # The event of a commit comes before it, and the commit may yet fail. Behind it SQLAlchemy tells nothing.
    for name in ("_commit_impl", "_commit_twophase_impl"):
        setattr(connection, name, _telling(ref(connection), getattr(type(connection), name)))


def _telling(connection: ref[Connection], commit: Any) -> Any:
    def committed(*arguments: Any) -> None:
        own = cast(Connection, connection())  # it is the one that calls
        commits = _known[own]
        error = None if commits.aborted is None else commits.aborted(own)
        if error is not None:
            with suppress(Exception):  # SQLAlchemy takes it for ended, and sends nothing more
                own._rollback_impl()
            raise error
        commit(own, *arguments)
        commits.committed()

    return committed


class SessionCommits:
    """One session's transactions, savepoint by savepoint."""

    def __init__(self) -> None:
        self.aborted: Aborted | None = None  # asked before a commit
        self.keeps_hooks = False  # for a caller that runs them later
        self._waiting: dict[SessionTransaction, Waiting] = {}
        self._committed: list[Hook] = []
        self._decided: SessionTransaction | None = None  # the last outermost one that committed or was rolled back
        self.emitted_at: CallersLine | None = None  # the first emit of the transaction
        self.is_abandoned = False  # whether an outermost one ended without either: its session was closed

    def waiting(self, transaction: SessionTransaction) -> Waiting:
        found = self._waiting.get(transaction)
        if found is None:
            found = self._waiting[transaction] = Waiting()
        return found

    def committed(self, transaction: SessionTransaction) -> None:
        self._decided = transaction
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
        self._decided = transaction
        self._waiting.pop(transaction, None)

    def ended(self, transaction: SessionTransaction) -> None:
        waiting = self._waiting.pop(transaction, None)  # neither committed nor rolled back
        if transaction.parent is not None:
            return
        self.is_abandoned = transaction is not self._decided
        self._decided = None
        emitted_at, self.emitted_at = self.emitted_at, None
        if waiting is not None and waiting.actions:
            awaits = async_session(transaction.session) is not None
            (emitted_at or CallersLine.here()).warn(
                _forgotten_commit(len(waiting.actions), "await " if awaits else ""), NotAtomicWarning
            )
        if not self.keeps_hooks:
            for hook in self.taken():
                hook.run()

    def taken(self) -> list[Hook]:
        """The hooks of what has committed, for the caller that runs them now."""
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


def committing(session: Session | Connection, aborted: Aborted) -> Waiting:
    """The same, for who is about to write; and what waits for the commit, to which more may be added."""
    guard(session, aborted)
    if not isinstance(session, Session):
        return waiting_on(session)
    commits: SessionCommits = session.info[_KEY]
    if commits.emitted_at is None and not commits.keeps_hooks:  # a block of ours commits by itself
        commits.emitted_at = CallersLine.here()
    return waiting_in(session)


def check_not_abandoned(session: Session) -> None:
    """At the end of a block that commits: a session that was closed inside keeps nothing, and says nothing."""
    if commits_of(session).is_abandoned:
        raise TransactionError(
            "the session was closed before the end of its transaction, and the database keeps nothing of it: leave the "
            "session open, the block closes it; to roll back, raise an exception or call `session.rollback()`"
        )


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


def _forgotten_commit(count: int, awaits: str) -> str:
    return (
        f"a session was closed without commit after {count} emit(s): neither messages nor data were stored. "
        f"Call `{awaits}session.commit()`, or begin with `{'async ' if awaits else ''}with session.begin()`; "
        f"if this was meant, say `{awaits}session.rollback()`"
    )


HookedSession = AsyncSession | Session | async_scoped_session[AsyncSession] | scoped_session[Session]
Callback = Callable[[], object]


def add_hook(session: Session, callback: Callback, observe: Observer, aborted: Aborted) -> None:
    """Call a function once the session's transaction has committed; never if it, or the savepoint, rolls back."""
    if is_async(callback) and not commits_of(session).keeps_hooks:
        raise TransactionError(
            f"{_name(callback)} cannot be awaited after the commit of this session: pass a plain function, or use the "
            "session of transaction() or @transactional"
        )
    guard(session, aborted)
    waiting_in(session).hooks.append(CallersHook(callback, observe))


@dataclass(frozen=True, slots=True)
class CallersHook:
    """A function of the caller's. What it raises is told: the commit cannot be undone any more."""

    callback: Callback
    observe: Observer

    def run(self) -> None:
        try:
            answer = self.callback()
            if inspect.isawaitable(answer):
                _forget(answer)
                raise TransactionError(
                    "it has to be awaited, which is not possible here: use the session of transaction()"
                )
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.observe(HookFailed(_name(self.callback), error))

    async def run_and_await(self) -> None:
        try:
            answer = self.callback()
            if inspect.isawaitable(answer):
                await answer
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            self.observe(HookFailed(_name(self.callback), error))
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.observe(HookFailed(_name(self.callback), error))


@asynccontextmanager
async def hooks_of(session: AsyncSession) -> AsyncIterator[None]:
    """Run the session's hooks at the end of this block, when nothing of its transaction is held any more."""
    commits = commits_of(session.sync_session)
    commits.keeps_hooks = True
    try:
        yield
    finally:
        commits.keeps_hooks = False
        for hook in commits.taken():
            await hook.run_and_await()


def _forget(answer: Awaitable[object]) -> None:
    if inspect.iscoroutine(answer):
        answer.close()  # otherwise Python complains that it was never awaited


def _name(callback: Callback) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
