"""Transactions: work in a session, within its time, ended by the worker and by nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, StaticPool
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.errors import ConfigurationError
from outbox.core.one_connection import tied
from outbox.core.store import Store
from outbox.core.transaction_state import TransactionState
from outbox.inbound.inbox import NotStarted, committing
from outbox.inbound.losing import noticing_loss
from outbox.inbound.own_end import OwnEnd
from outbox.inbound.threads import Fence

AUTOCOMMIT = (
    "{queue}: its session's connection is in AUTOCOMMIT, so what a listener writes is kept even if it fails. Remove "
    'isolation_level="AUTOCOMMIT" from the engine or session_factory, and `autocommit` or `isolation_level=None` from '
    "its connect_args"
)

Around = Callable[[Connection], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a transaction is for, and how it is begun."""

    queue: str
    store: Store
    seconds: float | None
    options: Mapping[str, Any] | None = None  # of its connection


async def transact(
    session: AsyncSession, around: Around, body: Callable[[AsyncSession], Awaitable[None]], terms: Terms
) -> None:
    """Run the body inside `around`, which speaks to the plain connection; returning means committed."""
    own_end = OwnEnd(session.sync_session, terms.store)
    has_begun = is_closed = False
    try:
        try:
            async with asyncio.timeout(None) as limit:
                connection, entered = await session.run_sync(_begin, own_end, around, terms, limit)
                has_begun = True
                with noticing_loss(connection, lambda: limit.expired() or own_end.is_its_own_doing):
                    await body(session)
                    await session.run_sync(_end, own_end, entered, limit)
                is_closed = True
        except Exception:
            await session.run_sync(lambda _: own_end.check_ended())
            raise
    except (asyncio.CancelledError, TimeoutError) as error:
        await asyncio.shield(session.run_sync(_cut, own_end))
        if isinstance(error, TimeoutError) and not has_begun:  # its time was over before it was called
            raise NotStarted(f"no inbox for {terms.queue}") from error
        raise
    finally:
        own_end.end()
        if not is_closed:
            await asyncio.shield(session.run_sync(_close, own_end))


# Each of these two is many calls to the database in one change over to plain code, which costs as much as one of them.


def _begin(
    session: Session, own_end: OwnEnd, around: Around, terms: Terms, limit: asyncio.Timeout
) -> tuple[Connection, AbstractContextManager[None]]:
    connection = _connected(session, terms)
    own_end.begun(connection)
    if terms.seconds is not None:  # the clock starts when there is a connection: no listener can help waiting for one
        limit.reschedule(asyncio.get_running_loop().time() + terms.seconds)
    entering = around(connection)
    entering.__enter__()
    return connection, entering


def _end(session: Session, own_end: OwnEnd, entered: AbstractContextManager[None], limit: asyncio.Timeout) -> None:
    _flush(session, own_end)
    entered.__exit__(None, None, None)
    if limit.expired():
        raise TimeoutError("its time was over, and it did not heed its cancellation")
    limit.reschedule(None)  # a COMMIT that is cut may have happened
    with committing():
        session.commit()
    session.close()


def _flush(session: Session, own_end: OwnEnd) -> None:
    """What the listener left to write, if all that it has written can be committed."""
    own_end.allow()
    session.flush()
    own_end.check_flush()


def transact_in_thread(
    session: Session,
    around: Around,
    body: Callable[[Session], None],
    terms: Terms,
    fence: Fence,
) -> None:
    """The same for a plain session; its clock, too, starts when there is a connection."""
    own_end = OwnEnd(session, terms.store)
    try:
        connection = _connected(session, terms)
        own_end.begun(connection)
        fence.started()
        with noticing_loss(connection, lambda: own_end.is_its_own_doing):
            with around(connection):
                body(session)
                _flush(session, own_end)
            fence.pass_through()
            with committing():
                session.commit()
    except Exception:
        own_end.check_ended()
        raise
    finally:
        own_end.end()
        own_end.forget()
        _close(session, own_end)


def _connected(session: Session, terms: Terms) -> Connection:
    try:
        connection = tied(session, session.connection(execution_options=terms.options))
        if terms.store.state_of(connection) is TransactionState.AUTOCOMMIT:
            raise ConfigurationError(AUTOCOMMIT.format(queue=terms.queue))
        return connection
    except Exception as error:
        raise NotStarted(f"no connection for {terms.queue}") from error


async def is_autocommit(session: AsyncSession, terms: Terms) -> bool:
    """Whether a listener's session would keep what it writes even if the listener fails."""
    try:
        return await session.run_sync(_is_autocommit, terms)
    finally:
        await asyncio.shield(session.close())


def is_autocommit_in_thread(session: Session, terms: Terms) -> bool:
    """The same for a plain session."""
    with session:
        return _is_autocommit(session, terms)


def _is_autocommit(session: Session, terms: Terms) -> bool:
    return terms.store.state_of(session.connection(execution_options=terms.options)) is TransactionState.AUTOCOMMIT


def _close(session: Session, own_end: OwnEnd) -> None:
    """Roll back, and give the connection back, even if a refusal has left SQLAlchemy with the belief that it has."""
    connection = own_end.connection
    if own_end.refused is not None and connection is not None and not connection.closed and not connection.invalidated:
        connection.connection.rollback()
    session.close()
    if connection is not None and not own_end.is_joined:
        connection.close()


def _cut(session: Session, own_end: OwnEnd) -> None:
    """It may have been cut in the middle of a statement: such a connection is closed, not given back.

    Unless it is the only one there is: a database in memory would end with it.
    """
    own_end.end()
    if own_end.connection is None:
        return
    if isinstance(own_end.connection.engine.pool, StaticPool):
        session.rollback()
    else:
        session.invalidate()
        if not own_end.connection.closed:
            own_end.connection.invalidate()
