"""Notifier: wakes sleepers in other processes through PostgreSQL.

A transaction that notifies takes one lock of the whole server when it commits, and those that do wait for each other.
So NOTIFY never runs in the caller's transaction: it goes out after the commit, from a connection of ours, at most once
in a moment, and only if somebody sleeps. Whoever sleeps says so in the state table. Losing a wake-up costs time, never
a message: everybody polls.

A connection that a pooler lends out for each transaction cannot listen: its server would go on to tell strangers. So
nobody listens through a pooler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Executable, Select, String, func, literal, select, text, update

from outbox.core.pace import Pace
from outbox.stores.begin import begin
from outbox.stores.line import Line, closed
from outbox.stores.plain_line import PlainLine
from outbox.stores.straight import DRIVER

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from outbox.stores.postgresql import PostgresqlStore

logger = logging.getLogger("outbox")

MOMENT, LONGEST_MOMENT = 0.001, 0.02  # seconds between two notifications of one process, few commits or many
CROWD = 500  # commits a second that make the next moment longer
LULL = 0.1  # seconds between two questions while nobody sleeps
NAP = 5.0  # seconds for which a sleeper says that it sleeps, at least
SLEEPERS = 2  # the id of the state table's row in which they say so
CHECK = 30.0  # seconds between two checks that the listening connection lives
LAST_WORDS = 2.0  # seconds that a connection which is not wanted any more has to come about
LONGEST_DEAFNESS = 60.0  # seconds between two tries to listen where it does not work, as behind a pooler


class Notifier:
    """One listening connection for an event loop that waits, one task that notifies for one that writes."""

    def __init__(self, store: PostgresqlStore) -> None:
        self._store = store
        messages = store.messages
        self._channel = f"outbox {(messages.schema or '')[:15]}.{messages.name}"
        self._pending: set[str] = set()
        self._notifying: asyncio.Future[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asleep_until = 0.0
        self._warm = False  # whether a notification went out before, so that a connection is there
        self._moment = MOMENT
        self._announced = 0
        self._deaf = self._told_deaf = False  # whether a pooler stands between here and the server
        self._line: Line | None = None  # straight to the server, if there is such a way
        self._plain: PlainLine | None = None  # where only the caller's plain engine leads to the server
        self._opening = asyncio.Lock()
        self._letting_go: set[asyncio.Future[None]] = set()  # of connections that come too late

    def notify(self, destinations: set[str]) -> None:
        """Wake other processes soon."""
        self._announced += 1
        self._pending |= destinations
        if self._notifying is None or self._notifying.done():
            self._notifying = begin(self._notify())  # before the caller goes on, who may have much to do

    def is_pending(self, destinations: set[str]) -> bool:
        """Whether these are notified soon anyway. Any thread may ask, after a commit: what is pending is not sent."""
        pending = destinations <= self._pending
        self._announced += pending
        return pending

    async def listen(self, longest: float) -> None:
        """Be woken from now on, and tell others for how long it is worth their while."""
        loop = asyncio.get_running_loop()
        if self._listening is None or self._listening.done():
            self._listening = loop.create_task(self._listen(), name="outbox listen")
        if not self._deaf and self._asleep_until < loop.time() + longest:
            nap = max(NAP, 2 * longest)
            self._asleep_until = loop.time() + nap
            with suppress(Exception):  # a wake-up is a hint, and drivers throw what they like
                await self._store.apply(lambda connection: self._say_asleep(connection, nap))

    @property
    def has_line(self) -> bool:
        return self._line is not None and self._line.is_free

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement that stands alone, by the shortest way there is."""
        if self._line is not None and self._line.is_free:
            return await self._line.ask(statement, parameters)
        return await self._store.apply(lambda connection: connection.execute(statement, parameters).all())

    async def close(self) -> None:
        """End both tasks; what is pending is told first."""
        if self._notifying is not None and not self._notifying.done():
            await asyncio.wait([self._notifying], timeout=1)
        tasks = [task for task in (self._notifying, self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * LAST_WORDS)
        if self._line is not None:
            await asyncio.wait([asyncio.ensure_future(self._end(self._line))], timeout=2 * LAST_WORDS)
        if self._plain is not None:
            self._plain.close()

    async def _notify(self) -> None:
        if not self._warm or (self._line is not None and self._line.is_closed):
            # A script that emits and ends shall not be met in the middle of connecting. And a line that was cut is not
            # ended in the first step, which is no task's own.
            await asyncio.sleep(LONGEST_MOMENT)
        while self._pending:
            destinations, self._pending = sorted(self._pending), set()
            began, before = time.monotonic(), self._announced
            woken = False
            try:
                woken = await self._send(destinations)
                self._warm = True
            except Exception as error:  # noqa: BLE001 - a wake-up is a hint
                logger.debug("nobody was woken: %s", type(error).__name__)
            await asyncio.sleep(self._moment if woken else LULL)
            crowded = self._announced - before > CROWD * (time.monotonic() - began)
            self._moment = min(2 * self._moment, LONGEST_MOMENT) if crowded else max(self._moment / 2, MOMENT)

    async def _send(self, destinations: list[str]) -> bool:
        """Notify whoever sleeps; says whether somebody does."""
        rows = self._store.json([{"name": name} for name in destinations])
        if not self._store.driver:
            self._plain = self._plain or self._store.plain_line()
            return bool(self._plain.ask(self._statement, {"destinations": rows}))  # only in a thread of its own
        if not self._deaf and (self._line is None or self._line.is_closed):
            await self._open_line()
        return bool(await self.ask(self._statement, {"destinations": rows}))

    async def _open_line(self) -> Line | None:
        """The line, if this driver has one and no pooler stands between."""
        async with self._opening:
            if self._line is not None and self._line.is_closed:
                await self._end(self._line)
            if self._line is None and self._store.driver == DRIVER:
                connection = await self._connected()
                try:
                    if not await self._behind_a_pooler(connection):
                        self._line = Line(connection, await _raw(connection))
                finally:
                    if self._line is None:
                        await closed(connection)
        return self._line

    async def _end(self, line: Line) -> None:
        if self._line is line:
            self._line = None
        await line.end()

    @cached_property
    def _statement(self) -> Select[Any]:
        state = self._store.tables.state
        names = self._store.records("destinations", {"name": String}).alias("names")
        asleep = select(state.c.id).where(state.c.asleep_until > func.now()).exists()
        return select(func.pg_catalog.pg_notify(self._channel, names.c.name)).select_from(names).where(asleep)

    def _say_asleep(self, connection: Connection, nap: float) -> None:
        state = self._store.tables.state
        until = func.now() + literal(timedelta(seconds=nap))
        # A row of its own: routers lock the other one for as long as they work, or are frozen at work.
        connection.execute(self._store.ignoring(state), {"id": SLEEPERS, "bindings_version": 0})
        later = func.greatest(state.c.asleep_until, until)
        connection.execute(update(state).where(state.c.id == SLEEPERS).values(asleep_until=later))

    async def _listen(self) -> None:
        again = Pace(LONGEST_DEAFNESS, 1.0)
        hear = self._hear_line if self._store.driver == DRIVER else self._hear_connection
        while True:
            try:
                await hear(again)
            except Exception as error:  # noqa: BLE001 - whatever it is, polling goes on
                logger.debug("not listening for wake-ups, polling instead: %s", type(error).__name__)
            if self._deaf and not self._told_deaf:
                logger.info("wake-ups do not come through the pooler in front of the database: polling instead")
            self._told_deaf = self._deaf
            await asyncio.sleep(again.pause())

    async def _hear_line(self, again: Pace) -> None:
        """Ring the store's bells until the line ends: asyncpg calls back."""
        line = await self._open_line()
        if line is None:
            return
        try:
            ended = await line.listen(self._channel, self._store.heard)
            again.reset()
            self._store.heard_everything()
            while not await _within(CHECK, ended):
                async with asyncio.timeout(CHECK):
                    await line.check()
        finally:
            await self._end(line)

    async def _hear_connection(self, again: Pace) -> None:
        """The same where a driver is asked, and its connection can do nothing else meanwhile: psycopg."""
        connection = await self._connected()
        try:
            if await self._behind_a_pooler(connection):
                return
            await connection.execute(text(f'LISTEN "{self._channel}"'))
            again.reset()
            self._store.heard_everything()
            async for notification in (await _raw(connection)).notifies():
                self._store.heard(notification.payload)
        finally:
            await closed(connection)

    async def _connected(self) -> AsyncConnection:
        """A connection outside of every pool, because it is kept.

        Drivers leave half a connection behind when they are cancelled while they connect: whoever wants to leave waits.
        """

        async def connect() -> AsyncConnection:
            engine = await self._store.spare_engine()
            connection = await engine.connect()
            return await connection.execution_options(isolation_level="AUTOCOMMIT")

        connecting = asyncio.ensure_future(connect())
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            self._letting_go.add(closing := asyncio.ensure_future(_closed_at_once(connecting)))
            closing.add_done_callback(self._letting_go.discard)
            await asyncio.wait([closing], timeout=LAST_WORDS)  # it goes on if that is not enough
            raise

    async def _behind_a_pooler(self, connection: AsyncConnection) -> bool:
        """Whether the server was reached by way of a pooler: the process that greeted us is not the one that answers.

        Asking leaves no trace, whereas a LISTEN to try it out would stay on a connection that others use.
        """
        raw = await _raw(connection)
        greeted = raw.get_server_pid() if hasattr(raw, "get_server_pid") else raw.info.backend_pid
        self._deaf = greeted != await connection.scalar(select(func.pg_catalog.pg_backend_pid()))
        return self._deaf


async def _closed_at_once(connecting: Awaitable[AsyncConnection]) -> None:
    with suppress(Exception):  # it did not come about
        await closed(await connecting)


async def _raw(connection: AsyncConnection) -> Any:
    """The driver's own connection."""
    return (await connection.get_raw_connection()).driver_connection


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
