"""LogFeed: claims on rows that the log brought, in commit order, and on those that it left to the table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from outbox.core.attempt import Attempt, Done, Outcome, Released, RetryIn
from outbox.core.events import Advised, Observer
from outbox.core.store import Selection
from outbox.stores.claiming import SqlClaim
from outbox.stores.postgresql.wal.buffer import LogBuffer, LoggedMessage
from outbox.stores.postgresql.wal.inserted_row import InsertedRow, Microseconds, local_time
from outbox.stores.postgresql.wal.pgoutput import Insert
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.sweeping import LogSweeping
from outbox.stores.postgresql.wal.table import LoggedTable, SeenTransactions
from outbox.stores.postgresql.wal.waking import LogWaking, destination_of
from outbox.stores.postgresql.wal.window import LoggedTransaction, LogWindow
from outbox.stores.postgresql.wal.writer import LogWriter
from outbox.stores.selecting import AIM
from outbox.stores.tables import NOT_ROUTED

RESPITE = 20  # a poll of the table takes at most one part in so many of the time


class LogFeed:
    """What a publisher claims from while this relay has the slot. Without it, it has nothing to claim.

    One claim of rows from the log is open at a time until each of them has an answer: what is claimed next was
    committed later, and goes out later. With `patience`, the next one waits so many seconds for answers and no longer:
    for a transport that sends the messages of a batch side by side, where one that hangs must not hold others back.
    """

    is_needed = True

    def __init__(
        self,
        table: LoggedTable,
        slot: LogSlot,
        waking: LogWaking,
        *,
        observe: Observer,
        poll_interval: float,
        patience: float | None = None,
    ) -> None:
        self.table = table
        self._slot = slot
        self._waking = waking
        self._observe = observe
        self._sweeping = LogSweeping(table, slot, observe, self._swept)
        self._settled_before = 0  # the position up to which an earlier holder may have settled messages
        self.buffer = LogBuffer(self._changed)
        self.writer = LogWriter(table, self.buffer, self._left)
        self._poll_interval = poll_interval
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._poll_at = 0.0  # by the loop's clock
        self._tables_turn = True
        self._patience = patience
        self._gate: LogClaim | None = None  # the claim of rows from the log whose answers the next one waits for
        self._open = 0  # claims
        self._skew: Microseconds = 0  # of the server's clock, since 2000, against this process's
        self.changed = asyncio.Event()  # for the stream: there is room, or a claim has ended
        self.has_slot = False
        self.is_sweeping = False  # whether rows that the log did not bring go first

    # What the stream says.

    @property
    def window(self) -> LogWindow:
        return self.buffer.window

    @property
    def has_room(self) -> bool:
        return self.buffer.has_room and self._waking.has_room

    @property
    def is_idle(self) -> bool:
        """Whether no claim is open, and all that ended is written."""
        return not self._open and self.writer.is_idle

    async def record(self, system: str, timeline: int) -> None:
        """Record which server's log is read, and tell if it is another one than before."""
        for news in await self._slot.record(system, timeline):
            self._observe(Advised("relay", news))

    async def take_slot(self, system: str, timeline: int) -> None:
        self._settled_before = await self._sweeping.begin()
        await self.record(system, timeline)
        self.buffer.renew()
        self.has_slot = True
        self._poll_at = 0.0
        self._news.set()

    def insert(self, insert: Insert, transaction: LoggedTransaction) -> None:
        row = InsertedRow.of(insert)
        if not row.is_fresh:  # it has its queue already, was done, or is left to the table
            if destination_of(insert) != NOT_ROUTED:
                self._waking.announce(insert, transaction, self.window)
            return
        doubtful = transaction.position < self._settled_before
        message = LoggedMessage(row, transaction, self.window, doubtful=doubtful)
        if row.attempt is None or row.due_at > transaction.committed_at:
            self.buffer.hold(message)
            self.writer.leave([message])
        else:
            self.buffer.add(message)

    def set_time(self, now: Microseconds) -> None:
        self._skew = now - local_time()

    def progress(self) -> None:
        self._sweeping.progress(self.window.confirmed)

    def stop(self) -> None:
        """Give out nothing any more; what is claimed goes on to its end."""
        self.has_slot = False

    async def lose_slot(self) -> None:
        self.stop()
        self.buffer.renew()
        self.writer.renew()
        await self._sweeping.end()

    async def close(self) -> None:
        await self.writer.close()
        await self._waking.close()

    def _swept(self, count: int) -> None:
        if count:
            self.is_sweeping = True
            self._poll_by(0.0)

    # What a publisher asks.

    def claim(self, selection: Selection) -> LogClaim:
        return LogClaim(self, selection)

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        self._news.clear()
        if self._is_ready:
            return
        longest = min(longest, max(0.0, self._poll_at - self._loop.time())) if self.has_slot else longest
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                await self._news.wait()

    @property
    def _is_ready(self) -> bool:
        if not self.has_slot:
            return False
        return self._is_poll_due or not (self.buffer.is_empty or self._gate or self.is_sweeping)

    @property
    def _is_poll_due(self) -> bool:
        return self._loop.time() >= self._poll_at

    # What a claim does.

    def opened(self) -> None:
        self._open += 1

    def closed(self) -> None:
        self._open -= 1
        self._changed()

    async def from_table(self, selection: Selection) -> SqlClaim | None:
        """A claim of due rows that the log left to the table, if it is the table's turn and there are any."""
        waits = not (self.buffer.is_empty or self._gate or self.is_sweeping)
        if not self.has_slot or not self._is_poll_due or (waits and not self._tables_turn):
            self._tables_turn = True
            return None
        self._tables_turn = False
        began = self._loop.time()
        self._poll_at = began + self._poll_interval  # until it is known better
        claim = self.table.feed.claim(selection)
        await claim.__aenter__()
        if claim.attempts:
            self._poll_at = 0.0
            return claim
        await claim.__aexit__(None, None, None)
        self.is_sweeping = False
        took = self._loop.time() - began
        pause = await self.table.feed.until_next_due(selection.destination, self._poll_interval)
        self._poll_at = self._loop.time() + max(pause, RESPITE * took)
        return None

    async def from_log(self, claim: LogClaim, limit: int) -> list[LoggedMessage]:
        """The next rows of the log, if no others wait for answers. A claim that gets any says `answered`."""
        if not self.has_slot or self._gate or self.is_sweeping:
            return []
        self._gate = claim
        taken: list[LoggedMessage] = []
        try:
            while not taken and not self.buffer.is_empty:
                taken = self.buffer.take(limit, AIM)
                taken = self._in_time(await self._unsettled(taken))
        except BaseException:
            self.answered(claim, taken)
            raise
        if not taken:
            self.answered(claim, ())
        elif self._patience is not None:
            self._loop.call_later(self._patience, self._open_gate, claim)
        return taken

    def answered(self, claim: LogClaim, again: Sequence[LoggedMessage]) -> None:
        """Every row of the claim has an outcome; these go out again, before all others."""
        self.buffer.give_back(again)
        self._open_gate(claim)

    def _open_gate(self, claim: LogClaim) -> None:
        if self._gate is claim:
            self._gate = None
            self._changed()

    async def settle(
        self, kept: Mapping[int, Outcome], selection: Selection, messages: Mapping[int, LoggedMessage]
    ) -> frozenset[int]:
        """Write outcomes that leave a row in the table, or among the dead letters; returns the ids that wrote none."""
        written = await self.table.settle(kept, selection)
        for id in written:
            self.buffer.settle(messages[id])
        again = [message for id, message in messages.items() if id in kept and id not in written]
        if again:
            for message in again:
                message.doubtful = True
            self.buffer.give_back(again)
        delays = [outcome.delay.total_seconds() for outcome in kept.values() if isinstance(outcome, RetryIn | Released)]
        if delays:
            self._poll_by(self._loop.time() + min(delays))
        return frozenset(kept.keys() - written)

    async def _unsettled(self, messages: list[LoggedMessage]) -> list[LoggedMessage]:
        """Without those that were settled before this relay had the slot, but not confirmed."""
        doubtful = [message for message in messages if message.doubtful]
        if not doubtful:
            return messages
        fresh, seen = await self.table.fresh([message.row.id for message in doubtful])
        unsettled = []
        for message in messages:
            if message.doubtful and _is_settled(message, fresh, seen):
                self.buffer.settle(message)
            else:
                unsettled.append(message)
        return unsettled

    def _in_time(self, messages: list[LoggedMessage]) -> list[LoggedMessage]:
        """Without those that have expired, which are left to the table like all rows that cannot be attempted."""
        now = local_time() + self._skew
        expired = [each for each in messages if each.row.expires_at is not None and each.row.expires_at <= now]
        if not expired:
            return messages
        self.writer.leave(expired)
        return [each for each in messages if each.row.expires_at is None or each.row.expires_at > now]

    def _left(self, messages: Sequence[LoggedMessage]) -> None:
        """Rows were left to the table: the next poll is not later than the first of them is due."""
        due = min((message.row.due_at for message in messages), default=None)
        if due is not None:
            self._poll_by(self._loop.time() + (due - local_time() - self._skew) / 1_000_000)

    def _poll_by(self, moment: float) -> None:
        if moment < self._poll_at:
            self._poll_at = max(0.0, moment)
            self._news.set()

    def _changed(self) -> None:
        self._news.set()
        self.changed.set()


class LogClaim:
    """Rows of the log, which no lease protects because only the slot's holder has them; or a claim of the table's."""

    def __init__(self, feed: LogFeed, selection: Selection) -> None:
        self._feed = feed
        self._selection = selection
        self._of_table: SqlClaim | None = None
        self._messages: dict[int, LoggedMessage] = {}
        self._unanswered: set[int] = set()  # ids without an outcome
        self._unwritten: set[int] = set()  # ids that were confirmed, which is not written
        self._again: list[LoggedMessage] = []
        self._publishing = False
        self.attempts: list[Attempt] = []

    async def __aenter__(self) -> Self:
        self._feed.opened()
        try:
            await self._take()
        except BaseException:
            self._feed.closed()
            raise
        return self

    async def _take(self) -> None:
        self._of_table = await self._feed.from_table(self._selection)
        if self._of_table is not None:
            self.attempts = self._of_table.attempts
            return
        messages = await self._feed.from_log(self, self._selection.limit)
        self._publishing = bool(messages)
        self._messages = {message.row.id: message for message in messages}
        self._unanswered = set(self._messages)
        self.attempts = [message.row.attempt for message in messages if message.row.attempt is not None]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._of_table is not None:
                await self._of_table.__aexit__(kind, error, traceback)
        finally:
            self._again += [self._messages[id] for id in self._unanswered]
            self._unanswered.clear()
            self._all_answered()
            self._feed.writer.done_later([self._messages[id] for id in self._unwritten])
            self._feed.closed()

    async def settle(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        if self._of_table is not None:
            return await self._of_table.settle(outcomes)
        done = [id for id, outcome in outcomes.items() if isinstance(outcome, Done)]
        kept = {id: outcome for id, outcome in outcomes.items() if not _is_again(outcome) and id not in done}
        self._unwritten.update(done)
        self._again += [self._messages[id] for id, outcome in outcomes.items() if _is_again(outcome)]
        self._unanswered -= outcomes.keys()
        if not self._unanswered and not kept:
            self._all_answered()
        if done:
            await self._feed.writer.done([self._messages[id] for id in done])
            self._unwritten.difference_update(done)
        if not kept:
            return frozenset()
        try:
            lost = await self._feed.settle(kept, self._selection, self._messages)
        except BaseException:
            self._unanswered |= kept.keys()  # they go out again, unless this is tried again before
            raise
        if not self._unanswered:
            self._all_answered()
        return lost

    def _all_answered(self) -> None:
        """Let the next claim have what was committed later, once what goes out again stands before it."""
        if self._publishing:
            self._publishing = False
            order = {id: position for position, id in enumerate(self._messages)}
            self._again.sort(key=lambda message: order[message.row.id])
            self._feed.answered(self, self._again)


def _is_again(outcome: Outcome) -> bool:
    return isinstance(outcome, Released) and not outcome.delay


def _is_settled(message: LoggedMessage, fresh: Mapping[int, str | None], seen: SeenTransactions) -> bool:
    """Whether an earlier holder has settled it. Another message may have got its row's id since."""
    if message.row.id not in fresh:
        return seen.has(message.transaction.xid)
    return message.row.attempt is None or fresh[message.row.id] != message.row.attempt.message.id
