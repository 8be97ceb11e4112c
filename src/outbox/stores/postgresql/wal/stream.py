"""LogStream: takes the slot, reads it while there is room, and confirms what is settled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sqlalchemy import URL

from outbox.core.backoff import ErrorBackoff, Outage, RestartDelay
from outbox.core.errors import ClosedForGood
from outbox.core.events import Advised, Observer, SlotInUse, SlotTaken
from outbox.stores.postgresql.wal.buffer import LogBuffer, LoggedMessage
from outbox.stores.postgresql.wal.connection import ReplicationConnection
from outbox.stores.postgresql.wal.feed import LogFeed, _local
from outbox.stores.postgresql.wal.inserted_row import InsertedRow
from outbox.stores.postgresql.wal.pgoutput import (
    Begin,
    Commit,
    Insert,
    Keepalive,
    LogData,
    PgoutputDecoder,
    unframed,
)
from outbox.stores.postgresql.wal.server_watch import ServerWatch
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.window import LoggedTransaction

IN_USE = "55006"  # another relay has the slot
FRAMES_AT_ONCE = 500  # read before other tasks have their turn
TELL_EVERY = 1.0  # seconds between two positions that the server is told; it waits much longer for a sign of life
TELL_SOONEST = 0.1  # the same while positions advance
SWEEP_EVERY = 300.0  # seconds between two sweeps
SHORTEST, LONGEST = 0.2, 30.0  # seconds of pause after an error, doubling


class Reading:
    """What one connection's frames become: messages in the buffer, rows left to the table, positions."""

    def __init__(self, feed: LogFeed, is_ours: Callable[[str, str], bool], settled_before: int) -> None:
        self._feed = feed
        self._buffer: LogBuffer = feed.buffer
        self._window = feed.buffer.renew()
        self._decoder = PgoutputDecoder()
        self._is_ours = is_ours
        self._settled_before = settled_before  # an earlier holder may have settled what was committed before
        self._transaction: LoggedTransaction | None = None
        self._is_doubtful = False
        self.asked = False  # whether the server wants an answer
        self.received = 0

    @property
    def confirmed(self) -> int:
        return self._window.confirmed

    @property
    def waits(self) -> bool:
        """Whether anything is not settled."""
        return not self._window.is_empty

    def take(self, frame: bytes) -> None:
        """Take one frame, without waiting for anything: no position can be confirmed past what it holds."""
        match unframed(frame):
            case Keepalive(position, sent_at, reply):
                self._feed.server_time(sent_at)
                self.received = max(self.received, position)
                self._window.sent_up_to(position)
                self.asked = self.asked or reply
            case LogData(_, data):
                self._decoded(self._decoder.decode(data))

    def _decoded(self, message: Any) -> None:
        match message:
            case Begin(final_position, committed_at, xid):
                self._transaction = self._window.begin(xid, committed_at)
                self._is_doubtful = final_position < self._settled_before
            case Insert(relation, _) if self._is_ours(relation.namespace, relation.name):
                self._inserted(message)
            case Commit(end) if self._transaction is not None:
                self.received = max(self.received, end)
                self._window.commit(self._transaction, end)
                self._transaction = None

    def _inserted(self, insert: Insert) -> None:
        row, transaction = InsertedRow.of(insert), self._transaction
        if transaction is None or not row.is_fresh:
            return  # it has its queue already, was done, or is left to the table
        message = LoggedMessage(row, transaction, self._window, doubtful=self._is_doubtful)
        if row.attempt is None or row.due_at > transaction.committed_at:
            self._buffer.hold(message)
            self._feed.writer.leave([message])
        else:
            self._buffer.add(message)


class LogStream:
    """Runs until it is told to stop: as the slot's holder, or as a standby that waits for it."""

    def __init__(
        self,
        feed: LogFeed,
        slot: LogSlot,
        url: URL,
        *,
        observe: Observer,
        slot_in_use_delay: float,
        restart_delay: RestartDelay | None,
    ) -> None:
        self._feed = feed
        self._slot = slot
        self._url = url
        self._observe = observe
        self._slot_in_use_delay = slot_in_use_delay
        self._trouble = ErrorBackoff(LONGEST, SHORTEST, restart_delay)
        self._outage = Outage("relay", f"the replication slot {slot.name}", observe)
        self._loop = asyncio.get_running_loop()
        self._sweep_before: tuple[str, int] | None = None  # a transaction, and the position to be confirmed before
        self._sweep_at = 0.0
        self._beside: asyncio.Task[None] | None = None  # a sweep

    async def run(self, stop: asyncio.Event) -> None:
        """Hold the slot, or wait for it, until `stop`. What was claimed is settled first."""
        waking = self._loop.create_task(self._wake(stop), name="outbox log stop")
        try:
            while not stop.is_set():
                try:
                    await self._session(stop)
                except ClosedForGood:
                    raise
                except Exception as error:  # noqa: BLE001 - a relay outlives whatever its database throws
                    pause = self._trouble.pause(error)
                    self._outage.struck(error, timedelta(seconds=pause))
                    await _sleep(stop, pause)
        finally:
            waking.cancel()
            await self._feed.writer.close()

    async def _wake(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._feed.changed.set()

    async def record(self, system: str, timeline: int) -> None:
        """Record which server's log is read, and tell if it is another one than before."""
        for news in await self._slot.record(system, timeline):
            self._observe(Advised("relay", news))

    async def _session(self, stop: asyncio.Event) -> None:
        connection = await ReplicationConnection.open(self._url, self._slot.application)
        try:
            system, timeline, _ = await connection.identify()
            if not await self._taken(connection, stop):
                return
            try:
                reading = await self._began(system, timeline)
                await self._read(connection, reading, stop)
                await connection.end(reading.received, reading.confirmed, _local())
            finally:
                self._feed.lost_slot()
                await self._end_sweep()
        finally:
            await connection.close()

    async def _taken(self, connection: ReplicationConnection, stop: asyncio.Event) -> bool:
        """Wait for the slot; False if it stops before."""
        told = False
        while not stop.is_set():
            await self._slot.check()
            # What an earlier connection brought and is still on its way would come again.
            while not self._feed.is_idle and not stop.is_set():
                self._feed.changed.clear()
                await _until(self._feed.changed, stop, 1.0)
            try:
                await connection.start(self._slot.name, self._slot.publication)
                return True
            except Exception as error:
                if getattr(error, "sqlstate", None) != IN_USE:
                    raise
                if not told:
                    self._observe(SlotInUse(self._slot.name, str(error).splitlines()[0]))
                told = True
                self._trouble.reset()
                self._outage.over()
                await _sleep(stop, self._slot_in_use_delay)
        return False

    async def _began(self, system: str, timeline: int) -> Reading:
        bound = await self._feed.table.sweep_bound()
        await self.record(system, timeline)
        self._sweep_before = bound
        reading = Reading(self._feed, self._slot.is_ours, bound[1])
        self._feed.took_slot()
        self._observe(SlotTaken(self._slot.name, self._slot.retained_bytes))
        return reading

    async def _read(self, connection: ReplicationConnection, reading: Reading, stop: asyncio.Event) -> None:
        watch = ServerWatch(self._slot.probe)
        try:
            await self._read_watched(connection, reading, watch, stop)
        finally:
            await watch.end()

    async def _read_watched(
        self, connection: ReplicationConnection, reading: Reading, watch: ServerWatch, stop: asyncio.Event
    ) -> None:
        feed = self._feed
        told, tell_at = 0, 0.0
        while True:
            feed.changed.clear()
            count = self._frames(connection, reading, stopping=stop.is_set())
            now = self._loop.time()
            if reading.asked or now >= tell_at or (reading.confirmed > told and now >= tell_at - TELL_EVERY):
                reading.asked = False
                told, tell_at = reading.confirmed, now + TELL_EVERY + TELL_SOONEST
                connection.send(reading.received, reading.confirmed, _local())
                self._trouble.reset()
                self._outage.over()
            watch.look(reading.confirmed, waits=reading.waits)
            if stop.is_set():
                feed.has_slot = False
                if feed.is_idle:
                    return
            self._sweep_if_time(reading, now)
            if count >= FRAMES_AT_ONCE:
                await asyncio.sleep(0)
                continue
            soon = TELL_SOONEST if reading.confirmed > told else tell_at - now
            await connection.wait(
                feed.changed, max(0.0, min(soon, TELL_EVERY)), reading=feed.buffer.has_room and not stop.is_set()
            )

    def _frames(self, connection: ReplicationConnection, reading: Reading, *, stopping: bool) -> int:
        """Take what has arrived, while there is room. A client that reads on has the server's log in its memory."""
        count = 0
        while count < FRAMES_AT_ONCE and self._feed.buffer.has_room and not stopping:
            frame = connection.frame()
            if frame is None:
                break
            reading.take(frame)
            count += 1
        return count

    # Rows that the log did not bring.

    def _sweep_if_time(self, reading: Reading, now: float) -> None:
        if self._beside is not None and not self._beside.done():
            return
        if self._sweep_before is not None and reading.confirmed >= self._sweep_before[1]:
            before, self._sweep_before = self._sweep_before[0], None
            self._sweep_at = now + SWEEP_EVERY
            self._start(self._sweep(before))
        elif self._sweep_before is None and now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY
            self._start(self._bound())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._beside = self._loop.create_task(work, name="outbox log sweep")

    async def _bound(self) -> None:
        with suppress(Exception):  # it is tried again
            self._sweep_before = await self._feed.table.sweep_bound()
            for news in await self._slot.concerns():
                self._observe(Advised("relay", news))

    async def _sweep(self, before: str) -> None:
        try:
            count = await self._feed.table.sweep(before)
        except Exception:  # noqa: BLE001 - drivers throw what they like when their database is away
            self._sweep_at = 0.0
            return
        self._feed.swept(count)
        if count:
            found = f"{count} messages were in the table that the slot {self._slot.name} did not bring, and go out now"
            self._observe(Advised("relay", f"{found}: it was made or moved after they were committed"))

    async def _end_sweep(self) -> None:
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait([self._beside])


async def _sleep(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


async def _until(event: asyncio.Event, stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
