"""Bytes: no batch holds more of them than a claim may fetch, whatever is known of the messages before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from sqlalchemy import update

from outbox import Outbox
from outbox.core.attempt import Attempt, Done
from outbox.core.binding import Binding
from outbox.core.store import Selection, Suspected, Wanted
from outbox.stores import selecting
from tests.support.outboxes import MakeOutbox

KIB = 1024
AIM = 64 * KIB
MANY = 100
LEASE = timedelta(seconds=30)

pytestmark = pytest.mark.parametrize(
    "database_url", ["sqlite", "postgresql+asyncpg", "postgresql+psycopg"], indirect=True
)


@pytest.fixture
async def outbox(make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Outbox]:
    monkeypatch.setattr(selecting, "AIM", AIM)
    outbox = make_outbox()
    await outbox.create_tables()
    yield outbox


async def emit(outbox: Outbox, *sizes: int) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", [bytes(size) for size in sizes])


async def claimed(outbox: Outbox, suspected: Suspected = Suspected.ALL) -> list[int]:
    """The sizes of the bodies in a claim; they are done."""
    async with outbox.store.feed.claim(Selection(limit=MANY, lease=LEASE, suspected=suspected)) as claim:
        await claim.settle({attempt.id: Done() for attempt in claim.attempts})
        return sizes(claim.attempts)


def sizes(attempts: Sequence[Attempt]) -> list[int]:
    return [len(attempt.message.body) for attempt in attempts]


async def test_a_first_claim_takes_no_more_bytes_than_a_later_one(outbox: Outbox) -> None:
    await emit(outbox, *[10 * KIB] * 20)
    batches = []
    while batch := await claimed(outbox):
        batches.append(sum(batch))
    assert sum(batches) == 20 * 10 * KIB
    assert max(batches) <= AIM
    assert len(batches) == 4


@pytest.mark.parametrize("suspected", [Suspected.ALL, Suspected.ONE])
async def test_large_messages_behind_small_ones_count_before_they_are_fetched(
    outbox: Outbox, suspected: Suspected
) -> None:
    await emit(outbox, *[1] * 50)
    assert await claimed(outbox, suspected) == [1] * 50
    await emit(outbox, 1, 60 * KIB, 60 * KIB, 2 * AIM, 5, 0)
    assert await claimed(outbox, suspected) == [1, 60 * KIB]
    assert await claimed(outbox, suspected) == [60 * KIB]
    assert await claimed(outbox, suspected) == [2 * AIM]
    assert await claimed(outbox, suspected) == [5]


@pytest.mark.parametrize(("column", "start"), [("headers", "{}"), ("tracking_ids", "[]")])
async def test_what_another_program_wrote_beside_the_body_counts_too(outbox: Outbox, column: str, start: str) -> None:
    await emit(outbox, *[1] * 20)
    await fill(outbox, column, start.ljust(10 * KIB))
    assert [len(await claimed(outbox)) for _ in range(5)] == [6, 6, 6, 2, 0]


async def test_what_sqlite_keeps_behind_a_nul_counts_too(outbox: Outbox, database_url: str) -> None:
    if "sqlite" not in database_url:
        pytest.skip("other databases keep no NUL in a text")
    await emit(outbox, *[1] * 20)
    await fill(outbox, "headers", "x\0".ljust(10 * KIB))
    assert await claimed(outbox) == []
    assert (await outbox.backlog()).dead == 6


async def fill(outbox: Outbox, column: str, text: str) -> None:
    async with outbox.transaction() as session:
        await session.execute(update(outbox.tables.messages).values({column: text}))


async def test_what_is_routed_and_leased_at_once_is_no_more_either(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("q", "#")])
    for _ in range(2):  # by statements, and then by the one statement that knows the bindings
        await emit(outbox, *[10 * KIB] * 20)
        routing = await outbox.store.queues.route(MANY, {}, {"q": Wanted(MANY, LEASE)})
        assert routing.routed == {"q": 20}
        (leased,) = routing.claims.values()
        assert sizes(leased.attempts) == [10 * KIB] * 6
        async with leased:
            await leased.settle({attempt.id: Done() for attempt in leased.attempts})
        while True:
            async with outbox.store.feed.claim(Selection(limit=MANY, lease=LEASE, destination="q")) as claim:
                await claim.settle({attempt.id: Done() for attempt in claim.attempts})
            if not claim.attempts:
                break
            assert sum(sizes(claim.attempts)) <= AIM
        weights_of_q = outbox.store.feed.weights  # type: ignore[attr-defined]
        weights_of_q.clear()  # as in a new process
