""" "Database setup for the producer" and "Implementing the transactional outbox producer".

The rulings: `movie` and `movie_created` are the routing key `movie.movie_created`, the aggregate's id is the key, the
metadata are headers. The outbox listener is a relay, its message publisher is `transport=`. A relay keeps no order: a
publisher that wants one message at a time says so itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import Message, Outbox
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import LeaseWasLost, Relayed
from tests.compatibility.pg_transactional_outbox.movies import MOVIE_CREATED, Shelf, is_done, tell
from tests.support.databases import on_every_driver, on_postgresql, on_sqlite
from tests.support.logins import login
from tests.support.observing import PATIENCE, Recorder, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox
from tests.support.queues import taken

Arrivals = asyncio.Queue[Message]


@pytest.fixture
def sent() -> Arrivals:
    """What the message publisher was given."""
    return asyncio.Queue()


@pytest.fixture
def producer(make_outbox: MakeOutbox, db_engine: AsyncEngine, recorder: Recorder, sent: Arrivals) -> Outbox:
    """The simplest publisher: it hands the message to somebody else in this process."""

    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)

    return make_outbox(db_engine=db_engine, transport=message_publisher, observers=[recorder])


def serializable(engine: AsyncEngine) -> AsyncSession:
    return AsyncSession(engine.execution_options(isolation_level="SERIALIZABLE"))


# The example


@on_every_driver
async def test_the_movie_and_its_message_commit_together_and_the_publisher_is_called_with_it(
    producer: Outbox, db_engine: AsyncEngine, movies: Shelf, sent: Arrivals
) -> None:
    async with producer.running(relay=True):
        async with serializable(db_engine) as session, session.begin():
            inserted = await session.execute(
                movies.put("some movie").returning(movies.table.c.id, movies.table.c.title)
            )
            row = inserted.one()
            stored = await producer.emit(session, MOVIE_CREATED, dict(row._mapping), key=str(row.id))
        message = await arrival(sent)
        await eventually(lambda: is_done(producer))
    assert message == stored
    assert (message.key, message.body) == ("1", b'{"id":1,"title":"some movie"}')
    assert await movies.titles() == ["some movie"]
    assert sent.empty()


async def test_an_error_leaves_neither_the_movie_nor_its_message(
    producer: Outbox, db_engine: AsyncEngine, movies: Shelf, sent: Arrivals
) -> None:
    async with producer.running(relay=True):
        with pytest.raises(IntegrityError):
            async with serializable(db_engine) as session, session.begin():
                await session.execute(movies.put("some movie"))
                await producer.emit(session, MOVIE_CREATED, {"title": "some movie"})
                await session.execute(movies.table.insert().values(title=None))
        await tell(producer, "another one")
        message = await arrival(sent)
    assert message.body == b'{"title":"another one"}'
    assert await movies.titles() == []
    assert sent.empty()


# Outbox storage


async def test_a_storage_for_one_kind_of_message_is_a_function_of_two_lines(producer: Outbox) -> None:
    def outbox_message_storage(aggregate_type: str, message_type: str) -> Callable[..., Awaitable[Message | None]]:
        def store(aggregate_id: str, payload: object, session: Any, metadata: Any = None) -> Awaitable[Message | None]:
            return producer.emit(
                session, f"{aggregate_type}.{message_type}", payload, key=aggregate_id, headers=metadata
            )

        return store

    store_outbox_message = outbox_message_storage("movie", "movie_created")
    async with producer.transaction() as session:
        await store_outbox_message("7", {"title": "some movie"}, session)
        await store_outbox_message("8", {"title": "another one"}, session, {"routing": "cinemas"})
    first, second = (each.message for each in await producer.messages())
    assert (first.routing_key, first.key, first.body, first.headers) == (
        "movie.movie_created",
        "7",
        b'{"title":"some movie"}',
        {},
    )
    assert (second.routing_key, second.key, second.headers) == ("movie.movie_created", "8", {"routing": "cinemas"})


async def test_the_general_storage_is_emit_itself(producer: Outbox) -> None:
    async with producer.transaction() as session:
        await producer.emit(session, "movie.movie_created", {"title": "some movie"}, key="7")
        await producer.emit(session, "customer.customer_updated", {"name": "Anna"}, key="8", headers={"region": "eu"})
    assert [(each.message.routing_key, each.message.key) for each in await producer.messages()] == [
        ("movie.movie_created", "7"),
        ("customer.customer_updated", "8"),
    ]


@on_postgresql
async def test_the_table_has_the_schema_and_the_name_that_were_configured(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, table_name: str, sent: Arrivals
) -> None:
    async with db_engine.begin() as connection:
        await connection.execute(text(f"CREATE SCHEMA {table_name}_schema"))

    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)

    producer = make_outbox(
        db_engine=db_engine, schema=f"{table_name}_schema", table_name="outbox", transport=message_publisher
    )
    await tell(producer, "some movie")
    async with db_engine.connect() as connection:
        assert await connection.scalar(text(f"SELECT count(*) FROM {table_name}_schema.outbox")) == 1
    async with producer.running(relay=True):
        assert (await arrival(sent)).body == b'{"title":"some movie"}'
        await eventually(lambda: is_done(producer))


@on_postgresql
async def test_the_login_of_the_business_logic_needs_no_more_rights_than_the_project_grants(
    make_outbox: MakeOutbox, producer: Outbox, movies: Shelf, sent: Arrivals, database_url: str, table_name: str
) -> None:
    await producer.create_tables()
    rights = (
        f"SELECT, INSERT, DELETE ON {producer.tables.messages.name}",
        f"SELECT, INSERT ON {movies.table.name}",
        f"USAGE ON SEQUENCE {movies.table.name}_id_seq",
    )
    async with login(database_url, f"{table_name}_login", *rights) as url:
        application = make_outbox(db_engine_url=url)
        async with producer.running(relay=True):
            async with application.transaction() as session:
                await session.execute(movies.put("some movie"))
                stored = await application.emit(session, MOVIE_CREATED, {"title": "some movie"})
            assert await arrival(sent) == stored
        await application.close()
    assert await movies.titles() == ["some movie"]


# Outbox listener


async def test_a_message_counts_as_processed_only_when_it_was_sent(
    make_outbox: MakeOutbox, recorder: Recorder, sent: Arrivals
) -> None:
    arrived = asyncio.Event()

    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)
        await arrived.wait()

    producer = make_outbox(transport=message_publisher, observers=[recorder])
    async with producer.running(relay=True):
        await tell(producer, "some movie")
        message = await arrival(sent)
        [waiting] = await producer.messages(state="waiting")
        assert waiting.message == message
        assert recorder.of(Relayed) == []
        arrived.set()
        [relayed] = await recorder.wait_for(Relayed)
    assert relayed.outcome == Done()
    assert await is_done(producer)


async def test_a_message_that_could_not_be_sent_is_sent_again(
    make_outbox: MakeOutbox, recorder: Recorder, sent: Arrivals
) -> None:
    """The ruling: with a pause, and an attempt is counted when the destination answered."""

    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)
        if sent.qsize() < 3:
            raise ConnectionError("the broker is away")

    producer = make_outbox(transport=message_publisher, relay_retry_delays=(0.02, 0.02), observers=[recorder])
    async with producer.running(relay=True):
        [stored] = await tell(producer, "some movie")
        relayed = await recorder.wait_for(Relayed, 3)
    assert [type(event.outcome) for event in relayed] == [RetryIn, RetryIn, Done]
    assert [sent.get_nowait() for _ in range(3)] == [stored] * 3
    assert await is_done(producer)


async def test_a_message_that_cannot_be_marked_as_processed_is_sent_again_with_the_same_id(
    make_outbox: MakeOutbox, recorder: Recorder, sent: Arrivals
) -> None:
    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)
        if sent.qsize() == 1:
            await let_leases_run_out(outbox)

    outbox = make_outbox(transport=message_publisher, observers=[recorder])
    async with outbox.running(relay=True):
        [stored] = await tell(outbox, "some movie")
        [relayed] = await recorder.wait_for(Relayed)
    assert relayed.outcome == Done()
    assert len(recorder.of(LeaseWasLost)) == 1
    assert [sent.get_nowait().id, sent.get_nowait().id] == [stored.id, stored.id]
    assert sent.empty()


async def test_a_relay_hears_of_a_new_message_instead_of_asking_for_it_all_the_time(
    make_outbox: MakeOutbox, sent: Arrivals
) -> None:
    async def message_publisher(message: Message) -> None:
        sent.put_nowait(message)

    application = make_outbox(transport=message_publisher)
    relay = make_outbox(transport=message_publisher, poll_interval=4 * PATIENCE)
    async with relay.running(relay=True):
        for title in ("some movie", "another one"):
            [stored] = await tell(application, title)
            assert await arrival(sent) == stored


async def test_what_was_stored_while_nothing_listened_is_sent_by_the_next_listener(
    producer: Outbox, sent: Arrivals, recorder: Recorder
) -> None:
    first = await tell(producer, "before")
    async with producer.running(relay=True):
        assert await arrival(sent) == first[0]
        await recorder.wait_for(Relayed)
    second = await tell(producer, "while it is down")
    async with producer.running(relay=True):
        assert await arrival(sent) == second[0]
        await recorder.wait_for(Relayed, 2)
    assert sent.empty()


async def test_a_publisher_gets_many_messages_at_once_and_with_a_mutex_sends_one_at_a_time(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    mutex, called, sent = asyncio.Lock(), list[str](), list[str]()

    async def message_publisher(message: Message) -> None:
        called.append(message.id)
        await eventually(lambda: len(called) == 20)
        async with mutex:
            sent.append(message.id)
            await asyncio.sleep(0)
            assert sent[-1] == message.id

    producer = make_outbox(transport=message_publisher, observers=[recorder])
    messages = await tell(producer, *(f"movie {number}" for number in range(20)))
    async with producer.running(relay=True):
        relayed = await recorder.wait_for(Relayed, 20)
    assert all(event.outcome == Done() for event in relayed)
    assert called == [message.id for message in messages]
    assert sorted(sent) == sorted(called)


async def test_a_publisher_may_give_each_kind_of_message_its_own_time(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    """One that ran out of it may have been sent or not: it is sent again, and burns no attempt."""
    tries: Counter[str] = Counter()

    async def message_publisher(message: Message) -> None:
        tries[message.routing_key] += 1
        if tries[message.routing_key] == 1:
            async with asyncio.timeout(PATIENCE if message.routing_key == "movie.ABC" else 0.02):
                await asyncio.sleep(1)

    producer = make_outbox(transport=message_publisher, restart_delay=0.05, observers=[recorder])
    async with producer.running(relay=True):
        await tell(producer, "expensive", routing_key="movie.ABC")
        await eventually(lambda: tries["movie.ABC"])  # both in one batch would be judged together
        await tell(producer, "cheap")
        relayed = await recorder.wait_for(Relayed, 2)
    assert {event.attempt.message.routing_key: event.attempt.attempt_count for event in relayed} == {
        "movie.ABC": 1,
        MOVIE_CREATED: 1,
    }
    assert tries == {"movie.ABC": 1, MOVIE_CREATED: 2}


# Message publisher


@on_sqlite
async def test_a_publisher_of_ones_own_sends_to_where_the_metadata_say(
    make_outbox: MakeOutbox, channel: AbstractChannel
) -> None:
    async def message_publisher(message: Message) -> None:
        await channel.default_exchange.publish(
            aio_pika.Message(message.body, message_id=message.id), message.headers["queue"]
        )

    for queue in ("cinemas", "archive"):
        await channel.declare_queue(queue, durable=True)
    producer = make_outbox(transport=message_publisher)
    async with producer.running(relay=True):
        [new] = await tell(producer, "a new one", headers={"queue": "cinemas"})
        [old] = await tell(producer, "an old one", headers={"queue": "archive"})
        found = {queue: (await taken(channel, queue)).message_id for queue in ("cinemas", "archive")}
    assert found == {"cinemas": new.id, "archive": old.id}
