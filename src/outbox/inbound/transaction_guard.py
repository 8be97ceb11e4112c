"""TransactionGuard: keeps a listener from ending the transaction that the worker ends, and notices if it did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Dialect, ExceptionContext, event
from sqlalchemy.orm import Session

from outbox.core.errors import Reject, TransactionError
from outbox.core.forks import ForkableLock
from outbox.core.store import Store
from outbox.core.transaction_state import FIRST_WORD, TransactionState, is_joined, transaction_words

# What a connection does to end its transaction, whichever way that was asked for. SQLAlchemy's events for it would do,
# but an engine that has any looks for all of them at each statement: a tenth of the time that a message takes.
_ENDS = {"_commit_impl": "committed", "_rollback_impl": "rolled back"}

_ENDED = (TransactionState.IDLE, TransactionState.AUTOCOMMIT)  # of a transaction that was open


class TransactionEnded(Reject):
    """The listener ended its transaction on the driver's own connection. A retry would repeat what it has committed."""


class ConnectionGone(Exception):
    """The connection of an open transaction was closed or lost, and that was not reported: nothing of it is kept."""


ENDED_ON_DRIVER = (
    "the listener ended its transaction on the driver's own connection. What it had written until then may be "
    "committed and a retry would repeat it, so there is none: leave the end to the worker, and use a session of its "
    "own for what must be committed by itself"
)

_GONE = (
    "the connection of the listener's transaction is closed or was given back, so nothing that it wrote can be "
    "committed. If the listener closes or invalidates it: leave that to the worker"
)

_ISOLATION = (
    "the listener sets the isolation of its transaction by a statement: its lease would be renewed during it, and the "
    "transaction could not end its message any more. Set isolation_level= of the listener instead"
)


class TransactionGuard:
    """Watches a listener's session and connection. A commit of the listener's own would escape the delivery's."""

    def __init__(self, session: Session, store: Store) -> None:
        self._session = ref(session)
        self._store = store
        self.connection: Connection | None = None
        self.is_joined = False  # the session was given the connection, and its owner goes on using it
        self._was_open = False  # the driver has said so
        self._count_queries: Callable[[], int] | None = None  # if the driver counts them
        self._queries = 0  # that it had sent when SQLAlchemy's last statement was over
        self._driver_was_used = False  # by the listener itself: SQLAlchemy has not heard of what failed there
        self.refused: str | None = None  # what the listener tried: SQLAlchemy's objects may be of no use after it
        self.is_gone = False  # the connection of a transaction that was open
        self.was_cut = False  # the listener cancelled a statement, which costs its connection
        self._rolled_back = False  # by a flush that failed
        self._allowed = False
        self._flushes = False  # since it was allowed, something was executed
        self._ended = False
        self._committed_by_driver = False  # which may have begun another transaction since
        self._rolled_back_by_driver = False
        self._was_ended = False  # by the listener, as was found out
        self._is_late = False  # its thread's time is over
        self._watched: dict[str, Any] | None = None  # attributes of the connection that tells of an end by the driver
        _of_session[session] = self

    def begun(self, connection: Connection) -> None:
        """From here on the connection is watched."""
        self.connection = connection
        self.is_joined = is_joined(self._session(), connection)
        self._count_queries = self._store.transactions.query_counter(connection)
        self._queries = 0 if self._count_queries is None else self._count_queries()
        _of_connection[connection] = self
        _watch(connection.dialect)
        for name, what in _ENDS.items():
            setattr(connection, name, partial(self._unless_refused, what, getattr(connection, name)))
        self._watch_driver(connection)

    @property
    def is_its_own_doing(self) -> bool:
        """Whether it is the listener to which a connection was lost."""
        return self.was_cut or self.refused is not None

    def allow(self) -> None:
        """From here on it is the worker who ends the transaction; too late if the listener did, or broke it."""
        self.check()
        self._allowed = True

    def check_flush(self) -> None:
        """The same once more, if a flush has executed anything since."""
        if self._flushes:
            self.check()

    def check(self) -> None:
        """Refuse a transaction of which COMMIT would not keep everything."""
        if self.refused is not None:
            raise TransactionError(_refusal(self.refused))
        if self.connection is not None and not self._rolled_back:
            self._notice_queries()
            state = self.check_ended()
            if self._rolled_back_by_driver:
                raise TransactionEnded(ENDED_ON_DRIVER)
            self.is_gone = state is TransactionState.UNKNOWN
            if self.is_gone:
                return  # whatever is executed now tells more of it
            aborted = self._store.transactions.aborted(self.connection, in_doubt=self._driver_was_used)
            if aborted is not None:
                raise aborted
        if self._rolled_back:
            raise TransactionError(
                "a flush failed and the listener went on, but SQLAlchemy has rolled the transaction back: let the "
                "error out, or run what may fail in `session.begin_nested()`"
            )

    def check_gone(self) -> None:
        """Refuse a COMMIT that has no connection: some drivers would send nothing, and say nothing."""
        if self.is_gone:
            raise ConnectionGone(_GONE)

    def check_ended(self) -> TransactionState | None:
        """Refuse a transaction that was ended on the driver's own connection; otherwise, what the driver says of it."""
        if self.connection is None or not self._is_listeners:
            return None
        state = self._store.transactions.state_of(self.connection)
        if self._committed_by_driver or state in _ENDED:
            self._was_ended = True
            raise TransactionEnded(ENDED_ON_DRIVER)
        return state

    def is_ended_when_late(self) -> bool:
        """The time of its thread is over: whether it has ended its transaction already. From now on it cannot."""
        self._is_late = True
        if self._committed_by_driver or self._was_ended:
            return True
        if self.connection is None or not self._was_open or self._rolled_back or self._allowed:
            return False
        try:
            is_idle = self._store.transactions.state_of(self.connection) in _ENDED
        except Exception:  # noqa: BLE001 - the thread goes on with its connection meanwhile, and may have closed it
            is_idle = False
        return (is_idle and not self._ended) or self._was_ended

    def end(self) -> None:
        """It is over: a task that the listener left behind commits nothing either."""
        self._ended = True
        if self._watched is not None:
            self._watched.pop("commit", None)
            self._watched.pop("rollback", None)
            self._watched = None
        if self.connection is not None and _of_connection.pop(self.connection, None) is not None:
            for name in _ENDS:
                delattr(self.connection, name)

    def forget(self) -> None:
        """The session is its thread's own again, as that of a scoped_session, which gives it out once more."""
        session = self._session()
        if session is not None:
            _of_session.pop(session, None)

    # What SQLAlchemy tells.

    def before_commit(self, session: Session) -> None:
        if self._ended:
            raise TransactionError("the listener's transaction has ended: its session cannot be committed any more")
        if not self._allowed and not session.in_nested_transaction():
            raise TransactionError(_refusal("committed its session"))

    def _unless_refused(self, what: str, end: Callable[[], None]) -> None:
        """The connection is about to send COMMIT or ROLLBACK."""
        self.before_end(what)
        end()

    def _watch_driver(self, connection: Connection) -> None:
        """Detect a commit on the driver's own connection, or on the pool's if the driver's takes no attributes."""
        watched: Any = connection.connection.driver_connection
        own = getattr(watched, "__dict__", None)
        if own is None or not hasattr(watched, "commit"):
            watched = connection.connection
            own = vars(watched)
        if "commit" in own or "rollback" in own:
            return  # another program watches it in the same way
        own["commit"] = partial(self._driver_commits, watched.commit)
        own["rollback"] = partial(self._driver_rolls_back, watched.rollback)
        self._watched = own

    def _driver_commits(self, commit: Callable[[], Any]) -> Any:
        """The driver is about to send COMMIT, for SQLAlchemy or for the listener itself."""
        if self._is_listeners:
            self._committed_by_driver = True  # before the next line: a thread's time may be over at this very moment
            if self._is_late:
                raise TransactionError("the listener's time is over: it cannot commit its transaction any more")
        return commit()

    def _driver_rolls_back(self, rollback: Callable[[], Any]) -> Any:
        """It may be SQLAlchemy's answer to a refusal. A listener that raises afterwards can run again."""
        self._rolled_back_by_driver = self._rolled_back_by_driver or self._is_listeners
        return rollback()

    @property
    def _is_listeners(self) -> bool:
        """Whether there is a transaction of which the end is not the listener's affair."""
        return self._was_open and not (self._allowed or self._ended or self._rolled_back)

    def before_end(self, what: str) -> None:
        if self._allowed or self._ended:
            return
        if what == "rolled back" and getattr(self._session(), "_flushing", False):
            self._rolled_back = True  # SQLAlchemy's own answer to a failure
            return
        self.refused = f"{what} its session or connection, or closed it"
        raise TransactionError(_refusal(self.refused))

    def before_statement(self, statement: str) -> None:
        if self._allowed or self._ended:
            self._flushes = True
            return
        if FIRST_WORD.match(statement) or statement.find(";", 0, -1) >= 0:  # a quick look, because most are neither
            self._refuse_words(statement)
        self._notice_driver()

    def _refuse_words(self, statement: str) -> None:
        for word in transaction_words(statement):
            raise TransactionError(_ISOLATION if word == "SET" else _refusal(f"executed {word}"))

    def after_statement(self, connection: Connection) -> None:
        if self._count_queries is not None:
            self._queries = self._count_queries()
        if self._was_open:
            return
        state = self._store.transactions.state_of(connection)
        if state is TransactionState.RELEASED_BY_SAVEPOINT:
            raise TransactionError(
                "the listener's transaction begins with a savepoint, and SQLite would commit it when that is released: "
                "call outbox.sqlite.prepare(engine) once for the engine of session_factory"
            )
        self._was_open = state is TransactionState.OPEN

    def _notice_driver(self) -> None:
        """Look at the transaction, if the driver was used without SQLAlchemy or cannot tell."""
        if self._notice_queries() or self._count_queries is None or self._committed_by_driver:
            self.check_ended()

    def _notice_queries(self) -> bool:
        """Whether the driver has sent a query since SQLAlchemy's last statement."""
        if self._count_queries is None or self._count_queries() == self._queries:
            return False
        self._driver_was_used = True
        return True


def _refusal(what: str) -> str:
    return (
        f"the listener {what}: leave that to the worker, which commits the transaction together with the end of the "
        "message, or rolls it back if the listener raises. For a part use `session.begin_nested()`; what must be "
        "committed by itself needs a session of its own"
    )


# For all sessions at once: a session lives for a message, and to listen to each costs more than to pass over most.

_of_session: WeakKeyDictionary[Session, TransactionGuard] = WeakKeyDictionary()


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if (guard := _of_session.get(session)) is not None:
        guard.before_commit(session)


# The dialect's events are looked for one by one.

_of_connection: dict[Connection, TransactionGuard] = {}
_watched: WeakSet[Dialect] = WeakSet()
_watching = ForkableLock()


def _watch(dialect: Dialect) -> None:
    """Listen to what workers use, once."""
    if dialect in _watched:
        return
    with _watching:  # threads of plain listeners may be first together
        if dialect in _watched:
            return
        event.listen(dialect, "do_execute", partial(_execute, dialect.do_execute))
        event.listen(dialect, "do_executemany", partial(_execute, dialect.do_executemany))
        event.listen(dialect, "do_execute_no_params", partial(_execute, dialect.do_execute_no_params))
        event.listen(dialect, "handle_error", _failed)
        _watched.add(dialect)


def _execute(execute: Callable[..., None], *arguments: Any) -> bool:
    """Execute a statement of a listener, instead of SQLAlchemy, if it is one."""
    *_, context = arguments
    guard = _of_connection.get(context.root_connection)
    if guard is None:
        return False
    guard.before_statement(arguments[1])
    execute(*arguments)
    guard.after_statement(context.root_connection)
    return True


def _failed(context: ExceptionContext) -> None:
    guard = None if context.connection is None else _of_connection.get(context.connection)
    if guard is not None and isinstance(context.original_exception, asyncio.CancelledError):
        guard.was_cut = True
