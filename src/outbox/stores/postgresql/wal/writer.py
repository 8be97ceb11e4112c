"""LogWriter: writes how messages of the log ended, until it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from outbox.core.backoff import Backoff
from outbox.stores.postgresql.wal.buffer import LogBuffer, LoggedMessage
from outbox.stores.postgresql.wal.table import LoggedTable, SeenTransactions

TOGETHER = 1000  # rows that one statement writes
AGAIN, LONGEST_AGAIN = 0.05, 2.0  # seconds between two tries to write

Write = Callable[[Sequence[int]], Awaitable[tuple[set[int], SeenTransactions]]]


class LogWriter:
    """A position is confirmed only behind what is written, so nothing that stands here may be forgotten."""

    def __init__(self, table: LoggedTable, buffer: LogBuffer, left: Callable[[Sequence[LoggedMessage]], None]) -> None:
        self._table = table
        self._buffer = buffer
        self._left = left  # called with what was left to the table
        self._done: list[LoggedMessage] = []
        self._leaving: list[LoggedMessage] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._done and not self._leaving and (self._working is None or self._working.done())

    @property
    def behind(self) -> int:
        """How many rows wait to be left to the table."""
        return len(self._leaving)

    async def done(self, messages: Sequence[LoggedMessage]) -> None:
        """Write that messages were confirmed; raises what the database says."""
        for first in range(0, len(messages), TOGETHER):
            part = messages[first : first + TOGETHER]
            unseen = await self._write(self._table.done, part)
            self.done_later(unseen)

    def done_later(self, messages: Sequence[LoggedMessage]) -> None:
        """The same in the background, as often as it takes."""
        self._done += messages
        self._begin()

    def leave(self, messages: Sequence[LoggedMessage]) -> None:
        """Leave messages to the table, in the background."""
        self._leaving += messages
        self._begin()

    async def close(self) -> None:
        """Give up what is not written: the log brings it again."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    def renew(self) -> None:
        """Forget what came by an earlier connection."""
        self._leaving.clear()

    def _begin(self) -> None:
        if (self._done or self._leaving) and (self._working is None or self._working.done()):
            self._working = asyncio.get_running_loop().create_task(self._work(), name="outbox log writer")

    async def _work(self) -> None:
        again = Backoff(LONGEST_AGAIN, AGAIN)
        while self._done or self._leaving:
            try:
                unwritten = await self._round()
            except Exception:  # noqa: BLE001 - drivers throw what they like when their database is away
                unwritten = 1
            if unwritten:
                await asyncio.sleep(again.pause())
            else:
                again.reset()

    async def _round(self) -> int:
        """Write what there is; how many rows no statement could see yet."""
        unseen = 0
        done = self._done[:TOGETHER]
        if done:
            left = await self._write(self._table.done, done)
            self._done = [*left, *self._done[len(done) :]]
            unseen += len(left)
        leaving = self._leaving[:TOGETHER]
        if leaving:
            left = await self._write(self._table.leave, leaving)
            self._leaving = [*left, *self._leaving[len(leaving) :]]
            unseen += len(left)
            behind = set(map(id, left))
            self._left([each for each in leaving if id(each) not in behind])
        return unseen

    async def _write(self, write: Write, messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
        """Those whose transaction the statement could not see yet: all others are settled, there or gone."""
        found, seen = await write([message.row.id for message in messages])
        unseen = []
        for message in messages:
            if message.row.id in found or seen.has(message.transaction.xid):
                self._buffer.settle(message)
            else:
                unseen.append(message)
        return unseen
