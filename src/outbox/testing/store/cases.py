"""StoreCases: what the cases of a store contract share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import NOW, Message, Schedule
from outbox.core.store import QueueClaim, Selection, Store

LEASE = timedelta(seconds=30)
NO_LEASE = timedelta(0)  # no longer one than the claim has
RENEWED = timedelta(seconds=6)  # a lease whose renewals, from a fifth of it on, no machine is too slow for
SHORT = timedelta(milliseconds=300)
LIFETIMES = (timedelta(milliseconds=400), timedelta(seconds=3))  # of a message; the second if a machine is held up
SOON = 30.0  # seconds within which everything that is due must have come, on the slowest machine

MakeStore = Callable[..., Store]


def message(routing_key: str = "order.created", body: bytes = b"{}", **fields: Any) -> Message:
    """A message for a test."""
    return Message(routing_key=routing_key, body=body, **fields)


async def write(connection: AsyncConnection, store: Store, statement: Executable, rows: Any = None) -> int:
    """Execute a store's statement on a caller's connection."""
    return await connection.run_sync(store.writing.write, statement, rows)


async def emit(engine: AsyncEngine, store: Store, *messages: Message, schedule: Schedule = NOW) -> int:
    """Store messages in a committed transaction of the caller's."""
    async with engine.begin() as connection:
        return await write(connection, store, *store.writing.insert(messages, schedule))


async def queued(engine: AsyncEngine, store: Store, *messages: Message, schedule: Schedule = NOW) -> None:
    """Store messages and route them to the queue `q`."""
    await store.queues.bind([Binding("q", "#")])
    await emit(engine, store, *messages, schedule=schedule)
    assert (await store.queues.route(1000, {})).taken == len(messages)


async def claimed(store: Store, limit: int = 100, destination: str | None = "q") -> list[Attempt]:
    """What a claim gets; given back at once."""
    async with store.feed.claim(Selection(limit=limit, lease=LEASE, destination=destination)) as claim:
        return list(claim.attempts)


async def soon(look: Callable[[], Any]) -> Any:
    """Look until there is something to see."""
    async with asyncio.timeout(SOON):
        while not (found := await look()):
            await asyncio.sleep(0.02)
    return found


async def claimed_before_it_expires(
    stack: AsyncExitStack, engine: AsyncEngine, store: Store, destination: str | None
) -> tuple[QueueClaim, timedelta]:
    """A claim on a message that expires, and the time after which it would."""
    for lifetime in LIFETIMES:
        await emit(engine, store, message(), schedule=Schedule(expiration=lifetime))
        if destination is not None:
            await store.queues.route(100, {})
        selection = Selection(limit=1, lease=LEASE, destination=destination)
        claim = await stack.enter_async_context(store.feed.claim(selection))
        if claim.attempts:
            return claim, lifetime
        await store.maintenance.expire(10)
        await store.dead_letters.discard([letter.id for letter in await store.dead_letters.list()])
    raise AssertionError(f"it could not be claimed within {LIFETIMES[-1]}")


async def renewed(store: Store) -> None:
    """Wait until the lease on the only message of a store ends later than it did."""
    [before] = await store.inspection.list_messages()

    async def later() -> bool:
        [now] = await store.inspection.list_messages()
        assert before.leased_until is not None
        assert now.leased_until is not None
        return now.leased_until > before.leased_until

    await soon(later)


async def settled(store: Store, outcome: Outcome, destination: str | None = "q") -> Attempt:
    """Claim one message and settle it."""
    async with store.feed.claim(Selection(limit=1, lease=LEASE, destination=destination)) as claim:
        [attempt] = claim.attempts
        assert await claim.settle({attempt.id: outcome}) == frozenset()
    return attempt


OUTCOMES: Mapping[str, Outcome] = {
    "done": Done(),
    "retry": RetryIn(timedelta(0), "late"),
    "dead": Dead(Reason.REJECTED, "late"),
    "released": Released(),
    "postponed": Released(timedelta(minutes=5)),
}


@pytest.mark.asyncio
class StoreCases:
    """What every group of cases has at hand."""

    writes_side_by_side = True  # whether two transactions of the database can write at the same time
    wakes_other_processes = True  # whether a wait ends when another process has committed a message

    @pytest.fixture
    async def store(self, make_store: MakeStore) -> Store:
        """A store with its tables."""
        store = make_store()
        await store.open()
        return store

    async def crash(self, claim: QueueClaim) -> None:
        """Make a claim stop renewing its leases, as if its process had died."""
        await claim.renew_once([attempt.id for attempt in claim.attempts], NO_LEASE)

    async def expired(
        self, stack: AsyncExitStack, store: Store, limit: int = 100, isolated_at: int | None = None
    ) -> QueueClaim:
        """A claim whose lease has run out while its holder still believes in it."""
        claiming = store.feed.claim(Selection(limit=limit, lease=SHORT, destination="q", isolated_at=isolated_at))
        claim = await stack.enter_async_context(claiming)
        assert claim.attempts
        await self.crash(claim)
        await asyncio.sleep(SHORT.total_seconds() + 0.05)
        return claim
