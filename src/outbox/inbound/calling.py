"""Calling: runs a listener's callback on the loop or in a thread, in a session if it asks for one, within its time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy import StaticPool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outbox.core.listener import Listener
from outbox.core.transport import Delivery
from outbox.inbound.arguments import Arguments
from outbox.inbound.batch_arguments import BatchArguments
from outbox.inbound.inbox import Inbox, NotStarted, committing
from outbox.inbound.own_end import OwnEnd

SESSION_TIME_LIMIT = timedelta(seconds=15)  # a transaction that stays open longer holds up the whole database


class Sessions(Protocol):
    """Where listeners' sessions come from."""

    def asynchronous(self) -> AsyncSession: ...

    def synchronous(self) -> Session: ...

    def turn(self) -> AbstractAsyncContextManager[None]: ...


class ThreadTimeout(TimeoutError):
    """A plain function ran out of time. Its thread cannot be stopped: the slot stays taken until it ends."""

    def __init__(self, limit: timedelta | None, thread: asyncio.Future[None]) -> None:
        super().__init__(f"no end within {limit}")
        self.thread = thread


class Call:
    """One listener's callback, ready to be called."""

    def __init__(
        self,
        listener: Listener,
        sessions: Sessions | None,
        inbox: Inbox | None,
        executor: Executor,
        session_time_limit: timedelta = SESSION_TIME_LIMIT,
        queue_name: str | None = None,  # what the destination calls the listener's queue, if that is something else
    ) -> None:
        of = Arguments.of if listener.batch is None else BatchArguments.of
        self.arguments: Arguments | BatchArguments = of(listener, queue_name)
        self._listener = listener
        self._callback = listener.callback
        self._sessions = sessions
        self._inbox = inbox
        self._executor = executor
        self._limit = listener.time_limit
        if self._limit is None and self.arguments.session is not None:
            self._limit = session_time_limit
        self._seconds = None if self._limit is None else self._limit.total_seconds()

    @property
    def in_transaction(self) -> bool:
        """Whether a delivery's end is written by the listener's own transaction."""
        return self.arguments.session is not None

    async def __call__(self, delivery: Delivery) -> None:
        """Run to the end, or raise what went wrong. With a session, returning means committed."""
        values = self.arguments.bind(delivery)
        if not self.arguments.is_async:
            await self._in_thread(delivery, values)
        elif self.arguments.session is not None:
            async with self._turn():
                await self._in_session(delivery, values)
        elif self._seconds is not None:
            async with asyncio.timeout(self._seconds):
                await self.arguments.call(self._callback, values)
        else:
            await self.arguments.call(self._callback, values)

    async def _in_session(self, delivery: Delivery, values: dict[str, Any]) -> None:
        sessions, inbox, queue = self._database()
        session = sessions.asynchronous()
        own_end = OwnEnd(session.sync_session)
        try:
            connection = await self._connected(session)
            async with asyncio.timeout(self._seconds):
                # The inbox speaks to a plain connection, and its two halves stand around the listener's await.
                entering = inbox.entered(connection.sync_connection, queue, delivery)  # type: ignore[arg-type]
                await connection.run_sync(lambda _: entering.__enter__())
                await self.arguments.call(self._callback, values, session)
                own_end.allow()
                await session.flush()
                await connection.run_sync(lambda _: entering.__exit__(None, None, None))
            with committing():
                await session.commit()
        except (asyncio.CancelledError, TimeoutError):
            await asyncio.shield(_cut(session))
            raise
        finally:
            await asyncio.shield(session.close())

    async def _connected(self, session: AsyncSession) -> AsyncConnection:
        """The clock starts when there is a connection: waiting for one is not the listener's doing."""
        try:
            return await session.connection()
        except Exception as error:
            raise NotStarted(f"no connection for {self._listener.queue}") from error

    async def _in_thread(self, delivery: Delivery, values: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        def work() -> None:
            if self.arguments.session is None:
                loop.call_soon_threadsafe(started.set)
                self._plainly(values)
            else:
                self._in_plain_session(delivery, values, lambda: loop.call_soon_threadsafe(started.set))

        async with self._turn():
            thread = loop.run_in_executor(self._executor, copy_context().run, work)
            beginning: list[asyncio.Future[Any]] = [thread, asyncio.ensure_future(started.wait())]
            try:
                await asyncio.wait(beginning, return_when=asyncio.FIRST_COMPLETED)
            finally:
                beginning[1].cancel()
            done, _ = await asyncio.wait([thread], timeout=self._seconds)
            if not done:
                raise ThreadTimeout(self._limit, thread)
            thread.result()

    def _in_plain_session(self, delivery: Delivery, values: dict[str, Any], started: Callable[[], object]) -> None:
        sessions, inbox, queue = self._database()
        with sessions.synchronous() as session:
            own_end = OwnEnd(session)
            try:
                connection = session.connection()
            except Exception as error:
                raise NotStarted(f"no connection for {queue}") from error
            started()
            with inbox.entered(connection, queue, delivery):
                self._plainly(values, session)
                own_end.allow()
                session.flush()
            with committing():
                session.commit()

    def _plainly(self, values: dict[str, Any], session: object = None) -> None:
        try:
            returned = self.arguments.call(self._callback, values, session)
        except StopIteration as error:
            raise RuntimeError("the listener raised StopIteration") from error  # no future can carry one
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("the listener returned a coroutine that nobody awaits: make it `async def`")

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._sessions is None or not self.in_transaction else self._sessions.turn()

    def _database(self) -> tuple[Sessions, Inbox, str]:
        assert self._sessions is not None and self._inbox is not None  # noqa: S101 - checked before the worker starts
        return self._sessions, self._inbox, self._listener.queue


async def _cut(session: AsyncSession) -> None:
    """It may have been cut in the middle of a statement: such a connection is closed, not given back.

    Unless it is the only one there is: a database in memory would end with it.
    """
    if isinstance(session.get_bind().engine.pool, StaticPool):
        await session.rollback()
    else:
        await session.invalidate()
