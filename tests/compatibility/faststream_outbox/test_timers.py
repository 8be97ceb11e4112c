"""Timers and future-dated messages ("except when the row is future-dated … or a timer_id conflict").

The rulings: a timer id is unique among the messages that still wait, whatever their routing key; it is free again once
its message was taken; and a timer is cancelled only as long as nobody has taken it.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import Binding, Message, Outbox, Reject, TimerIdInvalid, listen
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import Emitted, Handled
from outbox.core.store import Selection
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import (
    PATIENCE,
    Recorder,
    Statements,
    arrival,
    eventually,
    let_leases_run_out,
    routing_keys,
)
from tests.support.outboxes import MakeOutbox

LEASE = timedelta(seconds=30)
HOUR = timedelta(hours=1)


async def set_timer(outbox: Outbox, timer_id: str = "order-7", **options: Any) -> Message | None:
    async with outbox.transaction() as session:
        return await outbox.emit(session, "order.expired", 7, timer_id=timer_id, **{"eta": HOUR, **options})


async def cancel(outbox: Outbox, timer_id: str = "order-7") -> bool:
    async with outbox.transaction() as session:
        return await outbox.cancel_timer(session, timer_id)


# One of each


@on_every_driver
async def test_a_timer_that_already_waits_makes_a_second_emit_a_no_op(outbox: Outbox, recorder: Recorder) -> None:
    first = await set_timer(outbox)
    assert isinstance(first, Message)
    assert await set_timer(outbox, eta=timedelta(minutes=1)) is None
    [stored] = await outbox.messages()
    assert (stored.message, stored.timer_id) == (first, "order-7")
    assert stored.due_at - datetime.now(UTC) > timedelta(minutes=50)
    assert len(recorder.of(Emitted)) == 1  # nothing is told of what was not written


async def test_the_transaction_of_a_second_timer_goes_on(
    outbox: Outbox, db_engine: AsyncEngine, user_model: Any
) -> None:
    await set_timer(outbox)
    async with AsyncSession(db_engine) as session, session.begin():
        session.add(user_model(id=7, username="order"))
        assert await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7") is None
        await outbox.emit(session, "order.created", 7)
    async with AsyncSession(db_engine) as session:
        assert await session.get(user_model, 7) is not None
    assert await routing_keys(outbox) == ["order.expired", "order.created"]


async def test_a_timer_set_twice_in_one_transaction_is_set_once(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        assert await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7") is not None
        assert await outbox.emit(session, "order.expired", 8, eta=HOUR, timer_id="order-7") is None
    assert len(await outbox.messages()) == 1


@on_sqlite
async def test_timers_with_different_ids_do_not_know_each_other(outbox: Outbox) -> None:
    assert await set_timer(outbox, "order-7")
    assert await set_timer(outbox, "order-8")
    async with outbox.transaction() as session:
        for _ in range(2):
            assert await outbox.emit(session, "order.created", 7) is not None
    assert len(await outbox.messages()) == 4


@on_sqlite
async def test_a_timer_that_was_rolled_back_can_be_set_again(outbox: Outbox) -> None:
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7")
            raise ZeroDivisionError
    assert await set_timer(outbox) is not None


async def test_a_timer_in_a_savepoint_that_rolled_back_can_be_set_again_in_the_same_transaction(
    outbox: Outbox,
) -> None:
    async with outbox.transaction() as session:
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7")
                raise ZeroDivisionError
        assert await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7") is not None


@pytest.mark.parametrize("commits", [True, False])
@on_every_driver
async def test_of_two_transactions_that_set_a_timer_at_once_exactly_one_does(
    make_outbox: MakeOutbox, commits: bool
) -> None:
    first, second = make_outbox(), make_outbox()
    await first.create_tables()
    try:
        async with first.transaction() as session:
            await first.emit(session, "order.expired", 1, eta=HOUR, timer_id="order-7")
            waiting = asyncio.create_task(set_timer(second))
            await asyncio.wait([waiting], timeout=0.1)
            assert not waiting.done()  # it cannot know yet
            if not commits:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert (await asyncio.wait_for(waiting, PATIENCE) is None) == commits
    [stored] = await first.messages()
    assert stored.message.body == (b"1" if commits else b"7")


async def test_timers_of_two_outboxes_in_one_database_do_not_collide(make_outbox: MakeOutbox, table_name: str) -> None:
    first, second = make_outbox(), make_outbox(table_name=f"{table_name}_second")
    assert await set_timer(first) is not None
    assert await set_timer(second) is not None
    assert await cancel(first)
    assert await routing_keys(second) == ["order.expired"]


@pytest.mark.parametrize("timer_id", ["", "x" * 256, "new\nline", 7])
@on_sqlite
async def test_a_timer_id_that_could_not_be_stored_is_refused(outbox: Outbox, timer_id: Any) -> None:
    with pytest.raises(TimerIdInvalid):
        await set_timer(outbox, timer_id)
    with pytest.raises(TimerIdInvalid):
        await cancel(outbox, timer_id)


# Free again


async def test_the_id_is_free_once_its_message_was_taken(outbox: Outbox) -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("order.expired", queue="orders", concurrency=5)
    async def expired(number: int) -> None:
        await started.put(number)
        await finish.wait()

    async with outbox.running(listeners=[expired]):
        assert await set_timer(outbox, eta=0) is not None
        await arrival(started)
        assert await set_timer(outbox, eta=0) is not None  # the first one is still in its listener
        await arrival(started)
        finish.set()


@on_sqlite
async def test_the_id_is_free_after_success_and_after_death(outbox: Outbox, recorder: Recorder) -> None:
    @listen("order.expired", queue="orders")
    async def expired(number: int, message: Message) -> None:
        if len(recorder.of(Handled)) == 1:
            raise Reject

    async with outbox.running(listeners=[expired]):
        for count in (1, 2, 3):
            assert await set_timer(outbox, eta=0) is not None
            await recorder.wait_for(Handled, count)
    [letter] = await outbox.dead_letters.list()
    [walk] = await outbox.find(letter.message.id)
    assert walk.timer_id == "order-7"


async def test_a_kept_message_does_not_keep_its_timer_id(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    async def publish(message: Message) -> None: ...

    outbox = make_outbox(clean_up_after="NEVER", transport=publish)
    async with outbox.running(relay=True):
        assert await set_timer(outbox, eta=0) is not None
        await eventually(lambda: outbox.messages(state="sent"))
        assert await set_timer(outbox) is not None


async def test_a_replayed_timer_collides_with_no_newer_one(outbox: Outbox, recorder: Recorder) -> None:
    @listen("order.expired", queue="orders")
    async def expired(number: int) -> None:
        raise Reject

    async with outbox.running(listeners=[expired]):
        await set_timer(outbox, eta=0)
        await recorder.wait_for(Handled)
    [letter] = await outbox.dead_letters.list()
    assert await set_timer(outbox) is not None
    assert await outbox.dead_letters.replay([letter.id]) == 1
    assert len(await outbox.messages()) == 2


async def test_a_replayed_timer_that_had_reached_no_queue_collides_with_no_newer_one_either(outbox: Outbox) -> None:
    await set_timer(outbox, eta=datetime.now(UTC) - HOUR, expiration=1)
    assert await outbox.store.maintenance.expire(10) == 1
    [letter] = await outbox.dead_letters.list()
    assert letter.queue is None
    assert await set_timer(outbox) is not None
    assert await outbox.dead_letters.replay([letter.id]) == 1
    assert len(await outbox.messages()) == 2


@on_sqlite
async def test_a_timer_for_several_queues_reaches_each_of_them(outbox: Outbox, recorder: Recorder) -> None:
    seen: list[str] = []

    def listener(queue: str) -> Any:
        async def callback(number: int, queue_name: str) -> None:
            seen.append(queue_name)

        return listen("order.*", queue=queue)(callback)

    async with outbox.running(listeners=[listener("one"), listener("two"), listener("three")]):
        await set_timer(outbox, eta=0)
        await recorder.wait_for(Handled, 3)
    assert sorted(seen) == ["one", "three", "two"]


# Cancelling


async def test_a_timer_that_waits_can_be_cancelled_once(outbox: Outbox) -> None:
    await set_timer(outbox)
    await set_timer(outbox, "order-8")
    assert await cancel(outbox) is True
    assert await cancel(outbox) is False
    assert await cancel(outbox, "never set") is False
    [stored] = await outbox.messages()
    assert stored.timer_id == "order-8"
    assert await set_timer(outbox) is not None


async def test_a_cancellation_that_rolls_back_cancels_nothing(outbox: Outbox) -> None:
    await set_timer(outbox)
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            assert await outbox.cancel_timer(session, "order-7")
            raise ZeroDivisionError
    assert await routing_keys(outbox) == ["order.expired"]


async def test_cancel_and_set_again_in_one_transaction_reschedules(outbox: Outbox) -> None:
    await set_timer(outbox)
    async with outbox.transaction() as session:
        assert await outbox.cancel_timer(session, "order-7")
        assert await outbox.emit(session, "order.expired", 8, eta=2 * HOUR, timer_id="order-7") is not None
    [stored] = await outbox.messages()
    assert stored.message.body == b"8"


async def test_a_timer_that_was_taken_cannot_be_cancelled(outbox: Outbox) -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("order.expired", queue="orders")
    async def expired(number: int) -> None:
        await started.put(number)
        await finish.wait()

    async with outbox.running(listeners=[expired]):
        await set_timer(outbox, eta=0)
        await arrival(started)
        assert await cancel(outbox) is False
        finish.set()


async def test_a_timer_that_lies_in_a_queue_or_is_retried_there_cannot_be_cancelled(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("orders", "order.expired")])
    await set_timer(outbox, eta=0)
    await outbox.store.queues.route(10, {})
    assert await cancel(outbox) is False
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
        await claim.settle({claim.attempts[0].id: RetryIn(HOUR, "failed")})
    assert await cancel(outbox) is False
    assert await routing_keys(outbox) == ["order.expired"]


async def test_a_timer_in_a_relays_hands_cannot_be_cancelled_until_it_is_given_back(outbox: Outbox) -> None:
    await set_timer(outbox, eta=0)
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE)) as claim:
        assert len(claim.attempts) == 1
        assert await cancel(outbox) is False
    assert await cancel(outbox) is True


async def test_a_timer_whose_lease_ran_out_can_be_cancelled_and_its_late_holder_is_fenced(outbox: Outbox) -> None:
    await set_timer(outbox, eta=0)
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE)) as claim:
        [attempt] = claim.attempts
        await let_leases_run_out(outbox)
        assert await cancel(outbox) is True
        assert await claim.settle({attempt.id: Done()}) == {attempt.id}
    assert await outbox.messages() == []


async def test_a_due_timer_that_nobody_listens_to_still_waits(outbox: Outbox) -> None:
    await set_timer(outbox, eta=0)
    await outbox.store.queues.bind([Binding("orders", "something.else")])
    await outbox.store.queues.route(10, {})
    assert (await outbox.backlog()).unroutable == 1
    assert await set_timer(outbox) is None
    assert await cancel(outbox) is True


async def test_plain_sessions_set_and_cancel_timers(outbox: Outbox, sync_engine: Engine) -> None:
    with Session(sync_engine) as session, session.begin():
        assert outbox.emit_sync(session, "order.expired", 7, eta=HOUR, timer_id="order-7") is not None
        assert outbox.emit_sync(session, "order.expired", 7, eta=HOUR, timer_id="order-7") is None
    with sync_engine.begin() as connection:
        assert outbox.cancel_timer_sync(connection, "order-7") is True
        assert outbox.cancel_timer_sync(connection, "order-7") is False
    assert await outbox.messages() == []


async def test_cancelling_in_a_database_without_tables_finds_nothing(outbox: Outbox) -> None:
    assert await cancel(outbox) is False


# Firing


async def test_a_timer_fires_when_it_is_due_and_is_taken_once(outbox: Outbox, recorder: Recorder) -> None:
    arrivals: asyncio.Queue[float] = asyncio.Queue()

    @listen("order.expired", queue="orders")
    async def expired(number: int) -> None:
        await arrivals.put(time.monotonic())

    async with outbox.running(listeners=[expired]):
        began = time.monotonic()
        await set_timer(outbox, eta=timedelta(seconds=0.2))
        assert await arrival(arrivals) - began > 0.195
        await recorder.wait_for(Handled)
    assert arrivals.empty()
    assert await outbox.messages() == []


@on_sqlite
async def test_a_cancelled_timer_never_fires(outbox: Outbox, recorder: Recorder) -> None:
    seen: list[int] = []

    @listen("order.*", queue="orders")
    async def orders(number: int, routing_key: str) -> None:
        seen.append(number)

    await set_timer(outbox, eta=timedelta(seconds=0.2))
    assert await cancel(outbox)
    async with outbox.running(listeners=[orders]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.later", 99, eta=timedelta(seconds=0.3))
        await recorder.wait_for(Handled)
    assert seen == [99]


@on_every_driver
async def test_a_sleeper_wakes_for_the_next_timer_and_not_at_the_next_poll(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    await set_timer(outbox, eta=timedelta(seconds=3))  # it sleeps before the timer is due, whatever holds it up
    async with asyncio.timeout(PATIENCE / 2):
        while True:
            await outbox.store.feed.wait(4 * PATIENCE)
            async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE)) as claim:
                if claim.attempts:
                    break


async def test_a_sleeper_hears_of_a_timer_that_is_due_before_it_meant_to_look_again(make_outbox: MakeOutbox) -> None:
    producer, consumer = make_outbox(), make_outbox(poll_interval=4 * PATIENCE)
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("order.expired", queue="orders")
    async def expired(number: int) -> None:
        await arrivals.put(number)

    async with consumer.running(listeners=[expired]):
        await set_timer(producer, eta=timedelta(seconds=0.3))
        assert await arrival(arrivals) == 7


async def test_a_delay_is_added_to_the_databases_clock_when_the_message_is_written(outbox: Outbox) -> None:
    """A transaction that has been open for a while does not make its timers early."""
    async with outbox.transaction() as session:
        await session.execute(select(1))
        await asyncio.sleep(0.1)
        before = datetime.now(UTC)
        await outbox.emit(session, "order.expired", 7, eta=timedelta(seconds=60), timer_id="order-7")
    [stored] = await outbox.messages()
    assert stored.due_at >= before + timedelta(seconds=60) - timedelta(milliseconds=2)


async def test_setting_a_timer_is_one_statement_and_so_is_cancelling_it(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await set_timer(outbox, "warm up")
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "warm up", 0)
        with Statements(db_engine.sync_engine) as statements:
            await outbox.emit(session, "order.expired", 7, eta=HOUR, timer_id="order-7")
            await outbox.cancel_timer(session, "order-7")
    assert [statement.split()[0] for statement in statements] == ["INSERT", "DELETE"]
