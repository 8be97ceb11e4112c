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

from outbox.inbound.inbox import NotStarted, committing
from outbox.inbound.losing import noticing_loss
from outbox.inbound.own_end import OwnEnd
from outbox.inbound.threads import Fence

Around = Callable[[Connection], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a transaction is for, and how it is begun."""

    queue: str
    seconds: float | None
    options: Mapping[str, Any] | None = None  # of its connection


async def transact(
    session: AsyncSession, around: Around, body: Callable[[AsyncSession], Awaitable[None]], terms: Terms
) -> None:
    """Run the body inside `around`, which speaks to the plain connection; returning means committed."""
    own_end = OwnEnd(session.sync_session)
    is_closed = False
    try:
        async with asyncio.timeout(None) as limit:
            connection, entered = await session.run_sync(_begin, around, terms, limit)
            with noticing_loss(connection, limit.expired):
                await body(session)
                own_end.allow()
                await session.run_sync(_end, entered, limit)
            is_closed = True
    except (asyncio.CancelledError, TimeoutError):
        await asyncio.shield(_cut(session))
        raise
    finally:
        own_end.end()
        if not is_closed:
            await asyncio.shield(session.close())


# Each of these two is many calls to the database in one change over to plain code, which costs as much as one of them.


def _begin(
    session: Session, around: Around, terms: Terms, limit: asyncio.Timeout
) -> tuple[Connection, AbstractContextManager[None]]:
    connection = _connected(session, terms)
    if terms.seconds is not None:  # the clock starts when there is a connection: no listener can help waiting for one
        limit.reschedule(asyncio.get_running_loop().time() + terms.seconds)
    entering = around(connection)
    entering.__enter__()
    return connection, entering


def _end(session: Session, entered: AbstractContextManager[None], limit: asyncio.Timeout) -> None:
    session.flush()
    entered.__exit__(None, None, None)
    if limit.expired():
        raise TimeoutError("its time was over, and it did not heed its cancellation")
    limit.reschedule(None)  # a COMMIT that is cut may have happened
    with committing():
        session.commit()
    session.close()


def transact_in_thread(
    session: Session,
    around: Around,
    body: Callable[[Session], None],
    terms: Terms,
    fence: Fence,
) -> None:
    """The same for a plain session; its clock, too, starts when there is a connection."""
    with session:
        own_end = OwnEnd(session)
        connection = _connected(session, terms)
        fence.started()
        with noticing_loss(connection):
            with around(connection):
                body(session)
                own_end.allow()
                session.flush()
            fence.pass_through()
            with committing():
                session.commit()


def _connected(session: Session, terms: Terms) -> Connection:
    try:
        return session.connection(execution_options=terms.options)
    except Exception as error:
        raise NotStarted(f"no connection for {terms.queue}") from error


async def _cut(session: AsyncSession) -> None:
    """It may have been cut in the middle of a statement: such a connection is closed, not given back.

    Unless it is the only one there is: a database in memory would end with it.
    """
    if isinstance(session.get_bind().engine.pool, StaticPool):
        await session.rollback()
    else:
        await session.invalidate()
