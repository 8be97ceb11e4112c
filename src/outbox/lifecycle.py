"""Lifecycle: what a relay or a worker does from its start to its end, and in which order it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from outbox.background import in_background
from outbox.core.errors import TransportMismatch, WrongEventLoop
from outbox.core.events import Failed, Observer, Started, Stopped
from outbox.core.listener import Listener, check_listeners
from outbox.core.log import LogReader, LogStore
from outbox.core.transport import Transport
from outbox.parts import Parts
from outbox.shutdown import Shutdown, on_signals

RELAY_ENDS_WITHIN = 8.0  # seconds that a relay has which did not end within the grace; a silent database takes most


class Lifecycle:
    """The relays and workers that are at work for one outbox, in each event loop."""

    def __init__(self, parts: Callable[[], Parts], close: Callable[[], Awaitable[None]]) -> None:
        self._parts = parts  # those of the last setup()
        self._close = close
        self._runs: Counter[asyncio.AbstractEventLoop] = Counter()

    async def until_signals(self, **work: Any) -> int:
        """Work until SIGINT or SIGTERM. The last one of an event loop closes its connections."""
        with on_signals() as shutdown:
            try:
                return await self.run(shutdown, **work)
            finally:
                await self.close_after_last()

    def in_background(self, **work: Any) -> AbstractAsyncContextManager[None]:
        """Work while a block lasts."""
        return in_background(lambda shutdown, ready: self.run(shutdown, ready=ready, **work))

    def working_off(self, listeners: Sequence[Listener]) -> AbstractAsyncContextManager[None]:
        """Serve what was stored for listeners, whatever the transport for what is emitted here."""
        parts = self._parts()
        if parts.on_database:
            return self.in_background(listeners=listeners)
        apart = parts.database_transport(binds=False)
        return self.in_background(listeners=listeners, transport=apart, leftovers=True)

    async def run(
        self,
        shutdown: Shutdown,
        *,
        relay: bool = False,
        listeners: Sequence[Listener] = (),
        leftovers: bool = False,
        store_first: bool = False,
        transport: Transport | None = None,
        ready: asyncio.Event | None = None,
    ) -> int:
        """Open, work until the shutdown, close; how many listeners were abandoned."""
        if listeners or not relay:
            check_listeners(listeners)
        if store_first:
            from outbox.inbound.store_first import stored_first

            listeners = [stored_first(listener) for listener in listeners]
        parts = self._parts()
        # A transport that holds deliveries is closed with the run that holds them, not with another one beside it.
        if transport is None:
            transport = parts.database_transport() if parts.on_database else self._transport_here(parts)
        needs_store = relay or transport.features.in_store or parts.engines.configured
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.at_work(parts))
            if needs_store:
                parts.engines.check()  # a plain engine is told so, with advice
                await (parts.store.open() if leftovers else open_store(parts, transport))
            stack.push_async_callback(transport.close)
            await transport.open()
            worker = await parts.workers.of(transport, listeners, stack) if listeners else None
            if listeners and needs_store:
                await parts.owners.record_services(transport, listeners)
            storage = parts.workers.storage(transport, listeners, stack)
            if relay and transport.routes:
                await parts.relays.bind(transport)
            hands_on = relay or (transport.takers is not None and not leftovers)
            reader = await log_reader(parts, transport) if hands_on and needs_store else None
            relays = parts.relays.of(transport, relay, routes=not leftovers, reader=reader) if needs_store else []
            what = "worker" if listeners else "relay"
            parts.observe(Started(what, _described(transport, listeners)))
            if ready is not None:
                ready.set()
            start = partial(_start, what, shutdown, parts.observe)
            tasks: list[asyncio.Task[Any]] = [start(each.run(shutdown.begun)) for each in relays]
            if storage is not None:
                tasks.append(start(storage.run(shutdown.begun, shutdown.forced)))
            stack.push_async_callback(_end, tasks, shutdown, parts.settings.duration("grace"))
            abandoned = 0
            if worker is not None:
                abandoned = await start(worker.run(shutdown.begun, shutdown.forced))
            else:
                await shutdown.begun.wait()
        parts.observe(Stopped(what, abandoned))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises what ended one of them: its transport is closed for good
        return abandoned

    @asynccontextmanager
    async def at_work(self, parts: Parts) -> AsyncIterator[None]:
        """Counts as a run of this event loop. The last one to end closes the store."""
        loop = asyncio.get_running_loop()
        self._runs[loop] += 1
        try:
            yield
        finally:
            self._runs[loop] -= 1
            if not self._runs[loop]:
                del self._runs[loop]
                if parts.engines.configured:
                    await parts.store.close()

    async def close_after_last(self) -> None:
        """Close the connections of this event loop, unless something is still at work in it."""
        if not self._runs[asyncio.get_running_loop()]:
            await self._close()

    def forked(self) -> None:
        """In a child process nothing is at work yet."""
        self._runs.clear()

    def _transport_here(self, parts: Parts) -> Transport:
        """The configured transport, whose connections are those of one event loop until its runs have ended."""
        here = asyncio.get_running_loop()
        for loop in [loop for loop in self._runs if loop is not here]:
            if not loop.is_closed():
                raise WrongEventLoop(
                    f"a relay or a worker of this outbox is at work in another event loop, and the connections of the "
                    f"transport {parts.transport.name!r} are that loop's: make an Outbox for each loop"
                )
            del self._runs[loop]
            parts.forget_transport()
        return parts.transport


async def open_store(parts: Parts, transport: Transport) -> None:
    """Open the store for a transport, unless its table belongs to another one."""
    table = parts.tables.messages.fullname
    await parts.store.open()
    recorded = await parts.store.maintenance.record_transport(transport.name)
    if recorded != transport.name:
        raise TransportMismatch(
            f"the table {table!r} belongs to the transport {recorded!r}, and this process uses {transport.name!r}: it "
            f"would take the other's messages. If the change is meant, stop the processes of {recorded!r} and run: "
            f"outbox tables switch-transport {transport.name}"
        )
    await parts.owners.record_address(table, transport)


async def log_reader(parts: Parts, transport: Transport) -> LogReader | None:
    """What reads the database's log: for a relay's feed, or to wake what routes in the database.

    Beside a relay that polls, what ends it when its messages come from the log.
    """
    from outbox.outbound.feed_guard import FeedGuard

    publishes = transport.takers is None and not transport.routes
    reader: LogReader
    if parts.from_log:
        reader = parts.log_reader(transport, feeds=publishes)
    elif publishes and isinstance(parts.store, LogStore):
        table = parts.tables.messages.fullname
        reader = FeedGuard(parts.store.owners, table, parts.settings.seconds_between_looks)
    else:
        return None
    await reader.begin()
    return reader


def _start(what: str, shutdown: Shutdown, observe: Observer, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start one part of a run. If it ends by itself, everything ends."""

    def ended(task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not shutdown.begun.is_set():
            observe(Failed(what, error))
        shutdown.begun.set()

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


async def _end(tasks: list[asyncio.Task[Any]], shutdown: Shutdown, grace: timedelta) -> None:
    """Let relays finish the round they are in, within the grace and unless the shutdown is forced."""
    shutdown.begun.set()
    forced = asyncio.create_task(shutdown.forced.wait())
    ending: list[asyncio.Future[Any]] = [forced, asyncio.gather(*tasks, return_exceptions=True)]
    try:
        await asyncio.wait(ending, timeout=grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (forced, *tasks):
            task.cancel()
        await asyncio.wait([forced, *tasks], timeout=RELAY_ENDS_WITHIN)


def _described(transport: Transport, listeners: Sequence[Listener]) -> str:
    queues = ", ".join(listener.queue for listener in listeners)
    return f"transport {transport.name}" + (f", queues {queues}" if queues else "")
