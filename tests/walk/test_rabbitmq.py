"""From emit to listener over a real RabbitMQ that is killed, stopped, cut off, filled up, and robbed of its queues."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from yarl import URL

from outbox import Listener, Outbox
from outbox.core.attempt import Dead, Done, Reason
from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable
from outbox.core.events import Failed, Handled, LeaseWasLost, Observer, Relayed, Started, Troubled, Unsettled
from outbox.core.message import Message
from outbox.core.transport import Defaults
from outbox.observers.logging import LoggingObserver
from outbox.testing.servers import RabbitMQ
from outbox.transports.rabbitmq import RabbitmqTransport
from tests.support.databases import SQLITE, WAL, on_sqlite, on_sqlite_and_from_the_log
from tests.support.observing import PATIENCE, Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox, emit

ROOT = Path(__file__).parents[2]
LARGEST_MESSAGE = 500_000  # bytes that the broker takes; a frame has 131 072
SINGLY = 500  # messages that are acknowledged one by one

Arrivals = asyncio.Queue[Any]


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    """A RabbitMQ that may be hurt; tests tell their queues apart by name."""
    with RabbitMQ(management=False, settings={"max_message_size": str(LARGEST_MESSAGE)}) as server:
        yield server


@pytest.fixture
def make_shop(make_outbox: MakeOutbox, broker: RabbitMQ, table_name: str) -> MakeOutbox:
    """Outboxes on that broker, with exchanges and queues of their own."""

    def make(**options: Any) -> Outbox:
        names: dict[str, Any] = {"exchange_name": table_name, "queue_prefix": f"{table_name}."}
        return make_outbox(**{"rabbitmq_url": broker.url, **names, **options})

    return make


@pytest.fixture
def arrivals() -> Arrivals:
    return asyncio.Queue()


@pytest.fixture
def listener(arrivals: Arrivals) -> Listener:
    async def on_order(order: Any) -> None:
        arrivals.put_nowait(order)

    return Listener("order.*", on_order, queue="orders")


async def all_of(arrivals: Arrivals, *wanted: Any) -> None:
    """Until all of these orders have come; some may come twice, and earlier ones again."""
    missing = set(wanted)
    while missing:
        missing.discard(await arrival(arrivals))


async def test_a_message_walks_from_emit_over_the_broker_to_its_listener(
    make_shop: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    outbox = make_shop()
    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, *range(100))
        await all_of(arrivals, *range(100))
        await eventually(lambda: _nothing_waits(outbox))


async def _nothing_waits(outbox: Outbox) -> bool:
    return not await outbox.messages(state="waiting")


@pytest.fixture
async def shop(
    make_shop: MakeOutbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> AsyncIterator[Outbox]:
    """A relay and a worker at work, with one message behind them."""
    outbox = make_shop(observers=[recorder])
    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, "first")
        assert await arrival(arrivals) == "first"
        yield outbox


@pytest.mark.parametrize(
    ("end", "database_url"),
    [(RabbitMQ.kill, SQLITE), (RabbitMQ.stop, SQLITE), (RabbitMQ.kill, WAL)],
    ids=["killed-sqlite", "stopped-sqlite", "killed-wal"],
    indirect=["database_url"],
)
async def test_work_goes_on_when_the_broker_is_back(
    shop: Outbox,
    broker: RabbitMQ,
    arrivals: Arrivals,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[RabbitMQ], None],
) -> None:
    caplog.set_level(logging.WARNING, "outbox")
    await asyncio.to_thread(end, broker)
    await emit(shop, *range(10))
    await recorder.wait_for(Troubled)
    await asyncio.to_thread(broker.start)
    await all_of(arrivals, *range(10))
    begins, ends = [record.getMessage() for record in caplog.records if record.name == "outbox"]
    assert "; again in " in begins and " works again after " in ends
    assert all(event.attempt.attempt_count == 1 for event in recorder.of(Relayed))  # being away burns no attempt


@on_sqlite_and_from_the_log
async def test_work_goes_on_after_the_broker_closed_every_connection(
    shop: Outbox, broker: RabbitMQ, arrivals: Arrivals, recorder: Recorder
) -> None:
    await asyncio.to_thread(broker.control, "close_all_connections", "enough for today")
    await recorder.wait_for(Troubled, 2)
    await emit(shop, "second")
    await all_of(arrivals, "second")


@on_sqlite
@pytest.mark.parametrize("takes", ["single", "lists"])
async def test_what_a_busy_worker_could_not_acknowledge_before_a_cut_is_no_lost_lease(
    make_shop: MakeOutbox, broker: RabbitMQ, recorder: Recorder, caplog: pytest.LogCaptureFixture, takes: str
) -> None:
    running, go_on, runs = set[int](), asyncio.Event(), Counter[int]()

    async def one_by_one(order: int) -> None:
        running.add(order)
        await go_on.wait()
        runs[order] += 1

    async def in_lists(orders: list[int]) -> None:
        for order in orders:
            running.add(order)
        await go_on.wait()
        runs.update(orders)

    slow = (
        Listener("order.*", one_by_one, queue="orders", concurrency=20)
        if takes == "single"
        else Listener("order.*", in_lists, queue="orders", batch=5, concurrency=20)
    )
    caplog.set_level(logging.WARNING, "outbox")
    outbox = make_shop(observers=[recorder])
    async with outbox.running(relay=True, listeners=[slow]):
        await emit(outbox, *range(20))
        await eventually(lambda: len(running) == 20)
        await asyncio.to_thread(broker.control, "close_all_connections", "enough for today")
        await recorder.wait_for(Troubled, 2)
        go_on.set()
        await eventually(lambda: len({event.attempt.message.body for event in recorder.of(Handled)}) == 20)
    unsettled = [event.attempt.message.id for event in recorder.of(Unsettled)]
    assert sorted(unsettled) == sorted(event.attempt.message.id for event in recorder.of(Handled)), "they came again"
    assert (set(runs.values()), recorder.of(LeaseWasLost)) == ({1}, []), "the first runs were cut"
    begins, ends = [record.getMessage() for record in caplog.records if record.name == "outbox"]
    assert "; again in " in begins and " works again after " in ends


@on_sqlite_and_from_the_log
async def test_a_queue_that_was_deleted_is_made_again(
    shop: Outbox, broker: RabbitMQ, arrivals: Arrivals, recorder: Recorder, table_name: str
) -> None:
    await asyncio.to_thread(broker.control, "delete_queue", f"{table_name}.orders")
    await emit(shop, "second")
    assert await arrival(arrivals) == "second"


@on_sqlite_and_from_the_log
async def test_a_broker_with_an_alarm_is_waited_for(
    shop: Outbox, broker: RabbitMQ, arrivals: Arrivals, recorder: Recorder
) -> None:
    await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0")
    try:
        await emit(shop, "blocked")
        await emit(shop, "waiting")  # the broker says so when the first comes, and nothing more is sent to it
        await eventually(lambda: any("low on memory" in str(event.error) for event in recorder.of(Troubled)))
    finally:
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.4")
    await all_of(arrivals, "blocked", "waiting")
    assert all(event.attempt.attempt_count == 1 for event in recorder.of(Relayed))


@pytest.mark.parametrize("by_hand", [True, False], ids=["by_hand", "plain"])
async def test_a_message_that_the_broker_cannot_take_fails_alone(
    broker: RabbitMQ, table_name: str, by_hand: bool
) -> None:
    names = Defaults(settings={"exchange_name": table_name})
    transport = RabbitmqTransport(broker.url, names, by_hand=by_hand)
    listener = Listener("#", print, queue=f"{table_name}.all")
    await transport.open()
    await transport.declare([listener])
    good = [Message(routing_key="a", body=b"%d" % number) for number in range(20)]
    large = Message(routing_key="a", body=bytes(400_000))
    too_large = [Message(routing_key="a", body=bytes(LARGEST_MESSAGE + 1)) for _ in range(2)]
    rerouting = Message(routing_key="a", body=b"", headers={"CC": "elsewhere"})
    batch = [*good[:7], too_large[0], *good[7:12], large, rerouting, too_large[1], *good[12:]]
    again = [Message(routing_key="a", body=b"") for _ in range(20)]
    published, *others = await asyncio.gather(
        transport.publish(batch), *(transport.publish([one]) for one in again[:5]), transport.publish(again[5:])
    )
    confirmed, refused = set(published.confirmed), dict(published.refused)
    async with asyncio.timeout(PATIENCE):
        while doubtful := [message for message in batch if message.id not in confirmed | refused.keys()]:
            with suppress(TransportUnavailable):  # as a relay does, where a slow machine left some in doubt
                published = await transport.publish(doubtful)
                confirmed |= published.confirmed
                refused |= published.refused
    assert confirmed == {large.id, *(message.id for message in good)}
    assert set(refused) == {rerouting.id, *(message.id for message in too_large)}
    assert all(refusal.permanent for refusal in refused.values())
    assert not any(other.refused for other in others)  # what was in flight beside it has done nothing
    assert (await transport.publish(again)).confirmed == {message.id for message in again}
    deliveries = transport.consume(listener, 100)
    found: set[str] = set()
    while not found >= confirmed:
        delivery = await asyncio.wait_for(anext(deliveries), PATIENCE)
        found.add(delivery.attempt.message.id)
        delivery.settle(Done())
        assert delivery.attempt.message.id != large.id or delivery.attempt.message.body == large.body
    await deliveries.aclose()
    await transport.close()


@on_sqlite_and_from_the_log
async def test_a_message_that_no_queue_is_bound_to_is_kept_until_one_is(
    make_shop: MakeOutbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    outbox = make_shop(observers=[recorder], relay_retry_delays=[0.1] * 1000)
    async with outbox.running(relay=True):
        await emit(outbox, "early")
        [refused, *_] = await recorder.wait_for(Relayed)
        assert "no queue is bound" in getattr(refused.outcome, "error", "")
        async with make_shop().running(listeners=[listener]):
            assert await arrival(arrivals) == "early"


async def test_a_worker_without_a_database_takes_what_others_publish(
    broker: RabbitMQ, table_name: str, arrivals: Arrivals
) -> None:
    async def on_anything(body: Any, message: Any) -> None:
        arrivals.put_nowait((body, message))

    listener = Listener("#", on_anything, queue=f"{table_name}.anything")
    outbox = Outbox(rabbitmq_url=broker.url, exchange_name=table_name)
    async with outbox.running(listeners=[listener]), await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        exchange = await channel.get_exchange(table_name)
        foreign = aio_pika.Message(b"no JSON", headers={"n": 1, "list": [1, {"a": None}]}, content_type="text/odd")
        await exchange.publish(foreign, "some.key")
        body, message = await arrival(arrivals)
        assert body == b"no JSON"
        assert isinstance(message, aio_pika.IncomingMessage)
        assert (message.routing_key, message.content_type, message.headers["n"]) == ("some.key", "text/odd", 1)


async def test_a_header_of_ours_that_is_not_what_it_should_be_makes_a_dead_letter(
    broker: RabbitMQ, table_name: str, arrivals: Arrivals
) -> None:
    async def on_anything(body: Any) -> None:
        arrivals.put_nowait(body)

    queue = f"{table_name}.anything"
    outbox = Outbox(rabbitmq_url=broker.url, exchange_name=table_name)
    async with (
        outbox.running(listeners=[Listener("#", on_anything, queue=queue)]),
        await aio_pika.connect(broker.url) as connection,
    ):
        channel = await connection.channel()
        exchange = await channel.get_exchange(table_name)
        odd = aio_pika.Message(b"1", headers={"outbox-attempt": "many", "kept": "yes"})
        await channel.default_exchange.publish(odd, queue)
        await exchange.publish(aio_pika.Message(b"2"), "a")
        assert await arrival(arrivals) == 2
        dead = await channel.get_queue(f"{queue}.dlq")
        letter: Any = await eventually(lambda: dead.get(fail=False, no_ack=True))
        assert (letter.body, letter.headers["kept"]) == (b"1", "yes")
        assert letter.headers["outbox-reason"] == "undecodable"
        assert "outbox-attempt" in letter.headers["outbox-error"]


async def test_a_retry_that_fits_into_no_frame_is_not_published_and_costs_no_connection(
    broker: RabbitMQ, table_name: str, arrivals: Arrivals, recorder: Recorder
) -> None:
    async def fails_first(body: Any, attempt_count: int) -> None:
        arrivals.put_nowait((body, attempt_count))
        if attempt_count == 1:
            raise ConnectionError

    queue = f"{table_name}.retried"
    outbox = Outbox(rabbitmq_url=broker.url, exchange_name=table_name, observers=[recorder])
    large: Any = {f"h{number:03}": "v" * 990 for number in range(130)} | {"rest": "v" * 950}
    async with (
        outbox.running(listeners=[Listener("#", fails_first, queue=queue, retry_delays=(0.05,))]),
        await aio_pika.connect(broker.url) as connection,
    ):
        exchange = await (await connection.channel()).get_exchange(table_name)
        for number in range(6):
            await exchange.publish(aio_pika.Message(b"%d" % number, headers=None if number else large), "a")
        letters: Any = await eventually(lambda: outbox.dead_letters.list(queue=queue))
        came = [await arrival(arrivals) for _ in range(11)]
    ends = [(event.attempt.message.body, event.outcome) for event in recorder.of(Handled)]
    assert [(body, end.reason) for body, end in ends if isinstance(end, Dead)] == [(b"0", Reason.UNDECODABLE)]
    assert [(letter.message.body, letter.reason) for letter in letters] == [(b"0", Reason.UNDECODABLE)]
    assert sorted(came) == [(0, 1), *((number, attempt) for number in range(1, 6) for attempt in (1, 2))]
    assert arrivals.empty()
    assert recorder.of(Troubled) == []


async def test_a_worker_ends_when_the_connection_it_was_given_closes_for_good(
    broker: RabbitMQ, table_name: str, listener: Listener, recorder: Recorder
) -> None:
    connection = await aio_pika.connect(broker.url)
    names: dict[str, Any] = {"exchange_name": table_name, "queue_prefix": f"{table_name}."}
    outbox = Outbox(rmq_connection=connection, observers=[recorder], **names)
    working = asyncio.create_task(outbox.worker([listener]))
    await recorder.wait_for(Started)
    await connection.close()
    with pytest.raises(TransportClosed):
        await asyncio.wait_for(working, PATIENCE)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("part", ["relay", "worker"])
async def test_a_block_is_told_when_what_runs_beside_it_has_ended_for_good(
    part: str,
    broker: RabbitMQ,
    table_name: str,
    database_url: str,
    listener: Listener,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = await aio_pika.connect(broker.url)
    names: dict[str, Any] = {"exchange_name": table_name, "queue_prefix": f"{table_name}."}
    observers: list[Observer] = [recorder, LoggingObserver()]
    outbox = Outbox(db_engine_url=database_url, rmq_connection=connection, observers=observers, grace=5, **names)
    with pytest.raises(TransportClosed):
        async with asyncio.timeout(PATIENCE), outbox.running(relay=True, listeners=[listener] * (part == "worker")):
            await connection.close()
            if part == "relay":  # which notices when there is something to send
                async with outbox.transaction() as session:
                    await outbox.emit(session, "order.created", 1)
            await asyncio.Event().wait()  # as an application does that serves requests
    assert [event.what for event in recorder.of(Failed)] == [part]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors[-1].startswith(f"{part} ended by itself and is not started again: TransportClosed: ")
    await outbox.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"password": "canary"}, ConfigurationError),
        ({"path": "/no-such-host"}, ConfigurationError),
        ({"port": 1}, TransportUnavailable),
        ({"scheme": "amqps"}, TransportUnavailable),
    ],
    ids=["password", "virtual host", "port", "no TLS there"],
)
async def test_no_error_and_no_log_shows_the_password(
    broker: RabbitMQ, change: dict[str, Any], error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    parts = {"user": "guest", "password": "canary", "host": "127.0.0.1", "port": URL(broker.url).port, "path": "/"}
    if "password" not in change:
        await asyncio.to_thread(broker.control, "change_password", "guest", "canary")
    try:
        recorder = Recorder()
        url = URL.build(**{"scheme": "amqp", **parts, **change})
        outbox = Outbox(rabbitmq_url=str(url), observers=[recorder, LoggingObserver()])
        with pytest.raises(error) as raised:
            await outbox.transport.open()
            await outbox.transport.publish([Message(routing_key="a", body=b"")])
        await outbox.transport.close()
    finally:
        await asyncio.to_thread(broker.control, "change_password", "guest", "guest")
    shown = "".join(traceback.format_exception(raised.value)) + caplog.text + repr(recorder.events)
    assert "canary" not in shown


CRASHING = """
import asyncio, os, sys
from outbox import Listener, Outbox

async def on_order(order):
    print(order, flush=True)
    if order == "poison":
        os._exit(1)

outbox = Outbox(rabbitmq_url=sys.argv[1], exchange_name=sys.argv[2])
asyncio.run(outbox.worker([Listener("#", on_order, queue=sys.argv[2] + ".orders", concurrency=1)]))
"""


async def test_a_message_that_kills_its_workers_is_dead_and_takes_no_other_with_it(
    broker: RabbitMQ, table_name: str
) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange(table_name, "topic", durable=True)
        outbox = Outbox(rabbitmq_url=broker.url, exchange_name=table_name)
        await outbox.transport.open()
        await outbox.transport.declare([Listener("#", print, queue=f"{table_name}.orders")])
        await outbox.transport.close()
        for order in ("poison", *range(20)):
            body = f'"{order}"'.encode()
            await exchange.publish(aio_pika.Message(body, message_id=str(order)), "order.created")
        dead = await channel.get_queue(f"{table_name}.orders.dlq")
        handled: list[str] = []
        letters: list[Any] = []
        while not letters or len(set(handled)) < 21:
            await _one_life(broker.url, table_name, handled, letters, dead)
    [letter] = letters
    assert (letter.body, letter.headers["outbox-reason"]) == (b'"poison"', "crashed")
    assert handled.count("poison") == 3
    assert set(handled) == {"poison", *map(str, range(20))}


async def _one_life(
    url: str, name: str, handled: list[str], letters: list[Any], dead: aio_pika.abc.AbstractQueue
) -> None:
    """A worker until it dies, or until nothing is left to do for it."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASHING, url, name, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert worker.stdout is not None
    reading = asyncio.ensure_future(_read(worker.stdout, handled))
    try:
        async with asyncio.timeout(PATIENCE):
            while not reading.done():
                letter = await dead.get(fail=False, no_ack=True)
                if letter is not None:
                    letters.append(letter)
                    assert len(letters) == 1, (letter.body, letter.headers)
                if letters and len(set(handled)) == 21:
                    return
                await asyncio.sleep(0.05)
    finally:
        if worker.returncode is None:
            worker.terminate()
        await worker.wait()
        await reading


async def _read(output: asyncio.StreamReader, handled: list[str]) -> None:
    while line := await output.readline():
        handled.append(line.decode().strip())


@pytest.mark.parametrize("by_hand", [True, False], ids=["by_hand", "plain"])
async def test_what_was_handled_right_before_a_worker_closes_is_handled_by_nobody_else(
    broker: RabbitMQ, table_name: str, by_hand: bool
) -> None:
    listener = Listener("#", print, queue=f"{table_name}.all", concurrency=SINGLY * 2)
    names = Defaults(settings={"exchange_name": table_name})
    transports = [RabbitmqTransport(broker.url, names, by_hand=by_hand) for _ in range(2)]
    first, second = transports
    for transport in transports:
        await transport.open()
        await transport.declare([listener])
    batch = [Message(routing_key="a", body=b"") for _ in range(SINGLY + 2)]
    assert len((await first.publish(batch[:-1])).confirmed) == SINGLY + 1
    deliveries = first.consume(listener, SINGLY * 2)
    taken = [await asyncio.wait_for(anext(deliveries), PATIENCE) for _ in batch[:-1]]
    await deliveries.aclose()
    await second.publish(batch[-1:])
    # While the one before them is open, no acknowledgement can speak of several.
    landings = [delivery.settle(Done()) for delivery in taken[1:]]
    await first.close()
    assert all([await landing for landing in landings])
    left = second.consume(listener, SINGLY * 2)
    found = [await asyncio.wait_for(anext(left), PATIENCE) for _ in range(2)]
    assert {delivery.attempt.message.id for delivery in found} == {batch[0].id, batch[-1].id}
    assert all(delivery.envelope.returned <= 1 for delivery in found)
    last = Message(routing_key="a", body=b"")
    await second.publish([last])
    assert (await asyncio.wait_for(anext(left), PATIENCE)).attempt.message.id == last.id
    await left.aclose()
    await second.close()


@pytest.mark.parametrize("by_hand", [True, False], ids=["by_hand", "plain"])
async def test_workers_that_come_and_go_make_nobody_a_suspect(broker: RabbitMQ, table_name: str, by_hand: bool) -> None:
    """A message that was given back, or that was on its way to a worker that left, has killed nobody."""
    listener = Listener("#", print, queue=f"{table_name}.all", max_crashes=2)  # one return makes a suspect
    transport = RabbitmqTransport(broker.url, Defaults(settings={"exchange_name": table_name}), by_hand=by_hand)
    await transport.open()
    await transport.declare([listener])
    batch = [Message(routing_key="a", body=b"") for _ in range(SINGLY * 4)]
    assert len((await transport.publish(batch)).confirmed) == len(batch)
    left = {message.id for message in batch}
    for life in range(8):
        deliveries = transport.consume(listener, SINGLY * 4)
        for _ in range(60 * life if life < 7 else len(left)):  # from a few at a time to many
            delivery = await asyncio.wait_for(anext(deliveries), PATIENCE)
            assert delivery.attempt.crash_count == 0
            left.remove(delivery.attempt.message.id)
            delivery.settle(Done())
        await deliveries.aclose()
    assert not left
    await transport.close()
