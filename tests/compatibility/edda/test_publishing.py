""" "Quick Start", the two phases of "How It Works", "With Pydantic Models", "Use Cases", "Use CloudEvents
Standard", "Handle Idempotency" and the complete examples.

The rulings: `EddaApp` is an outbox with a URL as its transport, `event_type` the routing key, `event_source` the
source, `event_data` the body. Events are sent side by side, so they have no order. The host's workflows are left out: a
step is a transactional function.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event, from_structured_event
from pydantic import BaseModel
from sqlalchemy import make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox
from outbox.core.attempt import Done
from outbox.core.events import CircuitOpened, Emitted, Relayed
from outbox.observers.logging import LoggingObserver
from outbox.transports.http import HttpTransport
from tests.compatibility.edda.orders import ORDER_CREATED, is_settled, send, states, walk
from tests.support.databases import on_every_store
from tests.support.http_sink import Behaviour, Connection, HttpSink, Request, answer, by_type, close, status
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.program import program
from tests.support.sending import Sender, serving

pytestmark = on_every_store


@pytest.fixture
def service(make_http_outbox: MakeOutbox) -> Outbox:
    """The project's order service."""
    return make_http_outbox()


def data(sink: HttpSink) -> dict[str, Any]:
    """The data of what came, by its type."""
    return {request.json["type"]: request.json["data"] for request in sink.requests}


# Quick start


async def test_an_event_of_an_activity_is_posted_to_the_brokers_url(service: Outbox, sink: HttpSink) -> None:
    @service.transactional
    async def create_order(order_id: str, amount: float, session: AsyncSession) -> dict[str, str]:
        created = {"order_id": order_id, "amount": amount, "status": "pending"}
        await service.emit(session, ORDER_CREATED, created, source="order-service")
        return {"order_id": order_id, "status": "created"}

    async with service.running(relay=True):
        assert await create_order("ORD-1", 99.99) == {"order_id": "ORD-1", "status": "created"}
        [request] = await sink.until(1)
        await eventually(lambda: is_settled(service))
    assert (request.method, request.path) == ("POST", "/events")
    assert (request.json["type"], request.json["source"]) == (ORDER_CREATED, "order-service")
    assert request.json["data"] == {"order_id": "ORD-1", "amount": 99.99, "status": "pending"}
    assert len(sink.requests) == 1


async def test_the_url_of_the_database_needs_no_driver(
    make_http_outbox: MakeOutbox, sink: HttpSink, database_url: str
) -> None:
    """The project writes `sqlite:///orders.db`."""
    url = make_url(database_url)
    plain = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False)
    service = make_http_outbox(db_engine_url=plain)
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    assert sink.ids == [sent.id]


async def test_without_a_relay_events_wait_until_there_is_one(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    """`outbox_enabled` says whether this process has one; events are written in any case."""
    producer = make_http_outbox()
    sent = [await send(producer) for _ in range(3)]
    assert await states(producer, *sent) == ["waiting"] * 3
    assert sink.connections == 0
    async with make_http_outbox().running(relay=True):
        await eventually(lambda: is_settled(producer))
    assert sorted(sink.ids) == sorted(message.id for message in sent)


# The dual-write problem


async def test_an_order_that_is_saved_while_the_broker_is_down_is_told_when_it_is_back(
    service: Outbox, sink: HttpSink, recorder: Recorder
) -> None:
    await sink.stop()
    async with service.running(relay=True):
        sent = await send(service)
        await recorder.wait_for(CircuitOpened)
        assert await states(service, sent) == ["waiting"]
        await sink.start()
        await eventually(lambda: is_settled(service))
    assert sink.ids == [sent.id]
    assert await states(service, sent) == ["sent"]


# Phase 1: write


async def test_an_event_is_stored_in_the_transaction_and_nobody_waits_for_the_broker(
    service: Outbox, sink: HttpSink, recorder: Recorder
) -> None:
    await service.create_tables()
    async with service.running(relay=True):
        async with service.transaction() as session:
            message = await service.emit(session, ORDER_CREATED, {"order_id": "ORD-1"})
            stored = await session.scalars(select(service.tables.messages.c.message_id))
            assert message is not None
            assert stored.all() == [message.id]
            assert sink.requests == []
        await sink.until(1)
    [emitted] = recorder.of(Emitted)
    assert list(emitted.messages) == [message]


async def test_of_a_transaction_that_fails_nothing_is_stored_or_posted(service: Outbox, sink: HttpSink) -> None:
    async with service.running(relay=True):
        with pytest.raises(ConnectionError):
            async with service.transaction() as session:
                failed = await service.emit(session, ORDER_CREATED, {"order_id": "ORD-1"})
                raise ConnectionError
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    assert failed is not None
    assert await service.find(failed.id) == []
    assert sink.ids == [sent.id]


# Phase 2: publish


async def test_a_success_marks_the_event_as_published(service: Outbox, sink: HttpSink) -> None:
    codes = (200, 201, 202, 204, 299)
    sink.behave(by_type({f"answered.{code}": status(code) for code in codes}))
    async with service.running(relay=True):
        sent = [await send(service, f"answered.{code}") for code in codes]
        await eventually(lambda: is_settled(service))
    for message in sent:
        found = await walk(service, message)
        assert (found.state, found.attempt_count, found.error) == ("sent", 1, None)
        assert found.done_at is not None
    assert len(sink.requests) == len(codes)


async def test_an_event_whose_answer_was_lost_is_sent_again_with_the_same_id(service: Outbox, sink: HttpSink) -> None:
    """At least once."""
    sink.behave(close(), times=2)
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    assert len(sink.requests) > 1
    assert set(sink.ids) == {sent.id}
    assert len({request.body for request in sink.requests}) == 1


async def test_two_relays_send_each_event_once(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    first, second = make_http_outbox(batch_size=5), make_http_outbox(batch_size=5)
    async with first.transaction() as session:
        sent = await first.emit_many(session, ORDER_CREATED, range(60))
    async with first.running(relay=True), second.running(relay=True):
        await eventually(lambda: is_settled(first))
    assert sorted(sink.ids) == sorted(message.id for message in sent)


async def test_what_the_relay_does_is_logged_without_the_data(
    make_http_outbox: MakeOutbox, sink: HttpSink, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_http_outbox(observers=[LoggingObserver()])
    caplog.set_level(logging.INFO, "outbox")
    async with service.running(relay=True):
        sent = await send(service, "inventory.reserved", {"card": "4111-1111"})
        await eventually(lambda: is_settled(service))
    said = [record.getMessage() for record in caplog.records]
    assert f"emitted inventory.reserved {sent.id}" in said
    assert f"sent inventory.reserved {sent.id}" in said
    assert "4111-1111" not in caplog.text


async def test_what_happens_to_an_event_can_be_followed(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    """The project's lifecycle hooks: an observer is told of what was written, sent, and failed."""
    service = make_http_outbox()
    sink.behave(status(503), times=1)
    async with service.running(relay=True):
        sent = await send(service)
        failed, done = await recorder.wait_for(Relayed, 2)
    assert [event.attempt.message.id for event in (failed, done)] == [sent.id] * 2
    assert "503" in getattr(failed.outcome, "error", "")
    assert isinstance(done.outcome, Done)


# With Pydantic models


class Item(BaseModel):
    name: str
    count: int = 1


class OrderCreated(BaseModel):
    order_id: str
    customer_id: str
    amount: float
    items: list[Item]
    at: datetime


async def test_a_pydantic_model_is_posted_as_json(service: Outbox, sink: HttpSink) -> None:
    items = [Item(name="item1"), Item(name="Käse", count=2)]
    event = OrderCreated(
        order_id="ORD-123", customer_id="CUST-456", amount=99.99, items=items, at=datetime(2026, 1, 31, tzinfo=UTC)
    )
    async with service.running(relay=True):
        await send(service, body=event)
        [request] = await sink.until(1)
    assert request.json["datacontenttype"] == "application/json"
    assert OrderCreated.model_validate(request.json["data"]) == event


# Use CloudEvents standard


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_the_cloudevents_sdk_reads_what_is_posted(
    make_http_outbox: MakeOutbox, sink: HttpSink, mode: Any
) -> None:
    service = make_http_outbox(transport=HttpTransport(f"{sink.url}/events", mode=mode))
    async with service.running(relay=True):
        sent = await send(
            service, body={"order_id": "ORD-1", "name": "Zoë"}, key="customer 7", source="/orders/%C3%A4%25"
        )
        [request] = await sink.until(1)
    read = from_structured_event if mode == "structured" else from_binary_event
    event = read(HTTPMessage(headers=dict(request.headers), body=request.body))
    assert (event.get_specversion(), event.get_id(), event.get_type()) == ("1.0", sent.id, ORDER_CREATED)
    assert (event.get_source(), event.get_subject()) == ("/orders/%C3%A4%25", "customer 7")
    assert (event.get_time(), event.get_datacontenttype()) == (sent.created_at, "application/json")
    assert event.get_data() == {"order_id": "ORD-1", "name": "Zoë"}


async def test_events_are_structured_by_default(service: Outbox, sink: HttpSink) -> None:
    async with service.running(relay=True):
        sent = await send(service)
        [request] = await sink.until(1)
    assert request.headers["content-type"].startswith("application/cloudevents+json")
    assert set(request.json) == {"specversion", "id", "source", "type", "time", "datacontenttype", "data"}
    assert request.json["time"] == sent.created_at.isoformat().replace("+00:00", "Z")


async def test_data_is_json_unless_its_content_type_says_otherwise(service: Outbox, sink: HttpSink) -> None:
    async with service.running(relay=True):
        await send(service, "an.object", {"a": [1, None, "ü"]})
        await send(service, "a.text", "text")
        await send(service, "some.bytes", b"\xff\x00")
        await send(service, "some.xml", b"<a/>", content_type="application/xml")
        await send(service, "some.json", b'{"a":1}', content_type="application/json")
        await eventually(lambda: is_settled(service))
    arrived = {
        event["type"]: (event["datacontenttype"], event.get("data"), event.get("data_base64"))
        for event in (request.json for request in sink.requests)
    }
    assert arrived == {
        "an.object": ("application/json", {"a": [1, None, "ü"]}, None),
        "a.text": ("application/json", "text", None),
        "some.bytes": ("application/octet-stream", None, "/wA="),
        "some.xml": ("application/xml", None, "PGEvPg=="),
        "some.json": ("application/json", {"a": 1}, None),
    }


async def test_data_may_be_larger_than_any_column_of_fixed_length(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox(max_body_size=4 * 1024 * 1024)
    body = {"text": "ä" * 1_500_000}
    async with service.running(relay=True):
        await send(service, body=body)
        [request] = await sink.until(1)
    assert request.json["data"] == body


async def test_each_event_may_have_a_source_of_its_own(service: Outbox, sink: HttpSink) -> None:
    async with service.running(relay=True):
        await send(service, ORDER_CREATED)
        await send(service, "payment.processed", source="payment-service")
        await sink.until(2)
    sources = {request.json["type"]: request.json["source"] for request in sink.requests}
    assert sources == {ORDER_CREATED: "order-service", "payment.processed": "payment-service"}


# Use cases


async def test_each_step_of_an_order_sends_its_event(service: Outbox, sink: HttpSink) -> None:
    """Use case 1, and what the project's example is expected to publish."""

    @service.transactional
    async def step(event_type: str, session: AsyncSession) -> None:
        await service.emit(session, event_type, {"order_id": "ORD-12345"})

    async def process_order() -> None:
        for event_type in ("inventory.reserved", "payment.charged", "order.shipped"):
            await step(event_type)
        async with service.transaction() as session:
            await service.emit(session, "order.completed", {"order_id": "ORD-12345", "status": "completed"})

    async with service.running(relay=True):
        await process_order()
        await eventually(lambda: is_settled(service))
    assert len(sink.requests) == 4
    assert {request.json["source"] for request in sink.requests} == {"order-service"}
    assert data(sink) == {
        "inventory.reserved": {"order_id": "ORD-12345"},
        "payment.charged": {"order_id": "ORD-12345"},
        "order.shipped": {"order_id": "ORD-12345"},
        "order.completed": {"order_id": "ORD-12345", "status": "completed"},
    }


async def test_a_step_that_fails_is_compensated_with_an_event_of_its_own(service: Outbox, sink: HttpSink) -> None:
    """Use cases 2 and 3: the hotel is reserved, the car is not, so the hotel is cancelled."""

    @service.transactional
    async def reserve_hotel(booking_id: str, session: AsyncSession) -> str:
        reserved = {"reservation_id": f"HOTEL-{booking_id}"}
        await service.emit(session, "hotel.reserved", reserved, source="booking-service")
        return reserved["reservation_id"]

    @service.transactional
    async def reserve_car(booking_id: str, session: AsyncSession) -> None:
        await service.emit(session, "car.reserved", {"reservation_id": f"CAR-{booking_id}"}, source="booking-service")
        raise ConnectionError("no cars")

    @service.transactional
    async def cancel_reservation(reservation_id: str, session: AsyncSession) -> None:
        cancelled = {"reservation_id": reservation_id, "reason": "booking_failed"}
        await service.emit(session, "hotel.cancelled", cancelled, source="booking-service")

    async with service.running(relay=True):
        reservation_id = await reserve_hotel("7")
        try:
            await reserve_car("7")
        except ConnectionError:
            await cancel_reservation(reservation_id)
        await eventually(lambda: is_settled(service))
    assert len(sink.requests) == 2
    assert data(sink) == {
        "hotel.reserved": {"reservation_id": "HOTEL-7"},
        "hotel.cancelled": {"reservation_id": "HOTEL-7", "reason": "booking_failed"},
    }


# Handle idempotency


def forwarding(to: Sender, losing: int) -> Behaviour:
    """Hands each request on to a consumer; of its answers the first few are lost on the way back."""
    answers: list[int] = []

    async def behave(request: Request, connection: Connection) -> bool:
        answered = await to.post({"content-type": request.headers["content-type"]}, request.body)
        answers.append(answered.status)
        if len(answers) <= losing:
            return False
        await connection.send(answer(answered.status))
        return True

    return behave


async def test_a_consumer_with_an_inbox_processes_an_event_once_however_often_it_comes(
    service: Outbox, make_outbox: MakeOutbox, table_name: str, sink: HttpSink
) -> None:
    processed: asyncio.Queue[Any] = asyncio.Queue()
    consumer = make_outbox(table_name=f"{table_name}_in", log=False)

    async def process_order_created(order: Any, message: Message) -> None:
        processed.put_nowait((order, message.tracking_ids[0]))

    app = consumer.http_app([Listener(ORDER_CREATED, process_order_created, queue="orders")], secrets=None)
    async with serving(app) as sender, service.running(relay=True):
        sink.behave(forwarding(sender, losing=3))
        sent = await send(service, body=1)
        await eventually(lambda: is_settled(service))
        last = await send(service, body=2)
        assert {await arrival(processed), await arrival(processed)} == {(1, sent.id), (2, last.id)}
    assert sink.ids.count(sent.id) > 1
    assert processed.empty()


# Complete example: e-commerce order processing


ORDERS = """
    import asyncio
    import os
    import sys
    from datetime import UTC, datetime

    from sqlalchemy import DateTime, String
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

    from outbox import backlog, close, emit, outbox, running, setup, transactional

    class Base(DeclarativeBase): ...

    class Order(Base):
        __tablename__ = f"{sys.argv[2]}_orders"
        order_id: Mapped[str] = mapped_column(String(64), primary_key=True)
        customer_email: Mapped[str] = mapped_column(String(64))
        amount: Mapped[float]
        status: Mapped[str] = mapped_column(String(64))
        created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=lambda: datetime.now(UTC))

    setup(db_engine_url=sys.argv[1], table_name=sys.argv[2], source="order-service", transport=os.environ["BROKER_URL"])

    @transactional
    async def create_order(order_id: str, customer_email: str, amount: float, session: AsyncSession) -> None:
        order = {"order_id": order_id, "customer_email": customer_email, "amount": amount, "status": "pending"}
        session.add(Order(**order))
        await emit(session, "order.created", order)

    async def main() -> None:
        async with outbox.engines.asynchronous.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with running(relay=True):
            await create_order("ORD-12345", "customer@example.com", 149.99)
            print("Order created: ORD-12345")
            while (await backlog()).waiting:
                await asyncio.sleep(0.02)
        await close()

    asyncio.run(main())
"""


async def test_the_order_of_the_complete_example_is_saved_and_told(
    outbox: Outbox, sink: HttpSink, database_url: str, table_name: str
) -> None:
    order = {"order_id": "ORD-12345", "customer_email": "customer@example.com", "amount": 149.99, "status": "pending"}
    async with program(ORDERS, database_url, table_name, BROKER_URL=f"{sink.url}/events") as service:
        assert await service.says() == "Order created: ORD-12345"
        code, _, complaints = await service.end()
    assert (code, "Traceback" in complaints) == (0, False)
    assert data(sink) == {ORDER_CREATED: order}
    async with outbox.transaction() as session:
        columns = "order_id, customer_email, amount, status"
        [row] = await session.execute(text(f"SELECT {columns} FROM {table_name}_orders"))
    async with outbox.transaction() as session:
        await session.execute(text(f"DROP TABLE {table_name}_orders"))
    assert dict(row._mapping) == order
