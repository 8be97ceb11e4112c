"""Calling: runs a listener's callback on the loop or in a thread, in a session if it asks for one, within its time."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.callables import not_run
from outbox.core.errors import ConfigurationError
from outbox.core.finish import finish
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import Store
from outbox.core.transport import Delivery
from outbox.inbound.arguments import Arguments
from outbox.inbound.batch_arguments import BatchArguments
from outbox.inbound.conflicts import Conflicts
from outbox.inbound.inbox import Inbox
from outbox.inbound.strategies import Isolation, TimeLimit
from outbox.inbound.threads import Fence, run_in_thread
from outbox.inbound.transactions import (
    AUTOCOMMIT,
    Around,
    Terms,
    is_autocommit,
    is_autocommit_in_thread,
    transact,
    transact_in_thread,
)
from outbox.inbound.unrenewed import Leases, Unrenewed

CONNECTED_WITHIN = 5.0  # seconds for a look at the first connection; later it is looked at when it is needed
SESSION_TIME_LIMIT = timedelta(seconds=15)  # a transaction that stays open longer holds up the whole database


class Sessions(Protocol):
    """Where listeners' sessions come from."""

    @property
    def store(self) -> Store: ...

    @property
    def depend_on_message(self) -> bool: ...

    def asynchronous(self, message: Message | None) -> AsyncSession: ...

    def synchronous(self, message: Message | None) -> Session: ...

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
        leases: Leases | None = None,
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
        limit_of = TimeLimit(listener, unrenewed_lease if self.in_transaction else None)
        limit_of.check(listener.time_limit)
        self._limit_of = limit_of if callable(listener.timeout) else None
        self._isolation_of = isolation_of
        self._conflicts = conflicts if self.in_transaction else None
        self._leases = leases

    @property
    def in_transaction(self) -> bool:
        """Whether a delivery's end is written by the listener's own transaction."""
        return self.arguments.session is not None

    async def check_session(self) -> None:
        """Refuse sessions in AUTOCOMMIT before any message is touched.

        One that depends on the message is refused when it comes. Whatever else is wrong with a session shows then, too.
        """
        sessions = self._sessions
        if not self.in_transaction or sessions is None or sessions.depend_on_message:
            return
        options = None if self._isolation_of is None else self._isolation_of.fixed
        terms = Terms(self._listener.queue, sessions.store, None, options)
        found = False
        with suppress(Exception):
            found = await finish(self._is_autocommit(sessions, terms), CONNECTED_WITHIN)
        if found:
            raise ConfigurationError(AUTOCOMMIT.format(queue=self._listener.queue))

    async def _is_autocommit(self, sessions: Sessions, terms: Terms) -> bool:
        async with sessions.turn():
            if self.arguments.is_async:
                return await is_autocommit(sessions.asynchronous(None), terms)
            look = partial(is_autocommit_in_thread, sessions.synchronous(None), terms)
            return await asyncio.get_running_loop().run_in_executor(self._executor, look)

    async def __call__(self, delivery: Delivery) -> None:
        """Run to the end, or raise what went wrong. With a session, returning means committed."""
        if self._conflicts is not None:
            await self._conflicts.run(self._in_transaction, delivery)
            return
        values = self.arguments.bind(delivery)
        limit = self._limit if self._limit_of is None else self._limit_of(delivery.attempt.message, self._limit)
        if not self.arguments.is_async:
            await run_in_thread(self._executor, partial(self._without_session, values), limit)
        elif limit is not None:
            async with asyncio.timeout(limit.total_seconds()):
                await self._awaited(values)
        elif (returned := await self.arguments.call(self._callback, values)) is not None:
            await self._run_to_its_end(returned)

    async def _in_transaction(self, delivery: Delivery) -> None:
        message = delivery.attempt.message
        values = self.arguments.bind(delivery)
        limit = self._limit if self._limit_of is None else self._limit_of(message, self._limit)
        terms = self._terms(message, limit)
        sessions, around, unrenewed = self._database(delivery, limit)

        def in_thread(fence: Fence) -> None:
            transact_in_thread(sessions.synchronous(message), around, partial(self._plainly, values), terms, fence)

        async with sessions.turn():
            with unrenewed:
                if self.arguments.is_async:
                    body = partial(self._awaited, values)
                    await transact(sessions.asynchronous(message), around, body, terms)
                else:
                    await run_in_thread(self._executor, in_thread, limit)

    async def _awaited(self, values: Any, session: object = None) -> None:
        returned = await self.arguments.call(self._callback, values, session)
        if returned is not None:
            await self._run_to_its_end(returned)

    async def _run_to_its_end(self, returned: object) -> None:
        """What a listener left to be awaited, if that is possible here."""
        if inspect.isawaitable(returned):  # a task, or what `gather` makes
            returned = await returned
        what = not_run(returned)
        if what is not None:
            raise TypeError(f"the listener returned {what} that nothing awaits")

    def _without_session(self, values: dict[str, Any], fence: Fence) -> None:
        fence.started()
        self._plainly(values)

    def _plainly(self, values: dict[str, Any], session: object = None) -> None:
        try:
            returned = self.arguments.call(self._callback, values, session)
        except StopIteration as error:
            raise RuntimeError("the listener raised StopIteration") from error  # no future can carry one
        if returned is None:
            return
        what = not_run(returned)
        if what is not None:
            if inspect.iscoroutine(returned):
                returned.close()
            raise TypeError(f"the listener returned {what} that nothing awaits: make it `async def` and await it there")

    def _terms(self, message: Message, limit: timedelta | None) -> Terms:
        options = None if self._isolation_of is None else self._isolation_of(message)
        assert self._sessions is not None  # noqa: S101 - checked before the worker starts
        seconds = None if limit is None else limit.total_seconds()
        return Terms(self._listener.queue, self._sessions.store, seconds, options)

    def _database(self, delivery: Delivery, limit: timedelta | None) -> tuple[Sessions, Around, Unrenewed]:
        sessions, leases, inbox, queue = self._sessions, self._leases, self._inbox, self._listener.queue
        assert sessions is not None and inbox is not None and leases is not None  # noqa: S101 - checked at the start
        assert limit is not None  # noqa: S101 - whatever asks for a session has one
        unrenewed = leases.of(delivery, limit)

        def around(connection: Connection) -> AbstractContextManager[None]:
            unrenewed.begin(connection)
            return inbox.entered(connection, queue, delivery)

        return sessions, around, unrenewed
