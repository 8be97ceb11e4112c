"""receive(): messages from anywhere, stored in a queue of the database once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

import outbox as library
from outbox import (
    BodyTooLarge,
    ConfigurationError,
    HeaderInvalid,
    Listener,
    Message,
    MessageError,
    MessageIdInvalid,
    Outbox,
    RoutingKeyInvalid,
    TimeInvalid,
    TransactionError,
)
from outbox.core.attempt import Reason
from outbox.core.binding import Binding
from outbox.core.events import Received
from tests.support.observing import Recorder, arrival
from tests.support.outboxes import MakeOutbox

Arrivals = asyncio.Queue[Any]


@pytest.fixture
def outbox(make_outbox: MakeOutbox, recorder: Recorder) -> Outbox:
    return make_outbox(observers=[recorder])


@pytest.fixture
def arrivals() -> Arrivals:
    return asyncio.Queue()


@pytest.fixture
def listener(arrivals: Arrivals) -> Listener:
    async def on_event(event: Any, message: Message) -> None:
        arrivals.put_nowait((event, message.id))

    return Listener("payment.*", on_event, queue="payments", store_first=True)


def payment(id: str = "evt_1", body: bytes = b"1", **fields: Any) -> Message:
    return Message(routing_key="payment.made", body=body, tracking_ids=(id,), **fields)


@pytest.mark.parametrize("transport", [None, "memory://"])
async def test_a_received_message_reaches_its_listener_once(
    transport: str | None, make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    outbox = make_outbox(transport=transport, observers=[recorder])
    async with outbox.running(relay=True, listeners=[listener]):
        assert await outbox.receive("payments", payment())
        assert await arrival(arrivals) == (1, "evt_1")
        assert not await outbox.receive("payments", payment())
        assert await outbox.receive("payments", payment("evt_2", b"2"))
        assert await arrival(arrivals) == (2, "evt_2")
    assert arrivals.empty()
    assert [(each.stored, each.duplicates) for each in recorder.of(Received)] == [(1, 0), (0, 1), (1, 0)]


async def test_of_many_that_receive_the_same_message_at_once_one_stores_it(
    make_outbox: MakeOutbox, outbox: Outbox
) -> None:
    await outbox.store.queues.bind([Binding("payments", "#")])
    receivers = [make_outbox() for _ in range(4)]
    answers = await asyncio.gather(*(each.receive("payments", payment()) for each in receivers))
    assert sorted(answers) == [False, False, False, True]
    assert len(await outbox.messages(queue="payments")) == 1


async def test_a_message_commits_and_rolls_back_with_the_session_it_is_received_in(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("payments", "#")])
    async with outbox.engines.session() as session:
        assert await outbox.receive(session, "payments", payment())
        assert not await outbox.receive(session, "payments", payment())
        await session.rollback()
    assert await outbox.messages() == []
    async with outbox.transaction() as session:
        assert await outbox.receive(session, "payments", payment())
    [stored] = await outbox.messages()
    assert (stored.message.id, stored.queue, stored.state) == ("evt_1", "payments", "queued")


async def test_a_message_that_no_listener_wants_is_a_dead_letter_that_says_so(
    outbox: Outbox, recorder: Recorder, listener: Listener, arrivals: Arrivals
) -> None:
    sent = payment(headers={"signature": "abc"}, key="customer-7")
    assert await outbox.receive("payments", sent)
    assert not await outbox.receive("payments", sent), "it is there: among the dead letters"
    [letter] = await outbox.dead_letters.list(queue="payments")
    assert (letter.message, letter.reason) == (sent, Reason.UNWANTED)
    assert "has the queue 'payments'" in letter.error
    assert recorder.of(Received)[0] == Received("payments", 0, unwanted=1)
    async with outbox.running(listeners=[listener]):
        await outbox.dead_letters.replay([letter.id])
        assert await arrival(arrivals) == (1, "evt_1")


async def test_a_message_that_is_older_than_the_inbox_is_a_dead_letter_until_it_is_replayed(
    outbox: Outbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    old = payment("evt_old", created_at=datetime.now(UTC) - timedelta(days=31))
    async with outbox.running(listeners=[listener]):
        assert await outbox.receive("payments", old)
        assert not await outbox.receive("payments", old)
        assert [each.expired for each in recorder.of(Received)] == [1, 0]
        [letter] = await outbox.dead_letters.list()
        assert (letter.queue, letter.reason, letter.message) == ("payments", Reason.EXPIRED, old)
        assert "inbox_retention=30d" in letter.error
        assert await outbox.dead_letters.replay([letter.id]) == 1
        assert await arrival(arrivals) == (1, "evt_old")


async def test_a_message_that_no_listener_wants_can_wait_for_one(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    assert await outbox.receive("payments", payment(), unwanted="wait")
    assert await outbox.dead_letters.list() == []
    async with outbox.running(listeners=[listener]):
        assert await arrival(arrivals) == (1, "evt_1")


async def test_a_listener_that_is_served_straight_from_the_broker_does_not_want_what_is_stored(
    make_outbox: MakeOutbox, listener: Listener
) -> None:
    outbox = make_outbox(transport="memory://")
    async with outbox.running(listeners=[replace(listener, store_first=False)]):
        await outbox.receive("payments", payment())
        [letter] = await outbox.dead_letters.list(queue="payments")
    assert letter.reason == Reason.UNWANTED


async def test_a_worker_that_is_stopped_still_wants_its_messages(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    outbox = make_outbox(transport="memory://")
    async with outbox.running(listeners=[listener]):
        pass
    assert await outbox.receive("payments", payment())
    assert len(await outbox.messages(queue="payments")) == 1
    async with outbox.running(listeners=[listener]):
        assert await arrival(arrivals) == (1, "evt_1")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (payment(""), MessageIdInvalid),
        (payment("x" * 256), MessageIdInvalid),
        (payment("a\x00b"), MessageIdInvalid),
        (payment("lone \ud800"), MessageIdInvalid),
        (replace(payment(), created_at=datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)), TimeInvalid),
        (replace(payment(), expires_at=datetime(9999, 1, 1, tzinfo=UTC)), TimeInvalid),
        (replace(payment(), created_at=datetime(2030, 1, 1)), TimeInvalid),  # noqa: DTZ001 - whose noon is it?
        (replace(payment(), tracking_ids=("bad\n", "good")), MessageIdInvalid),
        (replace(payment(), routing_key=""), RoutingKeyInvalid),
        (payment(body=bytes(2 * 1024 * 1024)), BodyTooLarge),
        (payment(headers={"a b": "c"}), HeaderInvalid),
        (payment(body="text"), MessageError),  # type: ignore[arg-type]
        ({"id": 1}, MessageError),
    ],
    ids=[
        *("no id", "long id", "NUL", "surrogate", "year 9999", "expires in 9999", "no time zone"),
        *("tracking id", "routing key", "body", "header", "str", "no message"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    outbox: Outbox, message: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await outbox.receive("payments", message)
    assert await outbox.dead_letters.list() == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("options", "text"),
    [({"queue": ""}, "queue must be a non-empty string"), ({"unwanted": "lose"}, "unwanted='lose': one of 'dead'")],
)
async def test_what_makes_no_sense_is_refused(outbox: Outbox, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        await outbox.receive(**{"queue": "payments", "message": payment(), **options})


async def test_a_connection_without_a_transaction_is_refused(outbox: Outbox, database_url: str) -> None:
    await outbox.create_tables()
    engine = create_async_engine(database_url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        with pytest.raises(TransactionError, match="receive on a connection in AUTOCOMMIT"):
            await outbox.receive(connection, "payments", payment())
        assert (await connection.execute(text(f"SELECT count(*) FROM {outbox.tables.inbox.name}"))).scalar() == 0
    await engine.dispose()


def test_the_module_has_it_too() -> None:
    assert library.receive == library.outbox.receive
    assert library.receive_sync == library.outbox.receive_sync
