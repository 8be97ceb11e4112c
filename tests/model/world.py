"""World: the real thing that the model is compared with, a few clients of one store at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import DeadLetter, Message, Outbox, StoredMessage
from outbox.core.attempt import Attempt
from outbox.core.durations import IMMEDIATELY, Retention
from outbox.core.store import QueueClaim, Store
from outbox.stores.sqlite import prepare

from .model import LATER, LONG, PAST, SHORT, Key, Row

HOUR = timedelta(hours=1)
ALL = 100_000


@dataclass
class Client:
    """A claim in somebody's hands; it may have died with it."""

    number: int
    store: Store
    entering: AbstractAsyncContextManager[QueueClaim]
    claim: QueueClaim
    queue: str | None
    keys: dict[int, Key] = field(default_factory=dict)  # by attempt id
    held: set[int] = field(default_factory=set)  # not settled yet

    def attempt(self, id: int) -> Attempt:
        return next(attempt for attempt in self.claim.attempts if attempt.id == id)


@dataclass
class Open:
    """A transaction of somebody's."""

    outbox: Outbox
    entering: AbstractAsyncContextManager[AsyncSession]
    session: AsyncSession
    savepoints: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Sight:
    """What lies in the store."""

    rows: Mapping[Key, Row]
    order: Mapping[Key, tuple[datetime, int]]  # in which messages are claimed
    row_ids: Mapping[Key, int]  # of messages and of dead letters


class World:
    """Two outboxes on the same tables, as two processes would have them, and somebody who turns the clock."""

    def __init__(self, url: str, table_name: str, *, keeps: bool) -> None:
        retention: Retention = HOUR if keeps else IMMEDIATELY
        self.outboxes = [Outbox(db_engine_url=url, table_name=table_name, clean_up_after=retention) for _ in range(2)]
        self.tables = self.outboxes[0].tables
        self._clock = create_async_engine(url)
        if self._clock.dialect.name == "sqlite":
            prepare(self._clock)

    @property
    def store(self) -> Store:
        return self.outboxes[0].store

    async def open(self) -> None:
        """Begin with empty tables."""
        await self.store.maintenance.create_tables()
        async with self._clock.begin() as connection:
            for table in self.tables.metadata.sorted_tables:
                await connection.execute(delete(table))

    async def close(self) -> None:
        for outbox in self.outboxes:
            await outbox.close()
        await self._clock.dispose()

    async def turn_clock(self, row_id: int, **times: timedelta) -> None:
        """Write times of a row, as distances from now."""
        now = datetime.now(UTC)
        values = {name: now + distance for name, distance in times.items()}
        async with self._clock.begin() as connection:
            messages = self.tables.messages
            done = await connection.execute(update(messages).where(messages.c.id == row_id).values(values))
        assert done.rowcount == 1

    async def age_inbox(self) -> None:
        async with self._clock.begin() as connection:
            await connection.execute(update(self.tables.inbox).values(entered_at=datetime.now(UTC) - 2 * HOUR))

    async def begin(self, number: int) -> Open:
        outbox = self.outboxes[number % 2]
        entering = outbox.transaction()
        return Open(outbox, entering, await entering.__aenter__())

    async def end(self, transaction: Open, *, commit: bool) -> None:
        if commit:
            await transaction.entering.__aexit__(None, None, None)
        else:
            error = ZeroDivisionError()
            assert not await transaction.entering.__aexit__(ZeroDivisionError, error, None)

    async def look(self) -> Sight:
        """Every message and dead letter, no place twice."""
        stored = await self.store.inspection.list_messages(limit=ALL)
        letters = await self.store.dead_letters.list(limit=ALL)
        open_places = [((each.message.id, each.queue), each) for each in stored]
        dead_places = [((each.message.id, each.queue), each) for each in letters]
        twice = [key for key, count in Counter(k for k, _ in (*open_places, *dead_places)).items() if count > 1]
        assert not twice, f"in the same place more than once: {twice}"
        now = datetime.now(UTC)
        rows = {key: _row(each, now) for key, each in open_places}
        rows |= {key: _dead_row(each, now) for key, each in dead_places}
        row_ids = {key: each.row_id for key, each in open_places} | {key: each.id for key, each in dead_places}
        return Sight(rows, {key: (each.due_at, each.row_id) for key, each in open_places}, row_ids)


def _row(stored: StoredMessage, now: datetime) -> Row:
    lease = None
    if stored.leased_until is not None:
        lease = LONG if stored.leased_until > now + HOUR / 2 else SHORT
    return Row(
        message=replace(stored.message, expires_at=None),
        state="sent" if stored.state in ("sent", "handled") else "open",
        unroutable=stored.state == "unroutable",
        attempts=stored.attempt_count,
        crashes=stored.crash_count,
        lines=stored.history.count("\n"),
        is_due=stored.due_at < now + HOUR / 2,
        lease=lease,
        expiration=_expiration(stored.message, now),
        timer_id=stored.timer_id,
        is_old=stored.done_at is not None and stored.done_at < now - HOUR,
    )


def _dead_row(letter: DeadLetter, now: datetime) -> Row:
    return Row(
        message=replace(letter.message, expires_at=None),
        state="dead",
        attempts=letter.attempt_count,
        crashes=letter.crash_count,
        lines=letter.history.count("\n"),
        expiration=_expiration(letter.message, now),
        reason=letter.reason,
        error=letter.error,
    )


def _expiration(message: Message, now: datetime) -> str | None:
    if message.expires_at is None:
        return None
    return LATER if message.expires_at > now else PAST
