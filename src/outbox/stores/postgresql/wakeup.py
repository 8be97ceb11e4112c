"""PostgresqlWakeup: wakes other processes by NOTIFY after a commit, and is woken by theirs."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Select, String, func, literal, select, text, update

from outbox.core.backoff import Backoff
from outbox.core.errors import ConfigurationError
from outbox.core.kept_property import kept_property
from outbox.core.loops import running_loop
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql import notifying_thread
from outbox.stores.postgresql.callers import PostgresqlCallers
from outbox.stores.postgresql.connection import DRIVER, LATE_CONNECTION, DirectConnection, PlainLine, begin, closed, raw
from outbox.stores.postgresql.runner import LoopNotifier, PostgresqlRunner
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.wakeup import Wakeup

# Notifier: wakes sleepers in other processes through PostgreSQL.
# A transaction that notifies takes one lock of the whole server when it commits, and those that do wait for each
# other. So NOTIFY never runs in the caller's transaction: it goes out after the commit, from a connection of ours, at
# most once in a moment, and only if a process sleeps, which the state table says. Losing a wake-up costs time, never a
# message: every process polls.
# A connection that a pooler lends out for each transaction cannot listen: its server would go on to tell strangers. So
# no process listens through a pooler.

logger = logging.getLogger("outbox")

MOMENT, LONGEST_MOMENT = 0.001, 0.02  # seconds between two notifications of one process, few commits or many
CROWD = 500  # commits a second that make the next moment longer
LULL = 0.1  # seconds between two questions while no process sleeps
NAP = 5.0  # seconds for which a sleeper says that it sleeps, at least
SLEEPERS = 2  # the id of the state table's row in which they say so
CHECK = 30.0  # seconds between two checks that the listening connection lives
LONGEST_DEAFNESS = 60.0  # seconds between two tries to listen where it does not work, as behind a pooler


class Notifier:
    """One listening connection for an event loop that waits, one task that notifies for one that writes."""

    def __init__(
        self, tables: Tables, dialect: SqlDialect, runner: Runner, direct: DirectConnection, wakeup: PostgresqlWakeup
    ) -> None:
        self._tables = tables
        self._dialect = dialect
        self._runner = runner
        self._direct = direct
        self._wakeup = wakeup
        messages = tables.messages
        self._channel = f"outbox {(messages.schema or '')[:15]}.{messages.name}"
        self._pending: set[str] = set()
        self._notifying: asyncio.Future[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asleep_until = 0.0
        self._warm = False  # whether a notification went out before, so that a connection is there
        self._moment = MOMENT
        self._announced = 0
        self._told_deaf = False
        self._closing = False
        self._plain: PlainLine | None = None  # where only the caller's plain engine leads to the server

    def notify(self, destinations: set[str]) -> None:
        """Wake other processes soon; none while it closes, because a connection that it opened then would stay open."""
        if self._closing:
            return
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
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        if self._listening is None or self._listening.done():
            self._listening = loop.create_task(self._listen(), name="outbox listen")
        if not self._direct.deaf and self._asleep_until < loop.time() + longest:
            nap = max(NAP, 2 * longest)
            self._asleep_until = loop.time() + nap
            with suppress(Exception):  # a wake-up is a hint, and drivers throw what they like
                await self._runner.apply(lambda connection: self._say_asleep(connection, nap))

    async def close(self) -> None:
        """End both tasks; what is pending is told first."""
        self._closing = True
        try:
            await self._end_tasks()
        except BaseException:
            self._closing = False  # cancelled: it goes on until the next close
            raise
        if self._plain is not None:
            self._plain.close()

    async def _end_tasks(self) -> None:
        if self._notifying is not None and not self._notifying.done():
            await asyncio.wait([self._notifying], timeout=1)
        tasks = [task for task in (self._notifying, self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * LATE_CONNECTION)

    async def _notify(self) -> None:
        if not self._warm or self._direct.is_cut:
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
                logger.debug("no worker was notified: %s", type(error).__name__)
            await asyncio.sleep(self._moment if woken else LULL)
            crowded = self._announced - before > CROWD * (time.monotonic() - began)
            self._moment = min(2 * self._moment, LONGEST_MOMENT) if crowded else max(self._moment / 2, MOMENT)

    async def _send(self, destinations: list[str]) -> bool:
        """Notify the processes that sleep; says whether any does."""
        rows = self._dialect.json([{"name": name} for name in destinations])
        if not self._direct.driver:
            self._plain = self._plain or self._wakeup.plain_line()
            return bool(self._plain.ask(self._statement, {"destinations": rows}))  # only in a thread of its own
        if not self._direct.deaf and (self._direct.line is None or self._direct.line.is_closed):
            await self._direct.open()
        return bool(await self._direct.ask(self._statement, {"destinations": rows}))

    @kept_property
    def _statement(self) -> Select[Any]:
        state = self._tables.state
        names = self._dialect.records("destinations", {"name": String}).alias("names")
        asleep = select(state.c.id).where(state.c.asleep_until > func.now()).exists()
        return select(func.pg_catalog.pg_notify(self._channel, names.c.name)).select_from(names).where(asleep)

    def _say_asleep(self, connection: Connection, nap: float) -> None:
        state = self._tables.state
        until = func.now() + literal(timedelta(seconds=nap))
        # A row of its own: routers lock the other one for as long as they work, or are frozen at work.
        connection.execute(self._dialect.ignoring(state), {"id": SLEEPERS, "bindings_version": 0})
        later = func.greatest(state.c.asleep_until, until)
        connection.execute(update(state).where(state.c.id == SLEEPERS).values(asleep_until=later))

    async def _listen(self) -> None:
        again = Backoff(LONGEST_DEAFNESS, 1.0)
        hear = self._hear_line if self._direct.driver == DRIVER else self._hear_connection
        while True:
            try:
                await hear(again)
            except Exception as error:  # noqa: BLE001 - whatever it is, polling goes on
                logger.debug("not listening for wake-ups, polling instead: %s", type(error).__name__)
            if self._direct.deaf and not self._told_deaf:
                logger.info("wake-ups do not come through the pooler in front of the database: polling instead")
            self._told_deaf = self._direct.deaf
            await asyncio.sleep(again.pause())

    async def _hear_line(self, again: Backoff) -> None:
        """Wake the store's tasks until the connection ends: asyncpg calls back."""
        line = await self._direct.open()
        if line is None:
            return
        try:
            ended = await line.listen(self._channel, self._wakeup.heard)
            again.reset()
            self._wakeup.heard_everything()
            while not await _within(CHECK, ended):
                async with asyncio.timeout(CHECK):
                    await line.check()
        finally:
            await self._direct.end(line)

    async def _hear_connection(self, again: Backoff) -> None:
        """The same where a driver is asked, and its connection can do nothing else meanwhile: psycopg."""
        connection = await self._direct.connected()
        try:
            if await self._direct.behind_a_pooler(connection):
                return
            await connection.execute(text(f'LISTEN "{self._channel}"'))
            again.reset()
            self._wakeup.heard_everything()
            async for notification in (await raw(connection)).notifies():
                self._wakeup.heard(notification.payload)
        finally:
            await closed(connection)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class PostgresqlWakeup(Wakeup):
    """A notifier for each event loop, and a thread of ours for callers without one."""

    def __init__(
        self, tables: Tables, dialect: SqlDialect, runner: PostgresqlRunner, callers: PostgresqlCallers
    ) -> None:
        super().__init__()
        self._tables = tables
        self._dialect = dialect
        self._runner = runner
        self._callers = callers
        self.notifies_in_thread = True
        self._quiet: set[str] = set()  # destinations of which nothing was heard since a claim found nothing

    async def listen(self, longest: float) -> None:
        await self.notifier.listen(longest)

    def announce(self, *destinations: str | None) -> None:
        names = {destination or NOT_ROUTED for destination in destinations}
        self._quiet -= names
        super().announce(*destinations)
        self._notify(names)

    def is_quiet(self, destination: str) -> bool:
        """Whether a claim found nothing here, and no wake-up came since."""
        return destination in self._quiet

    def found(self, destination: str, anything: bool) -> None:
        """What a claim found."""
        (self._quiet.discard if anything else self._quiet.add)(destination)

    def heard(self, destination: str) -> None:
        """Another process has work for this destination."""
        self._quiet.discard(destination)
        self.ring(destination)

    def heard_everything(self) -> None:
        """No connection listened until now: there may be work for any destination."""
        self._quiet.clear()
        self.ring_all()

    @property
    def notifier(self) -> LoopNotifier:
        """The running loop's."""
        in_loop = self._runner.loops.here()
        if in_loop.notifier is None:
            in_loop.notifier = Notifier(self._tables, self._dialect, self._runner, in_loop.direct, self)
        return in_loop.notifier

    def _notify(self, destinations: set[str]) -> None:
        """Wake other processes, from an event loop of this one, or from a thread of ours where there is none."""
        loop = running_loop()
        has_engine = bool(self._runner.driver)
        if loop is None or loop not in self._runner.loops:
            # A loop that lasts speaks for one that may not.
            for other, in_loop in self._runner.loops.elsewhere().items():
                with suppress(RuntimeError):  # it was closed meanwhile
                    if in_loop.notifier is None or not in_loop.notifier.is_pending(destinations):
                        other.call_soon_threadsafe(self.notify_here, destinations)
                    return
        if loop is not None and has_engine:
            self.notify_here(destinations)
        elif self.notifies_in_thread and (has_engine or self._callers.engine is not None):
            notifying_thread.thread.notify(self, destinations)

    def notify_here(self, destinations: set[str]) -> None:
        """Wake other processes from the running event loop."""
        self.notifier.notify(destinations)

    def plain_line(self) -> PlainLine:
        """A connection beside the engine of callers, where this store has none of its own."""
        engine = None if self._callers.engine is None else self._callers.engine()
        if engine is None:
            raise ConfigurationError("the engine of the callers is gone")
        return PlainLine(engine, self._callers.on)
