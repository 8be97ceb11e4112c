"""Invocation: a listener's callback, run on the loop or in a thread, within its time, perhaps in a session."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.callables import not_run
from outbox.core.durations import as_lifetime, configured
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.listener_options import named_level
from outbox.core.loops import finish
from outbox.core.message import Message
from outbox.core.store import Store
from outbox.core.transport import Delivery
from outbox.inbound.arguments import Arguments
from outbox.inbound.batch_arguments import BatchArguments
from outbox.inbound.inbox import Inbox
from outbox.inbound.reruns import Rerun, Reruns
from outbox.inbound.threads import Fence, run_in_thread
from outbox.inbound.transactions import (
    AUTOCOMMIT,
    Around,
    Leases,
    TransactionOptions,
    Unrenewed,
    check_answers,
    is_autocommit,
    is_autocommit_in_thread,
    transact,
    transact_in_thread,
)

CONNECTED_WITHIN = 5.0  # seconds for a look at the first connection; later it is looked at when it is needed
SESSION_TIME_LIMIT = timedelta(seconds=15)  # a transaction that stays open longer holds up the whole database


class ListenerSessionSource(Protocol):
    """Where listeners' sessions come from."""

    @property
    def store(self) -> Store: ...

    @property
    def depend_on_message(self) -> bool: ...

    def asynchronous(self, message: Message | None) -> AsyncSession: ...

    def synchronous(self, message: Message | None) -> Session: ...

    def turn(self) -> AbstractAsyncContextManager[None]: ...


class Invocation:
    """One listener's callback, ready to be called."""

    def __init__(
        self,
        listener: Listener,
        sessions: ListenerSessionSource | None,
        inbox: Inbox | None,
        executor: Executor,
        session_time_limit: timedelta = SESSION_TIME_LIMIT,
        queue_name: str | None = None,  # what the destination calls the listener's queue, if that is something else
        *,
        unrenewed_lease: timedelta | None = None,  # the one that a transaction of the listener must not outlast
        isolation_of: IsolationOf | None = None,  # if it asks for a level of isolation
        reruns: Reruns | None = None,
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
        self._reruns = reruns if self.in_transaction else None
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
        isolation = None if self._isolation_of is None else self._isolation_of.fixed
        options = TransactionOptions(self._listener.queue, sessions.store, None, isolation)
        found = False
        with suppress(Exception):
            found = await finish(self._is_autocommit(sessions, options), CONNECTED_WITHIN)
        if found:
            raise ConfigurationError(AUTOCOMMIT.format(queue=self._listener.queue))

    async def _is_autocommit(self, sessions: ListenerSessionSource, options: TransactionOptions) -> bool:
        async with sessions.turn():
            if self.arguments.is_async:
                return await is_autocommit(sessions.asynchronous(None), options)
            look = partial(is_autocommit_in_thread, sessions.synchronous(None), options)
            return await asyncio.get_running_loop().run_in_executor(self._executor, look)

    async def __call__(self, delivery: Delivery) -> None:
        """Run to the end, or raise what went wrong. With a session, returning means committed."""
        if self._reruns is not None:
            rerun: Rerun | None = None
            while True:
                try:
                    await self._transact(delivery, in_doubt=rerun is not None and rerun.in_doubt)
                    self._reruns.outage.over()
                    return
                except Exception as error:
                    rerun = rerun or self._reruns.of(delivery)
                    if delivery.is_lost or not await rerun.wait(error):
                        raise
        values = self.arguments.bind(delivery)
        limit = self._limit if self._limit_of is None else self._limit_of(delivery.attempt.message, self._limit)
        if not self.arguments.is_async:
            await run_in_thread(self._executor, partial(self._without_session, values), limit)
        elif limit is not None:
            async with asyncio.timeout(limit.total_seconds()):
                await self._awaited(values)
        elif (returned := await self.arguments.call(self._callback, values)) is not None:
            await self._run_to_its_end(returned)

    async def _transact(self, delivery: Delivery, *, in_doubt: bool) -> None:
        message = delivery.attempt.message
        values = self.arguments.bind(delivery)
        limit = self._limit if self._limit_of is None else self._limit_of(message, self._limit)
        options = self._transaction_options(message, limit)
        sessions, around, unrenewed = self._database(delivery, limit, in_doubt)

        def in_thread(fence: Fence) -> None:
            transact_in_thread(sessions.synchronous(message), around, partial(self._plainly, values), options, fence)

        async with sessions.turn(), unrenewed:
            if self.arguments.is_async:
                body = partial(self._awaited, values)
                await transact(sessions.asynchronous(message), around, body, options)
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

    def _transaction_options(self, message: Message, limit: timedelta | None) -> TransactionOptions:
        isolation = None if self._isolation_of is None else self._isolation_of(message)
        assert self._sessions is not None  # noqa: S101 - checked before the worker starts
        seconds = None if limit is None else limit.total_seconds()
        return TransactionOptions(self._listener.queue, self._sessions.store, seconds, isolation)

    def _database(
        self, delivery: Delivery, limit: timedelta | None, in_doubt: bool
    ) -> tuple[ListenerSessionSource, Around, Unrenewed]:
        sessions, leases, inbox, queue = self._sessions, self._leases, self._inbox, self._listener.queue
        assert sessions is not None and inbox is not None and leases is not None  # noqa: S101 - checked at the start
        assert limit is not None  # noqa: S101 - whatever asks for a session has one
        unrenewed = leases.of(delivery, limit)

        def around(connection: Connection) -> AbstractContextManager[None]:
            unrenewed.begin(connection)
            if in_doubt:
                check_answers(connection, queue)
            return inbox.entered(connection, queue, delivery)

        return sessions, around, unrenewed


# What a listener's options say of one message, where they are functions.


class TimeLimit:
    """How long one message may take, by the listener's `timeout`."""

    def __init__(self, listener: Listener, lease: timedelta | None) -> None:
        self._listener = listener
        self._lease = lease  # none: it is renewed whatever the listener does

    def __call__(self, message: Message, default: timedelta | None) -> timedelta | None:
        timeout = self._listener.timeout
        said = timeout(message) if callable(timeout) else timeout
        if said is None:
            return default
        limit = configured(as_lifetime, said, what="timeout")
        self.check(limit)
        return limit

    def check(self, limit: timedelta | None) -> None:
        """Refuse a limit that outlasts a lease which cannot be renewed meanwhile."""
        if limit is not None and self._lease is not None and limit >= self._lease:
            raise ConfigurationError(
                f"{self._listener.queue}: timeout={limit.total_seconds():g} s is not shorter than its lease of "
                f"{self._lease.total_seconds():g} s. While a listener's transaction is open, SQLite blocks all other "
                "writes, the renewal of its lease included: lower the timeout or raise the lease"
            )


class IsolationOf:
    """What a listener's connection is told, by its `isolation_level`."""

    def __init__(self, listener: Listener, store: Store) -> None:
        self._level = listener.isolation_level
        self._store = store

    def __call__(self, message: Message) -> Mapping[str, Any]:
        return self._options(self._level(message)) if callable(self._level) else self.fixed

    @property
    def fixed(self) -> Mapping[str, Any]:
        """What it is told whatever the message is."""
        return {} if callable(self._level) else self._options(self._level)

    def _options(self, level: str | None) -> Mapping[str, Any]:
        return {} if level is None else self._store.transactions.isolation(named_level(level))
