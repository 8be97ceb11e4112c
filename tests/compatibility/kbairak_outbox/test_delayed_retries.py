""" "Delayed Retries with Exponential Backoff". Its 2, 5 and 15 seconds run here as hundredths.

The rulings: delay queues are shared by all listeners and called as there, `{exchange}.delay_{N}s`; the attempt's
number and the first routing key travel in headers of our own, because quorum queues overwrite `x-delivery-count`; a
worker writes dead letters itself, with reason, error and attempts.
"""

from __future__ import annotations

import json
import time
from itertools import accumulate
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel
from pamqp.common import FieldTable
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import NEVER, Outbox, Reject, listen, tracking
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled, Relayed
from tests.support.broker import VirtualHost
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.queues import bring_back, is_empty, taken

from .users import Arrivals

ORDER = {"id": 7}
DELAYS = (0.02, 0.05, 0.15)


async def emit_and_commit(outbox: Outbox, *routing_keys: str, body: object = ORDER) -> None:
    async with outbox.transaction() as session:
        for routing_key in routing_keys:
            await outbox.emit(session, routing_key, body)


# Message flow diagram, and 5. Retry attempt calculation


@on_both_stores
async def test_three_failures_wait_longer_and_longer_and_the_fourth_attempt_succeeds(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(clean_up_after=NEVER)
    attempts: list[tuple[int, object, str]] = []
    times: list[float] = []

    @listen("order.process", queue="demo.order_processor", retry_delays=DELAYS)
    async def process_order(order: object, attempt_count: int, routing_key: str, message: Any) -> None:
        times.append(time.monotonic())
        attempts.append((attempt_count, message.headers.get("outbox-attempt"), routing_key))
        if attempt_count < 4:
            raise ConnectionError

    async with outbox.running(relay=True, listeners=[process_order]):
        await emit_and_commit(outbox, "order.process")
        handled = await recorder.wait_for(Handled, 4)
    assert attempts == [
        (1, None, "order.process"),
        (2, 2, "order.process"),
        (3, 3, "order.process"),
        (4, 4, "order.process"),
    ]
    elapsed = [at - times[0] for at in times[1:]]
    assert all(actual > wanted - 0.005 for actual, wanted in zip(elapsed, accumulate(DELAYS), strict=True))
    assert [type(event.outcome) for event in handled] == [RetryIn, RetryIn, RetryIn, Done]
    for queue in ("demo.order_processor", "demo.order_processor.dlq", "outbox.delay_150ms"):
        assert await is_empty(channel, queue)
    [stored] = await outbox.messages()
    assert (stored.state, stored.done_at is not None) == ("sent", True)
    assert len(recorder.of(Relayed)) == 1  # a retry is no business of the relay's


@on_sqlite
async def test_after_four_failures_it_is_dead(
    rabbitmq_outbox: Outbox, recorder: Recorder, channel: AbstractChannel
) -> None:
    @listen("order.process", queue="demo.order_processor", retry_delays=DELAYS)
    async def process_order(order: object) -> None:
        raise ConnectionError

    async with rabbitmq_outbox.running(relay=True, listeners=[process_order]):
        await emit_and_commit(rabbitmq_outbox, "order.process")
        handled = await recorder.wait_for(Handled, len(DELAYS) + 1)
        letter = await taken(channel, "demo.order_processor.dlq")
    assert [type(event.outcome) for event in handled] == [RetryIn, RetryIn, RetryIn, Dead]
    assert letter.headers["outbox-attempt"] == len(DELAYS) + 1


# 1. Delay queues


async def test_a_listener_with_three_delays_gets_three_delay_queues(vhost: VirtualHost) -> None:
    @listen("order.process", queue="demo.order_processor", retry_delays=(2, 5, 15))
    async def process_order(order: object) -> None: ...

    async with Outbox(rabbitmq_url=vhost.url).running(listeners=[process_order]):
        queues = vhost.queues()
    assert queues.keys() == {
        "demo.order_processor",
        "outbox.delay_2s",
        "outbox.delay_5s",
        "outbox.delay_15s",
        "demo.order_processor.dlq",
    }
    arguments = queues["outbox.delay_2s"]["arguments"]
    assert arguments["x-message-ttl"] == 2000  # milliseconds
    assert arguments["x-dead-letter-exchange"] == ""  # default exchange
    assert "x-dead-letter-routing-key" not in arguments  # each retry carries the name of its own queue
    assert arguments["x-queue-type"] == "quorum"


# 2. Retry logic in consumer, 3. TTL expiration and dead-lettering, 4. Header tracking


@on_both_stores
async def test_a_retry_waits_in_its_delay_queue_with_all_that_it_needs_to_come_back(
    rabbitmq_outbox: Outbox, arrivals: Arrivals, recorder: Recorder, channel: AbstractChannel
) -> None:
    @listen("order.*", queue="demo.order_processor", retry_delays=(300, 600))
    async def process_order(order: object, attempt_count: int, tracking_ids: tuple[str, ...]) -> None:
        arrivals.put_nowait((attempt_count, tracking_ids))
        raise ConnectionError(f"number {attempt_count}")

    async with rabbitmq_outbox.running(relay=True, listeners=[process_order]):
        with tracking() as entry_point:
            async with rabbitmq_outbox.transaction() as session:
                emitted = await rabbitmq_outbox.emit(
                    session, "order.process", ORDER, headers={"tenant": "a"}, expiration=3600
                )
        assert emitted is not None
        for number, delay_queue in ((1, "outbox.delay_300s"), (2, "outbox.delay_600s")):
            assert await arrival(arrivals) == (number, (*entry_point, emitted.id))
            await recorder.wait_for(Handled, number)
            waiting = await taken(channel, delay_queue)
            assert await is_empty(channel, "demo.order_processor")  # it was acknowledged
            assert (waiting.exchange, waiting.routing_key) == (delay_queue, "demo.order_processor")
            assert (waiting.body, waiting.content_type) == (emitted.body, "application/json")
            assert (waiting.message_id, waiting.delivery_mode) == (emitted.id, 2)
            headers = waiting.headers
            assert (headers["outbox-attempt"], headers["outbox-routing-key"]) == (number + 1, "order.process")
            assert headers["outbox-tracking-ids"] == [*entry_point, emitted.id]
            assert headers["x-original-routing-key"] == "order.process"
            assert json.loads(str(headers["x-outbox-tracking-ids"])) == [*entry_point, emitted.id]
            assert waiting.expiration is None  # it would cut the delay short: the worker knows the deadline
            assert headers["tenant"] == "a"
            assert str(headers["outbox-history"]).count("\n") == number
            assert "x-death" not in headers
            await bring_back(channel, waiting)  # its time is up
        assert (await arrival(arrivals))[0] == 3
        letter = await taken(channel, "demo.order_processor.dlq")
    assert (letter.headers["outbox-attempt"], letter.headers["outbox-routing-key"]) == (3, "order.process")
    assert letter.headers["outbox-tracking-ids"] == [*entry_point, emitted.id]


async def test_the_brokers_own_count_of_deliveries_is_no_count_of_attempts(
    vhost: VirtualHost, channel: AbstractChannel, arrivals: Arrivals
) -> None:
    @listen("order.process", queue="demo.order_processor", retry_delays=(0.02,))
    async def process_order(order: object, attempt_count: int, message: Any) -> None:
        arrivals.put_nowait((attempt_count, message.redelivered))
        if attempt_count == 1:
            raise ConnectionError

    outbox = Outbox(rabbitmq_url=vhost.url)
    async with outbox.running(listeners=[process_order]):
        pass
    exchange = await channel.get_exchange("outbox")
    await exchange.publish(aio_pika.Message(b"{}", headers={"x-delivery-count": 7}), "order.process")
    queue = await channel.get_queue("demo.order_processor")
    returned: Any = await eventually(lambda: queue.get(fail=False))
    await returned.nack(requeue=True)
    async with outbox.running(listeners=[process_order]):
        assert await arrival(arrivals) == (1, True)
        assert await arrival(arrivals) == (2, False)


@on_sqlite
async def test_messages_are_exchanged_with_services_of_the_projects_library(
    make_rabbitmq_outbox: MakeOutbox, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    @listen("order.*", queue="ours", retry_delays=(10,))
    async def ours(order: object, routing_key: str, session: AsyncSession, tracking_ids: tuple[str, ...]) -> None:
        arrivals.put_nowait((order, routing_key, tracking_ids))

    outbox = make_rabbitmq_outbox(exchange_name="shop")
    exchange = await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)
    theirs = await channel.declare_queue("theirs", durable=True)
    await theirs.bind(exchange, "order.*")
    delays: FieldTable = {"x-message-ttl": 10_000, "x-dead-letter-exchange": "outbox", "x-queue-type": "quorum"}
    await channel.declare_queue("outbox.delay_10s", durable=True, arguments=delays)
    async with outbox.running(relay=True, listeners=[ours]):
        shop = await channel.get_exchange("shop")
        await exchange.bind(shop, "#")
        await shop.bind(exchange, "#")
        async with outbox.transaction() as session:
            sent = await outbox.emit(session, "order.process", ORDER)
        assert sent is not None
        assert await arrival(arrivals) == (ORDER, "order.process", (sent.id,))
        received = await taken(channel, "theirs")
        assert json.loads(received.body) == ORDER
        assert json.loads(str(received.headers["x-outbox-tracking-ids"])) == [sent.id]
        for ids in (["uuid1", "uuid2"], ["uuid1", "uuid2"], ["uuid1", "uuid3"]):  # one comes again
            headers: Any = {"x-outbox-tracking-ids": json.dumps(ids)}
            answer = aio_pika.Message(received.body, headers=headers, content_type="application/json")
            await exchange.publish(answer, "order.answer")
        came = [await arrival(arrivals), await arrival(arrivals)]
    assert sorted(ids for _, _, ids in came) == [("uuid1", "uuid2"), ("uuid1", "uuid3")]
    assert {routing_key for _, routing_key, _ in came} == {"order.answer"}
    assert arrivals.empty()


# 6. Special cases


@on_both_stores
async def test_without_delays_and_after_a_reject_it_goes_straight_to_the_dead_letters(
    rabbitmq_outbox: Outbox, recorder: Recorder, vhost: VirtualHost, channel: AbstractChannel
) -> None:
    @listen("task", queue="empty", retry_delays=())
    async def handler(data: object) -> None:
        raise Exception("This goes straight to DLQ")

    @listen("task", queue="rejects", retry_delays=(2, 5))
    async def rejects(data: object) -> None:
        raise Reject()  # No retries, straight to DLQ

    async with rabbitmq_outbox.running(relay=True, listeners=[handler, rejects]):
        await emit_and_commit(rabbitmq_outbox, "task")
        letters = {queue: await taken(channel, f"{queue}.dlq") for queue in ("empty", "rejects")}
    assert {queue: letter.headers["outbox-reason"] for queue, letter in letters.items()} == {
        "empty": "exhausted",
        "rejects": "rejected",
    }
    assert {letter.headers["outbox-attempt"] for letter in letters.values()} == {1}
    assert "This goes straight to DLQ" in str(letters["empty"].headers["outbox-error"])
    assert {name for name in vhost.queues() if ".delay_" in name} == {"outbox.delay_2s", "outbox.delay_5s"}
    for delay in (2, 5):
        assert await is_empty(channel, f"outbox.delay_{delay}s")


# Scaling: "Delay queues are independent, no contention", "Failed messages don't block processing of new messages"


@on_sqlite
async def test_a_long_delay_holds_up_no_short_one_and_no_new_message(
    rabbitmq_outbox: Outbox, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    def delay(attempt_count: int, error: BaseException) -> float:
        return 300 if str(error) == "long" else 0.1

    @listen("order.*", queue="demo.order_processor", retry_delays=delay, concurrency=1)
    async def process_order(kind: str, attempt_count: int) -> None:
        if kind != "new" and attempt_count == 1:
            raise ConnectionError(kind)
        arrivals.put_nowait((kind, attempt_count))

    async with rabbitmq_outbox.running(relay=True, listeners=[process_order]):
        for kind in ("long", "short", "new"):
            await emit_and_commit(rabbitmq_outbox, "order.process", body=kind)
        assert {await arrival(arrivals), await arrival(arrivals)} == {("short", 2), ("new", 1)}
        assert (await taken(channel, "outbox.delay_300s")).body == b'"long"'
