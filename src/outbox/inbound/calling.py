"""Calling: runs a listener's callback on the loop or in a thread, in a session if it asks for one, within its time."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery
from outbox.inbound.arguments import Arguments
from outbox.inbound.conflicts import Conflicts
from outbox.inbound.inbox import Inbox
from outbox.inbound.strategies import Isolation, TimeLimit
from outbox.inbound.threads import Fence, run_in_thread
from outbox.inbound.transactions import Around, Terms, transact, transact_in_thread

SESSION_TIME_LIMIT = timedelta(seconds=15)  # a transaction that stays open longer holds up the whole database


class Sessions(Protocol):
    """Where listeners' sessions come from."""

    def asynchronous(self, message: Message) -> AsyncSession: ...

    def synchronous(self, message: Message) -> Session: ...

    def turn(self) -> AbstractAsyncContextManager[None]: ...


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
        *,
        unrenewed_lease: timedelta | None = None,  # the one that a transaction of the listener must not outlast
        isolation_of: Isolation | None = None,  # if it asks for a level of isolation
        conflicts: Conflicts | None = None,
    ) -> None:
        self.arguments = Arguments.of(listener, queue_name)
        self._listener = listener
        self._callback = listener.callback
        self._sessions = sessions
        self._inbox = inbox
        self._executor = executor
        self._limit = listener.time_limit
        if self._limit is None and self.arguments.session is not None:
            self._limit = session_time_limit
        limit_of = TimeLimit(listener, unrenewed_lease if self.in_transaction else None)
        limit_of.check(listener.time_limit)
        self._limit_of = limit_of if callable(listener.timeout) else None
        self._isolation_of = isolation_of
        self._conflicts = conflicts if self.in_transaction else None

    @property
    def in_transaction(self) -> bool:
        """Whether a delivery's end is written by the listener's own transaction."""
        return self.arguments.session is not None

    async def __call__(self, delivery: Delivery) -> None:
        """Run to the end, or raise what went wrong. With a session, returning means committed."""
        await (self._run(delivery) if self._conflicts is None else self._conflicts.run(self._run, delivery))

    async def _run(self, delivery: Delivery) -> None:
        values = self.arguments.bind(delivery)
        limit = self._limit
        if self._limit_of is not None:
            limit = self._limit_of(delivery.attempt.message, limit)
        if not self.arguments.is_async:
            await self._in_thread(delivery, values, limit)
        elif self.arguments.session is not None:
            async with self._turn():
                await self._in_session(delivery, values, limit)
        elif limit is not None:
            async with asyncio.timeout(limit.total_seconds()):
                await self.arguments.call(self._callback, values)
        else:
            await self.arguments.call(self._callback, values)

    async def _in_session(self, delivery: Delivery, values: dict[str, Any], limit: timedelta | None) -> None:
        sessions, around = self._database(delivery)
        body = partial(self.arguments.call, self._callback, values)
        await transact(sessions.asynchronous(delivery.attempt.message), around, body, self._terms(delivery, limit))

    async def _in_thread(self, delivery: Delivery, values: dict[str, Any], limit: timedelta | None) -> None:
        def work(fence: Fence) -> None:
            if self.arguments.session is None:
                fence.started()
                self._plainly(values)
            else:
                self._in_plain_session(delivery, values, self._terms(delivery, limit), fence)

        async with self._turn():
            await run_in_thread(self._executor, work, limit)

    def _in_plain_session(self, delivery: Delivery, values: dict[str, Any], terms: Terms, fence: Fence) -> None:
        sessions, around = self._database(delivery)
        session = sessions.synchronous(delivery.attempt.message)
        transact_in_thread(session, around, partial(self._plainly, values), terms, fence)

    def _plainly(self, values: dict[str, Any], session: object = None) -> None:
        try:
            returned = self.arguments.call(self._callback, values, session)
        except StopIteration as error:
            raise RuntimeError("the listener raised StopIteration") from error  # no future can carry one
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("the listener returned a coroutine that nobody awaits: make it `async def`")

    def _terms(self, delivery: Delivery, limit: timedelta | None) -> Terms:
        isolation_of = self._isolation_of
        options = None if isolation_of is None else isolation_of(delivery.attempt.message)
        return Terms(self._listener.queue, None if limit is None else limit.total_seconds(), options)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._sessions is None or not self.in_transaction else self._sessions.turn()

    def _database(self, delivery: Delivery) -> tuple[Sessions, Around]:
        assert self._sessions is not None and self._inbox is not None  # noqa: S101 - checked before the worker starts
        inbox, queue = self._inbox, self._listener.queue
        return self._sessions, lambda connection: inbox.entered(connection, queue, delivery)
