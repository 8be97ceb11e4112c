"""From one service's transaction over HTTP into the listeners of another one: a relay posts, and http_app() takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from outbox import Listener, Message, Outbox, Reason
from outbox.core.attempt import Dead, Done
from outbox.core.events import Received, Relayed
from outbox.transports.http import HttpTransport
from tests.support.databases import on_both_stores
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.sending import Sender, serving

pytestmark = on_both_stores

Arrivals = asyncio.Queue[tuple[Any, Message]]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def warehouse(make_outbox: MakeOutbox, table_name: str, recorder: Recorder) -> Outbox:
    """The service that receives."""
    return make_outbox(table_name=f"{table_name}_in", observers=[recorder])


@asynccontextmanager
async def shop_to(
    sender: Sender, make_outbox: MakeOutbox, **options: Any
) -> AsyncIterator[tuple[Outbox, HttpTransport, Recorder]]:
    """The service that sends."""
    transport = HttpTransport(f"http://127.0.0.1:{sender.port}/", secrets=SECRET, **options)
    recorder = Recorder()
    shop = make_outbox(transport=transport, source="/shop", observers=[recorder], relay_retry_delays=(0.05,) * 100)
    async with shop.running(relay=True):
        yield shop, transport, recorder


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_a_message_arrives_as_it_was_emitted(
    mode: str, make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET)
    async with serving(app) as sender, shop_to(sender, make_outbox, mode=mode) as (shop, _, _):
        async with shop.transaction() as session:
            sent = await shop.emit(
                session,
                "order.created",
                {"name": "Köln"},
                key="customer 7%",
                headers={"tenant": "acme", "X-Trace": "ä"},
            )
        assert sent is not None
        body, message = await arrival(arrivals)
    assert body == {"name": "Köln"}
    assert (message.body, message.content_type, message.key) == (sent.body, sent.content_type, sent.key)
    assert message.headers == {**sent.headers, "ce-source": "/shop"}
    assert message.created_at == sent.created_at
    assert message.tracking_ids[:-1] == sent.tracking_ids


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_the_largest_body_fits(
    mode: str, make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET)
    async with serving(app) as sender, shop_to(sender, make_outbox, mode=mode) as (shop, _, _):
        async with shop.transaction() as session:
            # In binary mode headers are the server's affair: this one takes 64 KiB of them.
            headers = {"x-long": "é" * 30_000} if mode == "structured" else {}
            await shop.emit(session, "order.created", b"\xff" * 1024 * 1024, headers=headers)
        _, message = await arrival(arrivals)
    assert message.body == b"\xff" * 1024 * 1024


async def test_what_is_too_large_for_the_receiver_is_a_dead_letter_of_its_sender(
    make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET, max_request_size=100_000)
    async with serving(app) as sender, shop_to(sender, make_outbox) as (shop, _, _):
        async with shop.transaction() as session:
            await shop.emit(session, "order.created", b"\xff" * 1024 * 1024)
        [letter] = await eventually(lambda: shop.dead_letters.list())
    assert (letter.reason, letter.attempt_count) == (Reason.REFUSED, 1)
    assert "413" in letter.error
    assert arrivals.empty()


async def test_what_is_posted_twice_is_handled_once(
    make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET)
    async with serving(app) as sender, shop_to(sender, make_outbox) as (shop, transport, _):
        async with shop.transaction() as session:
            messages = await shop.emit_many(session, "order.created", range(20))
        assert {(await arrival(arrivals))[0] for _ in range(20)} == set(range(20))
        again = await transport.publish(messages)  # as a relay that died before it heard the answers
        assert again.confirmed == {message.id for message in messages}
    assert sum(event.duplicates for event in recorder.of(Received)) == 20
    assert arrivals.empty()


async def test_what_nobody_wants_is_a_dead_letter_of_its_sender_and_can_be_replayed(
    make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    everything = Listener("#", listener.callback, queue="everything")
    async with (
        serving(warehouse.http_app([listener], secrets=SECRET)) as sender,
        shop_to(sender, make_outbox) as (shop, _, _),
    ):
        async with shop.transaction() as session:
            await shop.emit(session, "parcel.sent", 7)
        [letter] = await eventually(lambda: shop.dead_letters.list())
    assert letter.reason is Reason.REFUSED
    assert "no listener matches 'parcel.sent' here" in letter.error
    async with (
        serving(warehouse.http_app([everything], secrets=SECRET)) as sender,
        shop_to(sender, make_outbox) as (shop, _, _),
    ):
        await shop.dead_letters.replay([letter.id])
        assert (await arrival(arrivals))[0] == 7


async def test_what_is_older_than_the_inbox_is_a_dead_letter_of_its_sender_and_young_when_it_is_replayed(
    make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET)
    async with serving(app) as sender:
        shop = make_outbox(transport=HttpTransport(f"http://127.0.0.1:{sender.port}/", secrets=SECRET))
        async with shop.transaction() as session:
            await shop.emit(session, "order.created", 1)
            long_ago = datetime.now(UTC) - timedelta(days=31)
            await session.execute(update(shop.tables.messages).values(created_at=long_ago, due_at=long_ago))
        async with shop.running(relay=True):
            [letter] = await eventually(lambda: shop.dead_letters.list())
            assert letter.reason is Reason.REFUSED
            assert "inbox_retention" in letter.error
            assert arrivals.empty()
            await shop.dead_letters.replay([letter.id])
            assert (await arrival(arrivals))[0] == 1


async def test_a_receiver_that_is_overloaded_gets_everything_nevertheless(
    make_outbox: MakeOutbox, warehouse: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = warehouse.http_app([listener], secrets=SECRET, most_at_once=4)
    async with serving(app) as sender, shop_to(sender, make_outbox, concurrency=8) as (shop, _, relayed):
        async with shop.transaction() as session:
            await shop.emit_many(session, "order.created", range(16))
        assert {(await arrival(arrivals))[0] for _ in range(16)} == set(range(16))
        await eventually(lambda: sum(isinstance(event.outcome, Done) for event in relayed.of(Relayed)) == 16)
    assert not [event for event in relayed.of(Relayed) if isinstance(event.outcome, Dead)]
    assert arrivals.empty()
