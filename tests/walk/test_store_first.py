"""Deliveries of a broker that are stored in the database first, and handled from there."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import ConfigurationError, Listener, Message, Outbox, Reject, listen
from outbox.core.attempt import Done, Outcome, Reason, Released
from outbox.core.events import Handled, LeaseWasLost, Received, Troubled
from outbox.core.settlement import Settlement
from outbox.core.store import Receipt
from outbox.core.transport import Delivery, Features
from outbox.shutdown import Shutdown
from outbox.testing.draining import drain
from outbox.transports.memory import MemoryDelivery, MemoryTransport
from tests.support.commands import Command
from tests.support.observing import Recorder, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox

Arrivals = asyncio.Queue[Any]

UNSTORABLE = "lone surrogate: \ud800"


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
def outbox(make_outbox: MakeOutbox, transport: MemoryTransport, recorder: Recorder) -> Outbox:
    return make_outbox(transport=transport, observers=[recorder], batch_size=50, grace=10)


@pytest.fixture
def arrivals() -> Arrivals:
    return asyncio.Queue()


@pytest.fixture
def listener(arrivals: Arrivals) -> Listener:
    async def on_order(order: Any) -> None:
        arrivals.put_nowait(order)

    return Listener("order.*", on_order, queue="orders", store_first=True)


def order(number: int = 1, routing_key: str = "order.created", **fields: Any) -> Message:
    return Message(routing_key=routing_key, body=b"%d" % number, **fields)


async def entries(outbox: Outbox) -> int:
    async with outbox.transaction() as session:
        return int((await session.execute(select(func.count()).select_from(outbox.tables.inbox))).scalar_one())


async def nothing_is_left(outbox: Outbox, transport: MemoryTransport) -> None:
    async def nothing() -> bool:
        return not transport.waiting() and not await outbox.messages()

    await eventually(nothing)


async def test_a_message_walks_from_emit_over_the_broker_and_the_database_to_its_listener(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    async with outbox.running(relay=True, listeners=[listener]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", range(120))
        assert {await arrival(arrivals) for _ in range(120)} == set(range(120))
        await nothing_is_left(outbox, transport)
    assert len(transport.published) == 120, "what is stored first is not relayed again"
    assert await entries(outbox) == 120
    assert sum(event.stored for event in recorder.of(Received)) == 120
    assert arrivals.empty()


async def test_deliveries_that_come_together_are_stored_together(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    await transport.declare([listener])
    await transport.publish([order(number) for number in range(120)])
    async with outbox.running(listeners=[listener]):
        assert {await arrival(arrivals) for _ in range(120)} == set(range(120))
    assert [event.stored for event in recorder.of(Received)] == [50, 50, 20], "batch_size bounds a transaction"


async def test_a_worker_stores_first_for_all_its_listeners(
    outbox: Outbox, transport: MemoryTransport, arrivals: Arrivals, recorder: Recorder
) -> None:
    listeners = [Listener("order.*", arrivals.put_nowait, queue=queue) for queue in ("a", "b")]
    async with outbox.running(listeners=listeners, store_first=True):
        await transport.publish([order(7)])
        assert [await arrival(arrivals), await arrival(arrivals)] == [7, 7]
    assert {event.queue for event in recorder.of(Received)} == {"a", "b"}


async def test_listeners_with_and_without_it_work_side_by_side(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    direct = Listener("order.*", lambda order: arrivals.put_nowait(-order), queue="direct")
    async with outbox.running(listeners=[listener, direct]):
        await transport.publish([order(7)])
        assert {await arrival(arrivals), await arrival(arrivals)} == {7, -7}
    assert [event.queue for event in recorder.of(Received)] == ["orders"]


async def test_a_copy_is_not_stored_again_even_where_the_listener_has_no_session(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    async with outbox.running(listeners=[listener]):
        first = order(1)
        await transport.publish([first])
        assert await arrival(arrivals) == 1
        await transport.publish([first, first, order(2)])
        assert await arrival(arrivals) == 2
        await nothing_is_left(outbox, transport)
    assert arrivals.empty()
    assert sum(event.duplicates for event in recorder.of(Received)) == 2


async def test_effects_in_the_session_commit_with_the_end_of_the_stored_delivery(
    outbox: Outbox, transport: MemoryTransport, recorder: Recorder, table_name: str
) -> None:
    effects = Table(f"{table_name}_effects", MetaData(), Column("number", Integer))
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(effects.metadata.create_all)

    @listen("order.*", queue="ledger", store_first=True, retry_delays=(0, 0))
    async def ledger(number: int, session: AsyncSession, attempt_count: int) -> None:
        await session.execute(insert(effects).values(number=number))
        if attempt_count < 3:
            raise ConnectionError("the bank is away")

    async with outbox.running(listeners=[ledger]):
        sent = order(5)
        await transport.publish([sent, sent])
        await recorder.wait_for(Handled, 3)
        await nothing_is_left(outbox, transport)
    async with outbox.transaction() as session:
        assert (await session.execute(select(effects.c.number))).scalars().all() == [5]


async def test_a_retry_waits_in_the_database_and_not_at_the_broker(
    outbox: Outbox, transport: MemoryTransport, recorder: Recorder
) -> None:
    @listen("order.*", queue="orders", store_first=True, retry_delays=(3600,))
    async def failing(number: int) -> None:
        raise ConnectionError("the bank is away")

    async with outbox.running(listeners=[failing]):
        await transport.publish([order(1)])
        await recorder.wait_for(Handled)
        [stored] = await outbox.messages(state="retrying", queue="orders")
    assert (stored.attempt_count, transport.waiting()) == (1, 0)
    assert "the bank is away" in stored.history
    [queue] = (await outbox.backlog()).queues
    assert (queue.queue, queue.binding_keys, queue.retrying) == ("orders", ("order.*",), 1)


async def test_a_dead_letter_lies_in_the_database_and_is_replayed_from_there(
    outbox: Outbox, transport: MemoryTransport, recorder: Recorder, arrivals: Arrivals
) -> None:
    is_wrong = True

    @listen("order.*", queue="orders", store_first=True)
    async def picky(number: int) -> None:
        if is_wrong:
            raise Reject("wrong")
        arrivals.put_nowait(number)

    async with outbox.running(listeners=[picky]):
        await transport.publish([order(1)])
        await recorder.wait_for(Handled)
        [letter] = await outbox.dead_letters.list(queue="orders")
        assert (letter.reason, letter.attempt_count) == (Reason.REJECTED, 1)
        assert await transport.dead_letters.list() == []
        is_wrong = False
        assert await outbox.dead_letters.replay([letter.id]) == 1
        assert await arrival(arrivals) == 1
    assert await outbox.dead_letters.list() == []


async def test_a_message_that_cannot_be_stored_is_a_dead_letter_of_the_broker_and_blocks_no_other(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    await transport.declare([listener])
    bad = order(3, f"order.{UNSTORABLE}")
    await transport.publish([order(1), order(2), bad, order(4)])
    async with outbox.running(listeners=[listener]):
        assert {await arrival(arrivals) for _ in range(3)} == {1, 2, 4}
        [letter] = await eventually(lambda: transport.dead_letters.list())
    assert (letter.message, letter.queue, letter.reason) == (bad, "orders", Reason.REFUSED)
    assert "the database cannot hold it" in letter.error
    assert await entries(outbox) == 3


async def test_a_message_that_is_older_than_the_inbox_is_not_stored_until_it_is_replayed(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    await transport.declare([listener])
    old = order(1, created_at=datetime.now(UTC) - timedelta(days=31))
    await transport.publish([old, order(2)])
    async with outbox.running(listeners=[listener]):
        assert await arrival(arrivals) == 2
        [letter] = await eventually(lambda: transport.dead_letters.list())
        assert (letter.message, letter.queue, letter.reason) == (old, "orders", Reason.EXPIRED)
        assert "inbox_retention=30d" in letter.error
        assert await entries(outbox) == 1
        assert await transport.dead_letters.replay([letter.id]) == 1
        assert await arrival(arrivals) == 1
    assert await entries(outbox) == 2


async def test_a_listener_with_lists_has_them_from_the_database(
    outbox: Outbox, transport: MemoryTransport, arrivals: Arrivals, recorder: Recorder
) -> None:
    @listen("order.*", queue="orders", store_first=True, batch=10)
    async def many(numbers: list[int]) -> None:
        for number in numbers:
            arrivals.put_nowait(number)

    await transport.declare([many])
    await transport.publish([order(number) for number in range(5)])
    async with outbox.running(listeners=[many]):
        assert {await arrival(arrivals) for _ in range(5)} == set(range(5))
        await nothing_is_left(outbox, transport)
    assert sum(event.stored for event in recorder.of(Received)) == 5


async def test_a_listener_with_lanes_keeps_none_of_its_messages_from_being_stored(
    outbox: Outbox, transport: MemoryTransport, arrivals: Arrivals
) -> None:
    release = asyncio.Event()

    @listen("order.*", queue="orders", store_first=True, lane="one")
    async def slow(number: int) -> None:
        await release.wait()
        arrivals.put_nowait(number)

    await transport.declare([slow])
    await transport.publish([order(number) for number in range(5)])

    async def all_are_stored() -> bool:
        return await entries(outbox) == 5

    async with outbox.running(listeners=[slow]):
        await eventually(all_are_stored)
        release.set()
        assert {await arrival(arrivals) for _ in range(5)} == set(range(5))


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
@pytest.mark.parametrize(
    "bad",
    [
        order(0, "order.\x00"),
        order(0, tracking_ids=("\x00",)),
        order(0, tracking_ids=("x" * 256,)),
        order(0, "order." + "x" * 256),
        order(0, content_type="\x00"),
        order(0, key="\ud800"),
    ],
    ids=["NUL", "NUL in the id", "long id", "long routing key", "NUL in the content type", "surrogate in the key"],
)
async def test_whatever_postgresql_cannot_hold_fails_alone(outbox: Outbox, bad: Message) -> None:
    good = [order(number) for number in range(5)]
    receipt = await outbox.store.queues.receive("orders", [*good[:3], bad, *good[3:]])
    assert receipt.stored == {each.id for each in good}
    assert set(receipt.refused) == {bad.id}


async def test_a_commit_of_unknown_outcome_is_not_acknowledged_and_stored_again_without_harm(
    outbox: Outbox,
    transport: MemoryTransport,
    listener: Listener,
    arrivals: Arrivals,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive = outbox.store.queues.receive

    async def answer_is_lost(queue: str, messages: list[Message], **options: Any) -> Receipt:
        receipt = await receive(queue, messages, **options)
        if receipt.stored:
            raise ConnectionError("cut while COMMIT was under way")
        return receipt

    monkeypatch.setattr(outbox.store.queues, "receive", answer_is_lost)
    async with outbox.running(listeners=[listener]):
        await transport.publish([order(1)])
        assert await arrival(arrivals) == 1
        await recorder.wait_for(Received)
        await nothing_is_left(outbox, transport)
    [trouble] = recorder.of(Troubled)
    assert trouble.where == "storing for orders"
    assert [(event.stored, event.duplicates) for event in recorder.of(Received)] == [(0, 1)]
    assert arrivals.empty()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_redaction_that_fails_shows_nothing_and_stops_nothing(
    make_outbox: MakeOutbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals
) -> None:
    def fail(error: str) -> str:
        raise ValueError(error)

    outbox = make_outbox(transport=transport, log=False, redact_error=fail)
    async with outbox.running(listeners=[listener]):
        await transport.publish([order(1, f"order.{UNSTORABLE}"), order(2)])
        assert await arrival(arrivals) == 2
        [letter] = await eventually(lambda: transport.dead_letters.list())
    assert letter.error == "the database cannot hold it (why could not be had: ValueError)"


class Bare(MemoryTransport):
    """A broker that can deliver, take back, and nothing else."""

    name = "bare"
    features = Features(delays=False, keeps_dead_letters=False)

    def consume(self, listener: Listener, prefetch: int) -> Any:
        deliveries = super().consume(listener, prefetch)
        take = deliveries.take

        def bare() -> Any:
            delivery = take()
            return None if delivery is None else BareDelivery(delivery)

        deliveries.take = bare  # type: ignore[method-assign]
        return deliveries


class BareDelivery(Delivery):
    def __init__(self, delivery: MemoryDelivery) -> None:
        self._delivery = delivery
        self.attempt = delivery.attempt

    def settle(self, outcome: Outcome) -> Settlement:
        assert isinstance(outcome, Done | Released), "it knows nothing else"
        return self._delivery.settle(outcome)


async def test_a_broker_without_delays_and_dead_letters_gets_them(
    make_outbox: MakeOutbox, arrivals: Arrivals, recorder: Recorder
) -> None:
    @listen("order.*", queue="orders", store_first=True, retry_delays=(0.1, 0.1))
    async def failing(number: int, attempt_count: int) -> None:
        arrivals.put_nowait(attempt_count)
        raise ConnectionError("the bank is away")

    outbox = make_outbox(transport=Bare(), observers=[recorder])
    async with outbox.running(listeners=[failing]):
        await outbox.transport.publish([order(1)])
        assert [await arrival(arrivals) for _ in range(3)] == [1, 2, 3]
        await recorder.wait_for(Handled, 3)
        [letter] = await outbox.store.dead_letters.list(queue="orders")
    assert (letter.reason, letter.attempt_count, len(letter.history.splitlines())) == (Reason.EXHAUSTED, 3, 3)


async def test_what_is_not_stored_when_the_worker_stops_goes_back_to_the_broker(
    make_outbox: MakeOutbox, transport: MemoryTransport, listener: Listener, recorder: Recorder
) -> None:
    outbox = make_outbox(transport=transport, observers=[recorder], grace=0)
    await outbox.create_tables()
    await transport.declare([listener])
    await transport.publish([order(1), order(2)])
    outbox.store.queues.receive = _never  # type: ignore[assignment, method-assign]
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: len(recorder.of(Troubled)) > 2 or recorder.of(Received))
        assert transport.waiting() == 0, "they are in the worker's hands"
    assert transport.waiting() == 2
    assert await outbox.messages() == []


async def _never(*_: object) -> Receipt:
    raise ConnectionError("the database is away")


async def test_a_worker_that_lost_its_lease_on_a_stored_delivery_is_fenced(
    outbox: Outbox, transport: MemoryTransport, recorder: Recorder
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @listen("order.*", queue="orders", store_first=True)
    async def slow(number: int, attempt_count: int) -> None:
        started.set()
        await go_on.wait()

    async with outbox.running(listeners=[slow]):
        await transport.publish([order(1)])
        await asyncio.wait_for(started.wait(), 60)
        started.clear()
        await let_leases_run_out(outbox)
        await asyncio.wait_for(started.wait(), 60)
        go_on.set()
        [lost] = await recorder.wait_for(LeaseWasLost)
        [handled] = await recorder.wait_for(Handled)
    assert (lost.queue, handled.attempt.crash_count) == ("orders", 1)


async def test_where_the_database_is_the_transport_it_changes_nothing(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    outbox = make_outbox(observers=[recorder])
    async with outbox.running(listeners=[listener], store_first=True):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", 1)
        assert await arrival(arrivals) == 1
    assert recorder.of(Received) == []
    assert await entries(outbox) == 0


async def test_the_rest_of_a_queue_that_is_not_stored_first_any_more_is_served_as_leftovers(
    outbox: Outbox, make_outbox: MakeOutbox, transport: MemoryTransport, arrivals: Arrivals, recorder: Recorder
) -> None:
    @listen("order.*", queue="orders", retry_delays=(0,) * 1000)
    async def on_order(number: int) -> None:
        if not arrivals.empty():
            raise ConnectionError("not now")
        arrivals.put_nowait(number)

    arrivals.put_nowait("closed")
    async with outbox.running(listeners=[on_order], store_first=True):
        await transport.publish([order(1)])
        await recorder.wait_for(Handled)
    assert await arrival(arrivals) == "closed"
    database = make_outbox(log=False)
    async with outbox.running(listeners=[on_order]):
        await transport.publish([order(2)])
        assert await arrival(arrivals) == 2
        assert len(await outbox.messages(queue="orders")) == 1, "nobody looks there"
    shutdown = Shutdown()
    leftovers = asyncio.create_task(database.run(shutdown, listeners=[on_order], leftovers=True))
    assert await arrival(arrivals) == 1
    shutdown.begun.set()
    await leftovers


async def test_draining_stores_first_too(
    outbox: Outbox, transport: MemoryTransport, listener: Listener, arrivals: Arrivals
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", 1)
    drained = await drain(outbox, [listener])
    assert (drained.handled, drained.left, arrivals.get_nowait()) == (1, 0, 1)
    await transport.publish(transport.published)
    assert (await drain(outbox, [listener])).handled == 0
    assert await entries(outbox) == 1


async def test_storing_needs_a_database(listener: Listener) -> None:
    with pytest.raises(ConfigurationError, match="orders: store_first=True, but no database"):
        async with Outbox(transport="memory://").running(listeners=[listener]):
            pass


def test_it_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError, match="orders: store_first='yes', True or False"):
        listen("order.*", queue="orders", store_first="yes")(print)  # type: ignore[arg-type]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_command_has_it_as_an_option(command: Command) -> None:
    ran = await command.run("worker", "--help")
    assert "--store-first" in ran.stdout
