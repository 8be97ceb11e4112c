"""Transactions: work in a session, within its time, ended by the worker and by nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, StaticPool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outbox.inbound.inbox import NotStarted, committing
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
    try:
        connection = await _connected(session, terms)
        async with asyncio.timeout(terms.seconds) as limit:
            # `around` speaks to a plain connection, and its two halves stand around the body's await.
            entering = around(connection.sync_connection)  # type: ignore[arg-type]
            await connection.run_sync(lambda _: entering.__enter__())
            await body(session)
            own_end.allow()
            await session.flush()
            await connection.run_sync(lambda _: entering.__exit__(None, None, None))
        if limit.expired():
            raise TimeoutError("its time was over, and it did not heed its cancellation")
        with committing():
            await session.commit()
    except (asyncio.CancelledError, TimeoutError):
        await asyncio.shield(_cut(session))
        raise
    finally:
        own_end.end()
        await asyncio.shield(session.close())


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
        try:
            connection = session.connection(execution_options=terms.options)
        except Exception as error:
            raise NotStarted(f"no connection for {terms.queue}") from error
        fence.started()
        with around(connection):
            body(session)
            own_end.allow()
            session.flush()
        fence.pass_through()
        with committing():
            session.commit()


async def _connected(session: AsyncSession, terms: Terms) -> AsyncConnection:
    """The clock starts when there is a connection: waiting for one is not the listener's doing."""
    try:
        return await session.connection(execution_options=terms.options)
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
