"""OwnEnd: keeps a listener from ending the transaction that the worker ends, and notices if it did."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Dialect, ExceptionContext, event
from sqlalchemy.orm import Session

from outbox.core.errors import Reject, TransactionError
from outbox.core.one_connection import is_joined
from outbox.core.store import Store
from outbox.core.transaction_state import TransactionState

# The first word of a statement decides: what follows in one text is seen when the driver's state is read.
_ENDING = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*(?>.*?\*/))*+"  # never tried in another way: there may be many comments
    r"(?:(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b"
    r"|(ROLLBACK)\b(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))",
    re.IGNORECASE | re.DOTALL,
)

# What a connection does to end its transaction, whichever way that was asked for. SQLAlchemy's events for it would do,
# but an engine that has any looks for all of them at each statement: a tenth of the time that a message takes.
_ENDS = {"_commit_impl": "committed", "_rollback_impl": "rolled back"}


class TransactionEnded(Reject):
    """The listener ended its transaction on the driver's own connection. A retry would repeat what it has committed."""


class OwnEnd:
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
        self.was_cut = False  # the listener cancelled a statement, which costs its connection
        self._rolled_back = False  # by a flush that failed
        self._allowed = False
        self._flushes = False  # since it was allowed, something was executed
        self._ended = False
        _of_session[session] = self

    def begun(self, connection: Connection) -> None:
        """From here on the connection is watched."""
        self.connection = connection
        self.is_joined = is_joined(self._session(), connection)
        self._count_queries = self._store.query_counter(connection)
        self._queries = 0 if self._count_queries is None else self._count_queries()
        _of_connection[connection] = self
        _watch(connection.dialect)
        for name, what in _ENDS.items():
            setattr(connection, name, partial(self._end, what, getattr(connection, name)))

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
            self._notice_driver()
            aborted = self._store.aborted(self.connection, in_doubt=self._driver_was_used)
            if aborted is not None:
                raise aborted
        if self._rolled_back:
            raise TransactionError(
                "a flush failed and the listener went on, but SQLAlchemy has rolled the transaction back: let the "
                "error out, or run what may fail in `session.begin_nested()`"
            )

    def check_ended(self) -> None:
        """Refuse a transaction that was ended on the driver's own connection."""
        if self.connection is None or not self._was_open or self._rolled_back or self._allowed or self._ended:
            return
        if self._store.state_of(self.connection) in (TransactionState.IDLE, TransactionState.AUTOCOMMIT):
            raise TransactionEnded(
                "the listener ended its transaction on the driver's own connection. What it had written until then may "
                "be committed and a retry would repeat it, so there is none: leave the end to the worker, and use a "
                "session of its own for what must be committed by itself"
            )

    def end(self) -> None:
        """It is over: a task that the listener left behind commits nothing either."""
        self._ended = True
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

    def _end(self, what: str, end: Callable[[], None]) -> None:
        """The connection is about to send COMMIT or ROLLBACK."""
        self.before_end(what)
        end()

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
        if (word := ends_a_transaction(statement)) is not None:
            raise TransactionError(_refusal(f"executed {word}"))
        self._notice_driver()

    def after_statement(self, connection: Connection) -> None:
        if self._count_queries is not None:
            self._queries = self._count_queries()
        if self._was_open:
            return
        state = self._store.state_of(connection)
        if state is TransactionState.RELEASED_BY_SAVEPOINT:
            raise TransactionError(
                "the listener's transaction begins with a savepoint, and SQLite would commit it when that is released: "
                "call outbox.sqlite.prepare(engine) once for the engine of session_factory"
            )
        self._was_open = state is TransactionState.OPEN

    def _notice_driver(self) -> None:
        """Look at the transaction, if the driver was used without SQLAlchemy or cannot tell."""
        if self._count_queries is not None:
            if self._count_queries() == self._queries:
                return
            self._driver_was_used = True
        self.check_ended()


def ends_a_transaction(statement: str) -> str | None:
    """The word by which a statement would end a transaction, or begin one."""
    found = _ENDING.match(statement)
    return None if found is None else (found[1] or found[2]).upper()


def _refusal(what: str) -> str:
    return (
        f"the listener {what}: leave that to the worker, which commits the transaction together with the end of the "
        "message, or rolls it back if the listener raises. For a part use `session.begin_nested()`; what must be "
        "committed by itself needs a session of its own"
    )


# For all sessions at once: a session lives for a message, and to listen to each costs more than to pass over most.

_of_session: WeakKeyDictionary[Session, OwnEnd] = WeakKeyDictionary()


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if (own_end := _of_session.get(session)) is not None:
        own_end.before_commit(session)


# The dialect's events are looked for one by one.

_of_connection: dict[Connection, OwnEnd] = {}
_watched: WeakSet[Dialect] = WeakSet()
_watching = Lock()


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
    own_end = _of_connection.get(context.root_connection)
    if own_end is None:
        return False
    own_end.before_statement(arguments[1])
    execute(*arguments)
    own_end.after_statement(context.root_connection)
    return True


def _failed(context: ExceptionContext) -> None:
    own_end = None if context.connection is None else _of_connection.get(context.connection)
    if own_end is not None and isinstance(context.original_exception, asyncio.CancelledError):
        own_end.was_cut = True
