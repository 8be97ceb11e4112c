"""LogStream: takes the slot, reads it while there is room, and confirms what is settled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sqlalchemy import URL

from outbox.core.backoff import ErrorBackoff, Outage, RestartDelay
from outbox.core.errors import ClosedForGood
from outbox.core.events import Advised, Observer, SlotInUse, SlotTaken
from outbox.stores.postgresql.wal.connection import ReplicationConnection
from outbox.stores.postgresql.wal.inserted_row import local_time
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
from outbox.stores.postgresql.wal.sink import LogSink
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.window import LoggedTransaction

IN_USE = "55006"  # another relay has the slot
FRAMES_AT_ONCE = 500  # read before other tasks have their turn
TELL_EVERY = 1.0  # seconds between two positions that the server is told; it waits much longer for a sign of life
TELL_SOONEST = 0.1  # the same while positions advance
EXAMINE_EVERY = 300.0  # seconds between two examinations of the slot
SHORTEST, LONGEST = 0.2, 30.0  # seconds of pause after an error, doubling


class Reading:
    """What one connection's frames become: rows in the sink, and positions."""

    def __init__(self, sink: LogSink, is_ours: Callable[[str, str], bool]) -> None:
        self._sink = sink
        self._window = sink.window
        self._decoder = PgoutputDecoder()
        self._is_ours = is_ours
        self._transaction: LoggedTransaction | None = None
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
                self._sink.set_time(sent_at)
                self.received = max(self.received, position)
                self._window.sent_up_to(position)
                self.asked = self.asked or reply
            case LogData(_, data):
                self._decoded(self._decoder.decode(data))

    def _decoded(self, message: Any) -> None:
        match message:
            case Begin(position, committed_at, xid):
                self._transaction = self._window.begin(xid, committed_at, position)
            case Insert(relation, _) if self._is_ours(relation.namespace, relation.name):
                if self._transaction is not None:
                    self._sink.insert(message, self._transaction)
            case Commit(end) if self._transaction is not None:
                self.received = max(self.received, end)
                self._window.commit(self._transaction, end)
                self._transaction = None


class LogStream:
    """Runs until it is told to stop: as the slot's holder, or as a standby that waits for it."""

    def __init__(
        self,
        sink: LogSink,
        slot: LogSlot,
        url: URL,
        *,
        observe: Observer,
        slot_in_use_delay: float,
        restart_delay: RestartDelay | None,
    ) -> None:
        self._sink = sink
        self._slot = slot
        self._url = url
        self._observe = observe
        self._slot_in_use_delay = slot_in_use_delay
        self._trouble = ErrorBackoff(LONGEST, SHORTEST, restart_delay)
        self._outage = Outage("relay", f"the replication slot {slot.name}", observe)
        self._loop = asyncio.get_running_loop()
        self._examine_at = 0.0  # by the loop's clock
        self._examining: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Hold the slot, or wait for it, until `stop`. What was claimed is settled first."""
        waking = self._loop.create_task(self._wake(stop), name="outbox log stop")
        try:
            while not stop.is_set():
                try:
                    await self._session(stop)
                except Exception as error:
                    if isinstance(error, ClosedForGood) and self._sink.is_needed:
                        raise
                    pause = self._trouble.pause(error)
                    self._outage.struck(error, timedelta(seconds=pause))
                    await _sleep(stop, pause)
        finally:
            waking.cancel()
            await self._sink.close()

    async def _wake(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._sink.changed.set()

    async def _session(self, stop: asyncio.Event) -> None:
        connection = await ReplicationConnection.open(self._url, self._slot.application)
        try:
            system, timeline, _ = await connection.identify()
            if not await self._taken(connection, stop):
                return
            try:
                await self._sink.take_slot(system, timeline)
                self._observe(SlotTaken(self._slot.name, self._slot.retained_bytes))
                reading = Reading(self._sink, self._slot.is_ours)
                self._examine_at = self._loop.time() + EXAMINE_EVERY
                await self._read(connection, reading, stop)
                await connection.end(reading.received, reading.confirmed, local_time())
            finally:
                await self._end_examination()
                await self._sink.lose_slot()
        finally:
            await connection.close()

    async def _taken(self, connection: ReplicationConnection, stop: asyncio.Event) -> bool:
        """Wait for the slot; False if it stops before."""
        told = False
        while not stop.is_set():
            await self._slot.check()
            # What an earlier connection brought and is still on its way would come again.
            while not self._sink.is_idle and not stop.is_set():
                self._sink.changed.clear()
                await _sleep(self._sink.changed, 1.0)
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

    async def _read(self, connection: ReplicationConnection, reading: Reading, stop: asyncio.Event) -> None:
        watch = ServerWatch(self._slot.probe)
        try:
            await self._read_watched(connection, reading, watch, stop)
        finally:
            await watch.end()

    async def _read_watched(
        self, connection: ReplicationConnection, reading: Reading, watch: ServerWatch, stop: asyncio.Event
    ) -> None:
        sink = self._sink
        told, tell_at = 0, 0.0
        while True:
            sink.changed.clear()
            count = self._frames(connection, reading, stopping=stop.is_set())
            now = self._loop.time()
            if reading.asked or now >= tell_at or (reading.confirmed > told and now >= tell_at - TELL_EVERY):
                reading.asked = False
                told, tell_at = reading.confirmed, now + TELL_EVERY + TELL_SOONEST
                connection.send(reading.received, reading.confirmed, local_time())
                self._trouble.reset()
                self._outage.over()
            watch.look(reading.confirmed, waits=reading.waits)
            if stop.is_set():
                sink.stop()
                if sink.is_idle:
                    return
            sink.progress()
            self._examine_if_time(now)
            if count >= FRAMES_AT_ONCE:
                await asyncio.sleep(0)
                continue
            soon = TELL_SOONEST if reading.confirmed > told else tell_at - now
            await connection.wait(
                sink.changed, max(0.0, min(soon, TELL_EVERY)), reading=sink.has_room and not stop.is_set()
            )

    def _frames(self, connection: ReplicationConnection, reading: Reading, *, stopping: bool) -> int:
        """Take what has arrived, while there is room. A client that reads on has the server's log in its memory."""
        count = 0
        while count < FRAMES_AT_ONCE and self._sink.has_room and not stopping:
            frame = connection.frame()
            if frame is None:
                break
            reading.take(frame)
            count += 1
        return count

    def _examine_if_time(self, now: float) -> None:
        """Tell now and then what should be known of the slot."""
        if now >= self._examine_at and (self._examining is None or self._examining.done()):
            self._examine_at = now + EXAMINE_EVERY
            self._examining = self._loop.create_task(self._examine(), name="outbox log examination")

    async def _examine(self) -> None:
        with suppress(Exception):  # it is tried again
            for news in await self._slot.concerns():
                self._observe(Advised("relay", news))

    async def _end_examination(self) -> None:
        if self._examining is not None:
            self._examining.cancel()
            await asyncio.wait([self._examining])


async def _sleep(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
