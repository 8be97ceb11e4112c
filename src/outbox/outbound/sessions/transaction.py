"""CallersTransaction: what a message is written into, and whose fate it shares; and that of SQLAlchemy's sessions."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.engine import Transaction
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from outbox.core.errors import NotAtomicWarning
from outbox.core.message import Message, Schedule
from outbox.core.store import Rows, Store
from outbox.core.transaction_state import TransactionState, tied
from outbox.outbound.after_commit import after_commit, guard

Result = TypeVar("Result")


class CallersTransaction(ABC):
    """A transaction of the caller's. Nothing here flushes it, commits it, or begins one of its own."""

    needs_loop: bool  # its statements are awaited

    def emit(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> bool:
        """Write messages; False if the timer already waits."""
        self._warn_unless_atomic(store)
        written = self.write(store, *store.writing.insert(messages, schedule))
        if schedule.timer_id is not None and not written:
            return False
        self.note(store, messages, schedule)
        self.after_commit(partial(store.queues.announce, None))
        return True

    def cancel(self, store: Store, timer_id: str) -> bool:
        """Delete the timer if it still waits; says whether it did."""
        self._warn_unless_atomic(store)
        return self.write(store, *store.writing.cancel(timer_id)) > 0

    def run(self, work: Callable[..., Result], *arguments: object) -> Awaitable[Result]:
        """Run plain code that uses this transaction, for a caller that awaits."""
        if self.needs_loop:
            return greenlet_spawn(work, *arguments)
        return _known(work(*arguments))

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """The dialect of its database; asking opens no connection."""

    @abstractmethod
    def not_atomic(self, store: Store) -> str | None:
        """Where nothing would be atomic, and what to do; none if a transaction is open or will be."""

    @abstractmethod
    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        """Execute a store's statement; how many rows it wrote."""

    @abstractmethod
    def note(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> None:
        """Remember an emit for as long as the transaction lasts, if that can be known."""

    @abstractmethod
    def after_commit(self, action: Callable[[], None]) -> None:
        """Call the action when the transaction has committed, if that can be known."""

    def _warn_unless_atomic(self, store: Store) -> None:
        where = self.not_atomic(store)
        if where is not None:
            warnings.warn(
                f"emit {where}: the message is stored at once, whatever becomes of your data",
                NotAtomicWarning,
                stacklevel=2,
            )


async def _known(result: Result) -> Result:
    return result


_NOT_ATOMIC = {
    TransactionState.AUTOCOMMIT: "on a connection in AUTOCOMMIT; use one with a transaction",
    TransactionState.RELEASED_BY_SAVEPOINT: (
        "in a SQLite transaction that began with a savepoint, whose release commits; call "
        "outbox.sqlite.prepare(engine) once for your engine"
    ),
}


class SqlalchemyTransaction(CallersTransaction):
    """The one that is open there, or that its next statement opens."""

    def __init__(self, session: Session | Connection, *, needs_loop: bool = False) -> None:
        self.session = session
        self.needs_loop = needs_loop
        self._connection: Connection | None = None

    @property
    def dialect(self) -> Dialect:
        return self.session.get_bind().dialect if isinstance(self.session, Session) else self.session.dialect

    def not_atomic(self, store: Store) -> str | None:
        return _NOT_ATOMIC.get(store.transactions.state_of(self._connection or self._connect()))

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        connection = self._connection or self._connect()
        aborted = store.transactions.aborted(connection)
        if aborted is not None:
            raise aborted
        guard(self.session, store.transactions.aborted)
        return store.writing.write(connection, statement, rows)

    def note(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> None:
        transaction = (self._connection or self._connect()).get_transaction()
        if transaction is not None:
            emitted = WrittenMessages(store, tuple(message.id for message in messages), schedule)
            _written.setdefault(transaction, []).append(emitted)

    def _connect(self) -> Connection:
        """The session's connection, for which its pool may have to be waited for."""
        # Not session.execute(): SQLAlchemy 2.1 would flush, and a flush is the caller's to decide.
        session = self.session
        self._connection = tied(session, session.connection()) if isinstance(session, Session) else session
        return self._connection

    def after_commit(self, action: Callable[[], None]) -> None:
        after_commit(self.session, action)


# For tests: what a transaction that is still open has emitted.


@dataclass(frozen=True, slots=True)
class WrittenMessages:
    """One emit. Only the ids are held, because a transaction may emit more than fits in memory."""

    store: Store
    message_ids: tuple[str, ...]
    schedule: Schedule


_written: WeakKeyDictionary[Transaction, list[WrittenMessages]] = WeakKeyDictionary()


def written(connection: Connection) -> Sequence[WrittenMessages]:
    """The emits of the connection's transaction, those of savepoints that were rolled back included."""
    transaction = connection.get_transaction()
    return () if transaction is None else tuple(_written.get(transaction, ()))
