""" "Message format", field by field, from a producer over RabbitMQ to a consumer.

The rulings: `aggregateType` and `messageType` are the words of the routing key, `aggregateId` is the key, the payload
is a body of bytes, the metadata are headers. Of the inbox's own fields, started attempts are those that ended and
those that never did, and `processedAt` is kept as long as `clean_up_after` says.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import NEVER, Message, Outbox, listen
from outbox.core.events import Handled
from outbox.core.store import Selection
from tests.compatibility.pg_transactional_outbox.movies import MOVIE_CREATED, incoming
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, let_leases_run_out
from tests.support.outboxes import MakeOutbox

MINUTE = timedelta(minutes=1)


# Fields of both


@pytest.mark.parametrize("store_first", [False, True])
@on_both_stores
async def test_every_field_arrives_as_it_was_emitted(
    make_rabbitmq_outbox: MakeOutbox, table_name: str, store_first: bool
) -> None:
    arrivals: asyncio.Queue[tuple[object, Message]] = asyncio.Queue()

    @listen("movie.*", queue="movies", store_first=store_first)
    async def on_movie(payload: dict[str, object], message: Message) -> None:
        arrivals.put_nowait((payload, message))

    producer, consumer = (make_rabbitmq_outbox(table_name=f"{table_name}_{end}") for end in ("outbox", "inbox"))
    payload = {"id": 7, "title": "Ünïcode ✓", "cast": ["Anna", {"name": "Ben"}], "rating": 7.5, "sequel": None}
    before = datetime.now(UTC)
    async with producer.running(relay=True), consumer.running(listeners=[on_movie]):
        async with producer.transaction() as session:
            emitted = await producer.emit(session, MOVIE_CREATED, payload, key="7", headers={"region": "eu"})
        received, message = await arrival(arrivals)
    assert message == emitted
    assert received == payload
    aggregate_type, message_type = message.routing_key.split(".")
    assert (aggregate_type, message_type, message.key) == ("movie", "movie_created", "7")
    assert message.headers == {"region": "eu"}
    assert str(UUID(message.id)) == message.id
    assert before - MINUTE < message.created_at < datetime.now(UTC) + MINUTE
    assert message.created_at.utcoffset() == timedelta(0)
    assert datetime.fromisoformat(message.created_at.isoformat()) == message.created_at


async def test_ids_are_unique_and_metadata_are_optional(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        emitted = [await outbox.emit(session, MOVIE_CREATED, {}) for _ in range(50)]
    stored = [each.message for each in await outbox.messages()]
    assert stored == emitted
    assert len({message.id for message in stored}) == 50
    assert all((message.headers, message.key) == ({}, None) for message in stored)


@on_sqlite
async def test_messages_of_one_transaction_keep_the_order_in_which_they_were_made(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, MOVIE_CREATED, range(50))
    made = [each.message.created_at for each in await outbox.messages()]
    assert made == sorted(made)


# Fields of the inbox


async def test_a_message_that_waits_tells_how_often_it_was_tried_and_how_often_that_ended(
    outbox: Outbox, recorder: Recorder
) -> None:
    @listen("movie.*", queue="movies", retry_delays=(3600,))
    async def fails(payload: object) -> None:
        raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[fails]):
        pass
    await outbox.receive("movies", message := incoming())
    [fresh] = await outbox.find(message.id)
    assert (fresh.state, fresh.attempt_count, fresh.crash_count, fresh.done_at) == ("queued", 0, 0, None)

    async with outbox.store.feed.claim(
        Selection(limit=1, lease=MINUTE, destination="movies")
    ) as claim:  # a worker that dies
        assert len(claim.attempts) == 1
        await let_leases_run_out(outbox)
    [started] = await outbox.find(message.id)
    assert (started.attempt_count, started.crash_count, started.done_at) == (0, 1, None)

    async with outbox.running(listeners=[fails]):
        await recorder.wait_for(Handled)
    [tried] = await outbox.find(message.id)
    assert (tried.state, tried.attempt_count, tried.crash_count, tried.done_at) == ("retrying", 1, 1, None)


async def test_a_message_that_was_processed_tells_when_and_after_how_many_attempts(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    @listen("movie.*", queue="movies", retry_delays=(0, 0))
    async def on_movie(payload: object, attempt_count: int, session: AsyncSession) -> None:
        if attempt_count < 3:
            raise ConnectionError("the cinema is closed")

    outbox = make_outbox(clean_up_after=NEVER, observers=[recorder])
    before = datetime.now(UTC)
    async with outbox.running(listeners=[on_movie]):
        await outbox.receive("movies", message := incoming())
        await recorder.wait_for(Handled, 3)
    [done] = await outbox.find(message.id)
    assert (done.state, done.attempt_count, done.crash_count) == ("handled", 3, 0)
    assert done.done_at is not None
    assert before - MINUTE < done.done_at < datetime.now(UTC) + MINUTE
    assert done.done_at.utcoffset() == timedelta(0)
