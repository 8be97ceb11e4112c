"""Transactions: a listener's work in a session, ended by the worker alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from sqlalchemy import Connection, StaticPool, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from outbox.core.errors import ConfigurationError
from outbox.core.loops import check_not_cut, uncut
from outbox.core.store import QueueClaim, Store
from outbox.core.transaction_state import TransactionState, tied
from outbox.core.transport import Delivery
from outbox.inbound.batches import Batch
from outbox.inbound.inbox import CommitUnknown, NotStarted, committing
from outbox.inbound.threads import Fence
from outbox.inbound.transaction_guard import ConnectionGone, TransactionEnded, TransactionGuard

AUTOCOMMIT = (
    "{queue}: its session's connection is in AUTOCOMMIT, so what a listener writes is kept even if it fails. Remove "
    'isolation_level="AUTOCOMMIT" from the engine or session_factory, and `autocommit` or `isolation_level=None` from '
    "its connect_args"
)

_NOT_RENEWED = "the lease could not be renewed"

Around = Callable[[Connection], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class TransactionOptions:
    """What a transaction is for, and how it is begun."""

    queue: str
    store: Store
    seconds: float | None
    of_connection: Mapping[str, Any] | None = None  # execution options


async def transact(
    session: AsyncSession, around: Around, body: Callable[[AsyncSession], Awaitable[None]], options: TransactionOptions
) -> None:
    """Run the body inside `around`, which speaks to the plain connection; returning means committed."""
    guard = TransactionGuard(session.sync_session, options.store)
    has_begun = is_closed = False
    try:
        try:
            async with asyncio.timeout(None) as limit:
                connection, entered = await session.run_sync(_begin, guard, around, options, limit)
                has_begun = True
                with noticing_loss(connection, lambda: limit.expired() or guard.is_its_own_doing):
                    await body(session)
                    await session.run_sync(_end, guard, entered, limit)
                is_closed = True
        except (Exception, asyncio.CancelledError):
            await asyncio.shield(session.run_sync(lambda _: guard.check_ended()))
            raise
    except (asyncio.CancelledError, TimeoutError, TransactionEnded) as error:
        await asyncio.shield(session.run_sync(_cut, guard))
        if isinstance(error, TimeoutError) and not has_begun:  # its time was over before it was called
            raise NotStarted(f"no inbox for {options.queue}") from error
        raise
    finally:
        guard.end()
        if not is_closed:
            await asyncio.shield(session.run_sync(_close, guard))


# Each of these two is many calls to the database in one change over to plain code, which costs as much as one of them.


def _begin(
    session: Session, guard: TransactionGuard, around: Around, options: TransactionOptions, limit: asyncio.Timeout
) -> tuple[Connection, AbstractContextManager[None]]:
    connection = _connected(session, options)
    guard.begun(connection)
    if options.seconds is not None:  # the clock starts when there is a connection: no listener can help waiting for one
        limit.reschedule(asyncio.get_running_loop().time() + options.seconds)
    entering = around(connection)
    entering.__enter__()
    return connection, entering


def _end(
    session: Session, guard: TransactionGuard, entered: AbstractContextManager[None], limit: asyncio.Timeout
) -> None:
    _flush(session, guard)
    entered.__exit__(None, None, None)
    guard.check_gone()
    if limit.expired():
        raise TimeoutError("its time was over, and it did not heed its cancellation")
    check_not_cut()
    limit.reschedule(None)  # a COMMIT that is cut may have happened
    with uncut():
        with committing():
            session.commit()
        session.close()


def _flush(session: Session, guard: TransactionGuard) -> None:
    """What the listener left to write, if all that it has written can be committed."""
    guard.allow()
    session.flush()
    guard.check_flush()


def transact_in_thread(
    session: Session,
    around: Around,
    body: Callable[[Session], None],
    options: TransactionOptions,
    fence: Fence,
) -> None:
    """The same for a plain session; its clock, too, starts when there is a connection."""
    guard = fence.guard = TransactionGuard(session, options.store)
    try:
        connection = _connected(session, options)
        guard.begun(connection)
        fence.started()
        with noticing_loss(connection, lambda: guard.is_its_own_doing):
            with around(connection):
                body(session)
                _flush(session, guard)
            guard.check_gone()
            fence.pass_through()
            with committing():
                session.commit()
    except BaseException:
        guard.check_ended()
        raise
    finally:
        guard.end()
        guard.forget()
        _close(session, guard)


def _connected(session: Session, options: TransactionOptions) -> Connection:
    try:
        connection = tied(session, session.connection(execution_options=options.of_connection))
        if options.store.transactions.state_of(connection) is TransactionState.AUTOCOMMIT:
            raise ConfigurationError(AUTOCOMMIT.format(queue=options.queue))
        return connection
    except Exception as error:
        raise NotStarted(f"no connection for {options.queue}") from error


async def is_autocommit(session: AsyncSession, options: TransactionOptions) -> bool:
    """Whether a listener's session would keep what it writes even if the listener fails."""
    try:
        return await session.run_sync(_is_autocommit, options)
    finally:
        await asyncio.shield(session.close())


def is_autocommit_in_thread(session: Session, options: TransactionOptions) -> bool:
    """The same for a plain session."""
    with session:
        return _is_autocommit(session, options)


def _is_autocommit(session: Session, options: TransactionOptions) -> bool:
    return (
        options.store.transactions.state_of(session.connection(execution_options=options.of_connection))
        is TransactionState.AUTOCOMMIT
    )


def _close(session: Session, guard: TransactionGuard) -> None:
    """Roll back, and give the connection back, even if a refusal has left SQLAlchemy with the belief that it has."""
    connection = guard.connection
    if guard.is_gone:
        session.invalidate()  # a rollback would fail, and hide what was raised
    if guard.refused is not None and connection is not None and not connection.closed and not connection.invalidated:
        connection.connection.rollback()
    session.close()
    if connection is not None and not guard.is_joined:
        connection.close()


def _cut(session: Session, guard: TransactionGuard) -> None:
    """It may have been cut in the middle of a statement: such a connection is closed, not given back.

    Unless it is the only one there is: a database in memory would end with it.
    """
    guard.end()
    if guard.connection is None:
        return
    if isinstance(guard.connection.engine.pool, StaticPool):
        session.rollback()
    else:
        session.invalidate()
        if not guard.connection.closed:
            guard.connection.invalidate()


# Leases are not renewed while a transaction is open that could not complete them then.


class Leases:
    """Makes them for the transactions of a listener."""

    def __init__(self, store: Store, grace: timedelta) -> None:
        self.store = store
        self._grace = grace
        self.sessions_read_first = False  # a transaction had its snapshot before its leases could be renewed

    def of(self, delivery: Delivery, limit: timedelta) -> Unrenewed:
        """Those of a transaction that may take so long, and its end the grace beside that."""
        return Unrenewed(self, delivery, limit + self._grace)


class SnapshotTaken(NotStarted):
    """The session has read before the leases were renewed: it has to begin anew, after they are."""


class Unrenewed:
    """The leases on the deliveries of one transaction.

    A transaction that keeps the snapshot of its first statement cannot delete a row that was written since. So the
    leases are renewed once, right before that statement, for as long as the transaction may take. A session may execute
    it as soon as it begins, by a hook of the application: once that was seen, they are renewed before the session.
    """

    def __init__(self, leases: Leases, delivery: Delivery, lease: timedelta) -> None:
        self._leases = leases
        self._deliveries: Sequence[Delivery] = delivery.deliveries if isinstance(delivery, Batch) else (delivery,)
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._claims: dict[QueueClaim, list[int]] = {}

    def begin(self, connection: Connection) -> None:
        """Called on the connection of the transaction, before the worker sends anything on it, in whatever thread."""
        if self._claims or _claim_of(self._deliveries[0]) is None:
            return
        transactions = self._leases.store.transactions
        try:
            is_idle = transactions.state_of(connection) is TransactionState.IDLE
            keeps_snapshot = transactions.keeps_snapshot(connection)
            if keeps_snapshot and is_idle:
                self._wait_for(self._renew())
        except Exception as error:
            raise NotStarted(_NOT_RENEWED) from error
        if keeps_snapshot and not is_idle:
            self._leases.sessions_read_first = True
            raise SnapshotTaken("the session has read before the lease was renewed")

    async def __aenter__(self) -> Self:
        if self._leases.sessions_read_first:
            try:
                await self._renew()
            except BaseException as error:
                self._renew_again()
                if isinstance(error, Exception):
                    raise NotStarted(_NOT_RENEWED) from error
                raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """The transaction is over: they are renewed with all others again. Called by the event loop."""
        self._renew_again()

    async def _renew(self) -> None:
        for delivery in self._deliveries:
            claim = _claim_of(delivery)
            if claim is not None:
                self._claims.setdefault(claim, []).append(delivery.attempt.id)
        for claim, ids in self._claims.items():
            await claim.renew_once(ids, self._lease)

    def _renew_again(self) -> None:
        for claim, ids in self._claims.items():
            claim.renew_again(ids)

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a plain function's thread
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        else:
            await_only(work)


def _claim_of(delivery: Delivery) -> QueueClaim | None:
    """The claim that renews its lease, if it is out of one."""
    return getattr(delivery, "claim", None)


# What the database did to a transaction is no failure of its listener: it runs again, up to a limit.


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


def check_answers(connection: Connection, queue: str) -> None:
    """Refuse to call a listener if the database is away: a pooler before it takes connections all the same."""
    try:
        connection.execute(select(1))
    except Exception as error:
        raise NotStarted(f"no database for {queue}") from error


def _is_lost(connection: Connection, error: Exception) -> bool:
    if isinstance(error, ConnectionGone):
        return True
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
