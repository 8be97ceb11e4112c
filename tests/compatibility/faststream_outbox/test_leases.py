""" "The lease-token invariant", and the failure modes that follow from it.

Unlike there, leases are renewed while a listener runs, so a slow listener alone loses none: these tests make the
database believe that a worker gave no sign of life.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Binding, Outbox, listen
from outbox.core.attempt import Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.events import Handled, LeaseWasLost
from outbox.core.store import Selection, Suspected
from outbox.inbound import inbox
from outbox.observers.logging import LoggingObserver
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import PATIENCE, Recorder, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox

LEASE = timedelta(seconds=30)
RENEWED = 10.0  # seconds of a lease whose renewal is waited for: a third of it, and the rest is for slow machines
OUTCOMES: list[Outcome] = [
    Done(),
    RetryIn(timedelta(0), "failed"),
    RetryIn(timedelta(hours=1), "failed"),
    Dead(Reason.REJECTED, "refused"),
    Released(),
]


async def emit_one(outbox: Outbox, number: int = 7) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "orders", number)


async def queued(outbox: Outbox, count: int = 1) -> None:
    """Messages that lie in the queue `orders`."""
    await outbox.store.queues.bind([Binding("orders", "orders")])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "orders", range(count))
    await outbox.store.queues.route(count, {})


async def lease_ends(outbox: Outbox) -> dict[int, datetime | None]:
    """When the lease of each message runs out, if nobody renews it."""
    return {stored.row_id: stored.leased_until for stored in await outbox.messages()}


async def held(outbox: Outbox, count: int) -> bool:
    """Whether so many messages are in somebody's hands."""
    return sum(end is not None for end in (await lease_ends(outbox)).values()) == count


async def renewal(outbox: Outbox) -> None:
    """Wait until the lease of every message lasts longer than it does now; none may run out meanwhile."""
    before = await lease_ends(outbox)

    async def is_renewed() -> bool:
        now = await lease_ends(outbox)
        assert now.keys() == before.keys()
        return all(_later(end, before[row_id]) for row_id, end in now.items())

    await eventually(is_renewed)


def _later(end: datetime | None, before: datetime | None) -> bool:
    assert end is not None
    assert before is not None
    return end > before


async def is_empty(outbox: Outbox) -> bool:
    return not await outbox.messages()


# Every terminal write carries the token


@on_every_driver
async def test_a_late_write_of_any_kind_does_not_touch_the_new_holders_row(make_outbox: MakeOutbox) -> None:
    slow, quick = make_outbox(), make_outbox()
    for late in OUTCOMES:
        await queued(slow)
        async with slow.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as lost:
            [attempt] = lost.attempts
            await let_leases_run_out(quick)
            async with quick.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
                [before] = await quick.messages()
                assert await lost.settle({attempt.id: late}) == {attempt.id}, late
                assert await quick.messages() == [before], late
                assert await claim.settle({attempt.id: Done()}) == frozenset(), late
    assert await is_empty(quick)
    assert await quick.dead_letters.list() == []


async def test_a_lease_that_ran_out_allows_no_write_even_if_nobody_else_has_the_message_yet(
    make_outbox: MakeOutbox,
) -> None:
    outbox = make_outbox()
    await queued(outbox)
    for late in OUTCOMES:
        async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as lost:
            [attempt] = lost.attempts
            await let_leases_run_out(outbox)
            assert await lost.settle({attempt.id: late}) == {attempt.id}, late
        assert [stored.row_id for stored in await outbox.messages()] == [attempt.id], late


async def test_after_the_new_holder_has_finished_the_late_write_changes_nothing(make_outbox: MakeOutbox) -> None:
    slow, quick = make_outbox(), make_outbox()
    for outcome in OUTCOMES:
        await queued(slow)
        async with slow.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as lost:
            [attempt] = lost.attempts
            await let_leases_run_out(quick)
            async with quick.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
                assert await claim.settle({attempt.id: outcome}) == frozenset(), outcome
            before = (await quick.messages(), await quick.dead_letters.list())
            assert await lost.settle({attempt.id: Done()}) == {attempt.id}, outcome
            assert (await quick.messages(), await quick.dead_letters.list()) == before, outcome
        async with quick.transaction() as session:
            await session.execute(quick.tables.messages.delete())


async def test_one_lost_lease_does_not_keep_the_rest_of_the_batch_from_being_written(
    make_outbox: MakeOutbox,
) -> None:
    outbox = make_outbox()
    await queued(outbox, 3)
    messages = outbox.tables.messages
    async with outbox.store.feed.claim(Selection(limit=3, lease=LEASE, destination="orders")) as claim:
        ids = [attempt.id for attempt in claim.attempts]
        async with outbox.transaction() as session:
            long_ago = datetime.now(UTC) - timedelta(hours=1)
            await session.execute(messages.update().where(messages.c.id == ids[1]).values(lease_until=long_ago))
        assert await claim.settle(dict.fromkeys(ids, Done())) == {ids[1]}
    assert [stored.row_id for stored in await outbox.messages()] == [ids[1]]


async def test_each_claim_has_a_fresh_token(outbox: Outbox) -> None:
    await queued(outbox)
    messages = outbox.tables.messages
    tokens = set()
    for _ in range(3):
        async with (
            outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")),
            outbox.transaction() as session,
        ):
            tokens.add(await session.scalar(select(messages.c.lease_token)))
    assert len(tokens) == 3
    assert None not in tokens


# The warning


def lost_leases(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", None) == "lease_lost"]


@on_sqlite
@pytest.mark.parametrize("phase", ["terminal", "retry"])
async def test_a_lost_lease_is_a_warning_with_structured_fields(
    make_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture, phase: str
) -> None:
    slow = make_outbox(observers=[LoggingObserver(), recorder], retry_delays=(60,))
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def loses_its_lease(number: int) -> None:
        [stored] = await slow.messages()
        await let_leases_run_out(slow)
        await arrivals.put(stored.row_id)
        if phase == "retry":
            raise ConnectionError

    async with slow.running(listeners=[loses_its_lease]):
        await emit_one(slow)
        row_id = await arrival(arrivals)
        await recorder.wait_for(LeaseWasLost)
    record = lost_leases(caplog)[0]
    assert record.levelno == logging.WARNING
    assert (record.phase, record.row_id, record.queue) == (phase, row_id, "orders")
    assert record.deliveries_count == 1
    assert not recorder.of(Handled)  # nothing is told of an end that was not written


async def test_the_warning_counts_every_delivery_of_the_message(
    make_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Each claim of a row is a delivery, also one whose worker was not heard of again."""
    outbox = make_outbox(observers=[LoggingObserver(), recorder])

    @listen("orders", queue="orders")
    async def loses_its_lease(number: int) -> None:
        if len(recorder.of(LeaseWasLost)) < 2:
            await let_leases_run_out(outbox)

    async with outbox.running(listeners=[loses_its_lease]):
        await emit_one(outbox)
        await recorder.wait_for(Handled)
    assert [record.deliveries_count for record in lost_leases(caplog)] == [1, 2]


@on_every_driver
async def test_a_listeners_transaction_does_not_commit_once_its_lease_is_lost(
    make_outbox: MakeOutbox,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    user_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "LEASE_LOST_PAUSE", timedelta(milliseconds=200))
    outbox = make_outbox(observers=[LoggingObserver(), recorder])
    messages = outbox.tables.messages
    long_ago = datetime.now(UTC) - timedelta(hours=1)

    @listen("orders", queue="orders")
    async def effects(number: int, session: AsyncSession) -> None:
        lost = len(recorder.of(LeaseWasLost))
        session.add(user_model(id=lost, username="effect"))
        if not lost:
            # In its own transaction: on SQLite nobody else could write now.
            await session.execute(messages.update().values(lease_until=long_ago))

    async with outbox.running(listeners=[effects]):
        await emit_one(outbox)
        await recorder.wait_for(Handled)
    async with outbox.transaction() as session:
        assert list(await session.scalars(select(user_model.id))) == [1]
    assert {record.queue for record in lost_leases(caplog)} == {"orders"}


async def test_a_message_whose_lease_was_lost_is_handled_by_another_and_neither_harms_the_other(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    slow, quick = make_outbox(observers=[recorder]), make_outbox(observers=[recorder])
    slow_began, quick_ended = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    @listen("orders", queue="orders")
    async def slowly(number: int) -> None:
        slow_began.set()
        await let_leases_run_out(slow)
        await quick_ended.wait()
        order.append("slow")

    @listen("orders", queue="orders")
    async def quickly(number: int) -> None:
        order.append("quick")

    async with slow.running(listeners=[slowly]):
        await emit_one(slow)
        await asyncio.wait_for(slow_began.wait(), PATIENCE)
        async with quick.running(listeners=[quickly]):
            await recorder.wait_for(Handled)
            await emit_one(quick, 8)  # the next message of the queue is not disturbed by the late one
            await recorder.wait_for(Handled, 2)
            quick_ended.set()
            await recorder.wait_for(LeaseWasLost)
            await eventually(lambda: is_empty(quick))
    assert order[0] == "quick"
    assert "slow" in order


# The length of a lease


def test_a_lease_lasts_sixty_seconds_by_default() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite:///never.db")
    assert outbox.settings.lease == timedelta(seconds=60)


@on_sqlite
async def test_a_listener_can_have_a_lease_of_its_own(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(lease=1000)
    ends: dict[str, float] = {}

    def listener(queue: str, **options: Any) -> Any:
        async def callback(number: int) -> None:
            [stored] = await outbox.messages(queue=queue)
            assert stored.leased_until is not None
            ends[queue] = (stored.leased_until - datetime.now(UTC)).total_seconds()

        return listen("orders", queue=queue, **options)(callback)

    async with outbox.running(listeners=[listener("default"), listener("own", lease=100)]):
        await emit_one(outbox)
        await eventually(lambda: len(ends) == 2)
    assert 980 < ends["default"] <= 1000
    assert 80 < ends["own"] <= 100


async def test_a_listener_that_outlasts_its_lease_keeps_it_by_renewal(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    first, second = (make_outbox(observers=[recorder], lease=RENEWED) for _ in range(2))
    starts: list[str] = []
    on_the_loop, in_a_thread = asyncio.Event(), threading.Event()

    @listen("orders", queue="on the loop")
    async def slowly(number: int) -> None:
        starts.append("on the loop")
        await on_the_loop.wait()

    @listen("orders", queue="in a thread")
    def slowly_in_a_thread(number: int) -> None:
        starts.append("in a thread")
        in_a_thread.wait(PATIENCE)

    listeners = [slowly, slowly_in_a_thread]
    async with first.running(listeners=listeners), second.running(listeners=listeners):
        await emit_one(first)
        await eventually(lambda: len(starts) == 2)
        await renewal(first)
        on_the_loop.set()
        in_a_thread.set()
        await recorder.wait_for(Handled, 2)
    assert sorted(starts) == ["in a thread", "on the loop"]
    assert not recorder.of(LeaseWasLost)
    assert await is_empty(first)


@on_sqlite
async def test_what_is_held_ready_behind_a_slow_listener_is_renewed_as_well(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    first, second = (make_outbox(observers=[recorder], lease=RENEWED) for _ in range(2))
    starts: list[int] = []
    finish = asyncio.Event()

    @listen("orders", queue="orders", concurrency=1)
    async def slow(number: int) -> None:
        starts.append(number)
        await finish.wait()

    await queued(first, 2)
    async with first.running(listeners=[slow]):
        await eventually(lambda: held(first, 2))
        assert starts == [0]
        async with second.running(listeners=[slow]):
            for _ in range(2):  # again and again
                await renewal(first)
            assert starts == [0]
            finish.set()
            await recorder.wait_for(Handled, 2)
    assert starts == [0, 1]
    assert not recorder.of(LeaseWasLost)


async def test_a_held_claim_renews_itself_until_it_is_closed(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    await queued(outbox)
    async with outbox.store.feed.claim(Selection(limit=1, lease=timedelta(seconds=RENEWED), destination="orders")):
        await renewal(outbox)
    [stored] = await outbox.messages()
    assert stored.leased_until is None


# Deliveries that never end


async def test_of_messages_that_may_have_killed_their_worker_one_is_claimed_at_a_time(outbox: Outbox) -> None:
    await queued(outbox, 4)
    async with outbox.store.feed.claim(Selection(limit=2, lease=LEASE, destination="orders")) as lost:
        first, second = lost.attempts
        await let_leases_run_out(outbox)
        async with outbox.store.feed.claim(
            Selection(limit=10, lease=LEASE, destination="orders", suspected=Suspected.ONE)
        ) as claim:
            assert [(a.attempt_count, a.crash_count) for a in claim.attempts] == [(1, 1), (1, 0), (1, 0)]
            assert claim.attempts[0].id == first.id
            async with outbox.store.feed.claim(
                Selection(limit=10, lease=LEASE, destination="orders", suspected=Suspected.ONE)
            ) as other:
                assert [attempt.id for attempt in other.attempts] == [second.id]


async def test_after_max_crashes_a_message_is_dead(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder])
    seen: list[int] = []

    @listen("orders", queue="orders", max_crashes=2)
    async def orders(number: int) -> None:
        seen.append(number)

    await queued(outbox)
    for _ in range(2):
        async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as lost:
            assert lost.attempts
            await let_leases_run_out(outbox)
    async with outbox.running(listeners=[orders]):
        await recorder.wait_for(Handled)
    assert seen == []
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count, letter.crash_count) == ("crashed", 0, 2)


@on_sqlite
async def test_below_max_crashes_a_message_gets_its_full_number_of_attempts(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(observers=[recorder])
    attempts: list[int] = []

    @listen("orders", queue="orders", max_crashes=3, retry_delays=(0,))
    async def fails(number: int, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ConnectionError

    await queued(outbox)
    for _ in range(2):
        async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")):
            await let_leases_run_out(outbox)
    async with outbox.running(listeners=[fails]):
        await recorder.wait_for(Handled, 2)
    assert attempts == [1, 2]
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count, letter.crash_count) == ("exhausted", 2, 2)
