"""Listeners that are at work when their delivery is lost: their message comes again, and they make room for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.util import await_only

from outbox import Listener, Outbox
from outbox.core.attempt import Done, Released
from outbox.core.events import Handled, Troubled, Unsettled
from outbox.transports.rabbitmq import RabbitmqTransport, lost_runs
from tests.amqp.peer import LONG, Consuming, Peer
from tests.support.hanging import Hanging, HangingThread
from tests.support.observing import Recorder, eventually

LOSSES = 12  # more than the slots of a listener, by default 10

Lose = Callable[[Consuming], None]


def close_connection(consumer: Consuming) -> None:
    consumer.channel.connection.reset()


def close_channel(consumer: Consuming) -> None:
    consumer.channel.close(406, "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out")


def cancel_consumer(consumer: Consuming) -> None:
    consumer.cancel()


each_way = pytest.mark.parametrize("lose", [close_connection, close_channel, cancel_consumer])


@asynccontextmanager
async def working(
    peer: Peer, listener: Listener, recorder: Recorder, *, by_hand: bool = True, **settings: Any
) -> AsyncIterator[Outbox]:
    transport = RabbitmqTransport(peer.url, by_hand=by_hand)
    outbox = Outbox(transport=transport, observers=[recorder], log=False, grace=2, **settings)
    async with outbox.running(listeners=[listener]):
        yield outbox
    await outbox.close()


@each_way
async def test_an_attempt_whose_delivery_is_lost_is_cancelled_and_leaves_its_slot(
    peer: Peer, by_hand: bool, recorder: Recorder, lose: Lose
) -> None:
    hanging = Hanging()
    listener = Listener("order.#", hanging, queue="orders", concurrency=1, retry_delays=[10])
    async with working(peer, listener, recorder, by_hand=by_hand):
        for number in range(LOSSES):
            consumer = await peer.consuming()
            tag = consumer.deliver(redelivered=number > 0)
            await eventually(lambda starts=number + 1: hanging.starts == starts)  # type: ignore[misc]
            if number < LOSSES - 1:
                lose(consumer)
        hanging.go_on.set()
        assert (await peer.settled()).tag == tag
        [handled] = await recorder.wait_for(Handled)
    assert (hanging.cancelled, hanging.most_at_work) == (LOSSES - 1, 1)
    assert (handled.attempt.attempt_count, handled.attempt.crash_count) == (1, 0), "nobody failed"
    assert [type(each.outcome) for each in recorder.of(Unsettled)] == [Released] * (LOSSES - 1)


@each_way
async def test_all_attempts_of_a_channel_leave_their_slots_and_begin_again_side_by_side(
    peer: Peer, recorder: Recorder, lose: Lose
) -> None:
    hanging = Hanging()
    listener = Listener("order.#", hanging, queue="orders", concurrency=5, retry_delays=[10])
    async with working(peer, listener, recorder):
        first = await peer.consuming()
        for _ in range(7):
            first.deliver()
        await eventually(lambda: hanging.at_work == 5)
        lose(first)
        second = await peer.consuming()
        await eventually(lambda: hanging.cancelled == 5)
        for _ in range(7):
            second.deliver(redelivered=True)
        await eventually(lambda: hanging.at_work == 5)
        hanging.go_on.set()
        await recorder.wait_for(Handled, 7)
    assert hanging.starts == 12


async def test_a_list_whose_deliveries_are_lost_is_cancelled_and_no_message_of_it_is_tried_alone(
    peer: Peer, recorder: Recorder
) -> None:
    lists: list[list[object]] = []
    go_on = asyncio.Event()

    async def in_lists(orders: list[object]) -> None:
        lists.append(orders)
        await go_on.wait()

    listener = Listener("order.#", in_lists, queue="orders", batch=3, concurrency=1, retry_delays=[10])
    async with working(peer, listener, recorder):
        first = await peer.consuming()
        first.deliver()
        await eventually(lambda: len(lists) == 1)
        for _ in range(3):
            first.deliver()
        await asyncio.sleep(0.05)
        close_connection(first)
        second = await peer.consuming()
        second.deliver(redelivered=True)
        await eventually(lambda: len(lists) == 2)
        go_on.set()
        await recorder.wait_for(Handled)
    assert [len(each) for each in lists] == [1, 1]
    assert not [each for each in recorder.of(Troubled) if "together" in each.where]


async def test_on_error_is_not_asked_for_an_attempt_whose_delivery_is_lost(
    peer: Peer, recorder: Recorder, tmp_path: Path
) -> None:
    asked: list[object] = []
    started = asyncio.Event()

    async def hang(order: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            raise ValueError("it says something else") from cancelled

    async def on_error(error: BaseException, message: object, session: AsyncSession, attempt: object) -> None:
        asked.append(error)

    listener = Listener("order.#", hang, queue="orders", on_error=on_error, retry_delays=[10])
    async with working(peer, listener, recorder, db_engine_url=f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"):
        consumer = await peer.consuming()
        consumer.deliver()
        await asyncio.wait_for(started.wait(), LONG)
        close_connection(consumer)
        [unsettled] = await recorder.wait_for(Unsettled)
    assert unsettled.outcome == Released()
    assert not asked


async def test_a_commit_that_is_under_way_is_not_cut_and_what_waits_for_it_is_called(
    peer: Peer, recorder: Recorder, tmp_path: Path
) -> None:
    called: list[str] = []
    committing, go_on = asyncio.Event(), asyncio.Event()

    def wait(session: object) -> None:
        committing.set()
        await_only(go_on.wait())

    async def write(order: Any, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effects VALUES (1)"))
        outbox.after_commit(session, lambda: called.append("hook"))
        event.listen(session.sync_session, "before_commit", wait)

    listener = Listener("order.#", write, queue="orders", concurrency=1, retry_delays=[10])
    async with working(
        peer, listener, recorder, db_engine_url=f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    ) as outbox:
        async with outbox.transaction() as session:
            await session.execute(text("CREATE TABLE effects (number INTEGER)"))
        consumer = await peer.consuming()
        consumer.deliver()
        await asyncio.wait_for(committing.wait(), LONG)
        close_connection(consumer)
        second = await peer.consuming()
        await asyncio.sleep(0.05)
        assert not recorder.of(Unsettled)
        go_on.set()
        [unsettled] = await recorder.wait_for(Unsettled)
        tag = second.deliver(redelivered=True)
        assert (await peer.settled()).tag == tag
        async with outbox.transaction() as session:
            assert list(await session.scalars(text("SELECT number FROM effects"))) == [1]
    assert isinstance(unsettled.outcome, Done)
    assert called == ["hook"]


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds its cancellation", "swallows it"])
async def test_a_transaction_that_is_open_when_its_delivery_is_lost_is_rolled_back_and_runs_again(
    peer: Peer, recorder: Recorder, tmp_path: Path, heeds: bool
) -> None:
    hanging = Hanging()

    async def write(order: Any, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": hanging.starts + 1})
        with suppress(*(() if heeds else (asyncio.CancelledError,))):
            await hanging(order)

    listener = Listener("order.#", write, queue="orders", concurrency=1, retry_delays=[10], timeout=30)
    async with working(
        peer, listener, recorder, db_engine_url=f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    ) as outbox:
        async with outbox.transaction() as session:
            await session.execute(text("CREATE TABLE effects (number INTEGER)"))
        first = await peer.consuming()
        first.deliver()
        await eventually(lambda: hanging.at_work == 1)
        close_connection(first)
        second = await peer.consuming()
        hanging.go_on.set()
        second.deliver(redelivered=True)
        await recorder.wait_for(Handled)
        async with outbox.transaction() as session:
            assert list(await session.scalars(text("SELECT number FROM effects"))) == [2]


async def test_a_thread_keeps_its_slot_and_its_message_waits_behind_a_delay_until_it_has_ended(
    peer: Peer, by_hand: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_runs, "WAITS_HERE", 0.05)
    thread = HangingThread()
    listener = Listener("order.#", thread, queue="orders", concurrency=2, retry_delays=[1, 10])
    async with working(peer, listener, recorder, by_hand=by_hand):
        first = await peer.consuming()
        first.deliver()
        await eventually(lambda: thread.starts == 1)
        close_connection(first)
        second = await peer.consuming()
        delays = []
        for _ in range(3):
            tag = second.deliver(message_id="message-1", redelivered=True, headers={"x-delivery-count": 1})
            copy = await peer.published()
            delays.append(copy.method.exchange)
            assert "outbox-attempt" not in (copy.properties.headers or {}), "nobody failed"
            copy.channel.ack(copy.tag)
            assert (await peer.settled()).tag == tag
        assert thread.starts == 1
        thread.go_on.set()
        await recorder.wait_for(Unsettled)
        second.deliver(message_id="message-1", exchange="", routing_key="orders")
        [handled] = await recorder.wait_for(Handled)
    assert delays == ["outbox.delay_1s", "outbox.delay_10s", "outbox.delay_10s"]  # the next that is there
    assert (thread.starts, thread.most_at_work, handled.attempt.crash_count) == (2, 1, 0)


async def begins_again(peer: Peer, recorder: Recorder, listener: Listener, run: Hanging | HangingThread) -> None:
    """Its delivery is lost while it runs, and comes again: not beside itself, and at once when it has ended."""
    async with working(peer, listener, recorder):
        first = await peer.consuming()
        first.deliver()
        await eventually(lambda: run.starts == 1)
        close_connection(first)
        second = await peer.consuming()
        tag = second.deliver(redelivered=True)
        await asyncio.sleep(0.05)
        assert run.starts == 1
        run.go_on.set()
        assert (await peer.settled()).tag == tag
    assert (run.starts, run.most_at_work) == (2, 1)


async def test_a_message_whose_first_run_ends_soon_begins_again_at_once(peer: Peer, recorder: Recorder) -> None:
    thread = HangingThread()
    listener = Listener("order.#", thread, queue="orders", concurrency=2, retry_delays=[10])
    await begins_again(peer, recorder, listener, thread)
    assert not peer.has_published


async def test_a_thread_that_outlasts_its_timeout_has_not_ended_yet(
    peer: Peer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_runs, "WAITS_HERE", 0.5)
    thread = HangingThread()
    listener = Listener("order.#", thread, queue="orders", concurrency=2, retry_delays=[1], timeout=0.1)
    async with working(peer, listener, recorder):
        first = await peer.consuming()
        first.deliver()
        await eventually(lambda: thread.starts == 1)
        close_connection(first)
        second = await peer.consuming()
        second.deliver(redelivered=True)
        copy = await peer.published()  # behind a delay, because it goes on after its timeout
        copy.channel.ack(copy.tag)
        assert copy.method.exchange == "outbox.delay_1s"
        assert thread.starts == 1
        thread.go_on.set()
        await recorder.wait_for(Unsettled)


async def test_a_listener_that_does_not_heed_its_cancellation_is_not_run_beside_itself(
    peer: Peer, recorder: Recorder
) -> None:
    stubborn = Hanging()

    async def hang(order: Any) -> None:
        task = asyncio.ensure_future(stubborn(order))
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(task)

    listener = Listener("order.#", hang, queue="orders", concurrency=5, retry_delays=[10])
    await begins_again(peer, recorder, listener, stubborn)


async def test_what_waited_for_its_lane_when_it_was_lost_is_not_run(peer: Peer, recorder: Recorder) -> None:
    hanging = Hanging()
    listener = Listener("order.#", hanging, queue="orders", concurrency=5, lane="one", retry_delays=[10])
    async with working(peer, listener, recorder):
        first = await peer.consuming()
        for _ in range(4):
            first.deliver()
        await eventually(lambda: hanging.starts == 1)
        await asyncio.sleep(0.05)
        close_connection(first)
        second = await peer.consuming()
        await eventually(lambda: hanging.cancelled == 1)
        for _ in range(4):
            second.deliver(redelivered=True)
        hanging.go_on.set()
        await recorder.wait_for(Handled, 4)
    assert hanging.starts == 5
