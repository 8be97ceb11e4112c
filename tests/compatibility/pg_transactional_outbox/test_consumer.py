""" "Implementing the transactional inbox consumer": message receiver, message storage, inbox listener, handlers.

The rulings: `storeInboxMessage` is `receive`, or `store_first=True` for what RabbitMQ delivers; handlers are listeners
whose binding key is `aggregate.message`; the inbox is cleaned up by itself, after `inbox_retention`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import NEVER, Binding, FailedAttempt, Listener, Message, Outbox, Reason, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled, Received, Relayed
from tests.compatibility.pg_transactional_outbox.movies import MOVIE_CREATED, Shelf, incoming, is_done, tell
from tests.support.databases import on_both_stores, on_every_driver, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.queues import bring_back, is_empty, taken

logger = logging.getLogger("consumer")


async def entries(outbox: Outbox) -> int:
    """How many messages the inbox knows."""
    async with outbox.transaction() as session:
        return await session.scalar(select(func.count()).select_from(outbox.tables.inbox)) or 0


def publish_into(shelf: Shelf, **options: Any) -> Listener:
    """The handler of the project's example."""

    async def handle(movie: dict[str, str], session: AsyncSession) -> None:
        await session.execute(shelf.put(movie["title"]))

    return Listener(MOVIE_CREATED, handle, queue="published_movies", **options)


# The example


@on_both_stores
async def test_a_movie_walks_from_the_producers_table_over_rabbitmq_and_the_inbox_to_the_consumers_table(
    make_rabbitmq_outbox: MakeOutbox, table_name: str, published_movies: Shelf, recorder: Recorder
) -> None:
    def concurrency_strategy(message: Message) -> str | None:
        return None if message.routing_key.endswith(".ABC") else message.routing_key

    async def handle_error(
        error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt
    ) -> Any:
        if not attempt.is_last:
            return "transient"
        logger.error("Giving up processing message with ID %s.", message.id, exc_info=error)
        return "permanent"

    @listen(
        "movie.*",
        queue="published_movies",
        store_first=True,
        retry_delays=(0.02,),
        lane=concurrency_strategy,
        timeout=lambda message: 10 if message.routing_key.endswith(".ABC") else 8,
        isolation_level=lambda message: "READ COMMITTED" if message.routing_key.endswith(".ABC") else "REPEATABLE READ",
        on_error=handle_error,
    )
    async def handle(movie: dict[str, str], session: AsyncSession, attempt_count: int) -> None:
        await session.execute(published_movies.put(movie["title"]))
        if movie["title"] == "banned" or (movie["title"] == "difficult" and attempt_count == 1):
            raise ValueError("it cannot be published")

    producer, consumer = (make_rabbitmq_outbox(table_name=f"{table_name}_{end}") for end in ("outbox", "inbox"))
    async with producer.running(relay=True), consumer.running(listeners=[handle]):
        await tell(producer, "some movie", "difficult", "banned")
        await tell(producer, "expensive", routing_key="movie.ABC")
        await recorder.wait_for(Handled, 6)
        await eventually(lambda: is_done(consumer))
    assert sorted(await published_movies.titles()) == ["difficult", "expensive", "some movie"]
    assert sum(event.stored for event in recorder.of(Received)) == 4
    [letter] = await consumer.store.dead_letters.list(queue="published_movies")
    assert (letter.message.body, letter.reason, letter.attempt_count) == (b'{"title":"banned"}', Reason.EXHAUSTED, 2)
    assert await is_done(producer)


# Message receiver


@on_both_stores
async def test_a_message_that_the_broker_delivers_again_is_stored_and_handled_once(
    make_rabbitmq_outbox: MakeOutbox,
    published_movies: Shelf,
    recorder: Recorder,
    channel: AbstractChannel,
) -> None:
    """Right after the first delivery, and together with a new one when it was handled long ago."""
    outbox = make_rabbitmq_outbox()
    listener = publish_into(published_movies, store_first=True)
    async with outbox.running(listeners=[listener]):
        pass
    async with outbox.running(relay=True):
        await tell(outbox, "some movie")
        message = await taken(channel, "published_movies")
    async with outbox.running(listeners=[listener]):
        await bring_back(channel, message, exchange="outbox")
        await bring_back(channel, message, exchange="outbox")
        await eventually(published_movies.titles)
    async with outbox.running(relay=True):
        await bring_back(channel, message, exchange="outbox")
        await tell(outbox, "another one")
        await recorder.wait_for(Relayed, 2)
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: sum(event.duplicates for event in recorder.of(Received)) == 2)
        await recorder.wait_for(Handled, 2)
        await eventually(lambda: is_done(outbox))
    assert await published_movies.titles() == ["some movie", "another one"]
    assert len(recorder.of(Handled)) == 2
    assert await entries(outbox) == 2


@on_both_stores
async def test_a_receiver_of_ones_own_stores_and_then_acknowledges(
    outbox: Outbox, published_movies: Shelf, channel: AbstractChannel
) -> None:
    answers: list[bool] = []

    async def on_delivery(delivered: AbstractIncomingMessage) -> None:
        assert delivered.message_id is not None
        message = Message(routing_key=MOVIE_CREATED, body=delivered.body, tracking_ids=(delivered.message_id,))
        answers.append(await outbox.receive("published_movies", message))
        await delivered.ack()

    queue = await channel.declare_queue("of the broker", durable=True)
    async with outbox.running(listeners=[publish_into(published_movies)]):
        tag = await queue.consume(on_delivery)
        for id in ("one", "two", "one"):
            sent = aio_pika.Message(b'{"title":"%s"}' % id.encode(), message_id=id)
            await channel.default_exchange.publish(sent, "of the broker")
        await eventually(lambda: len(answers) == 3)
        await queue.cancel(tag)
        await eventually(lambda: is_done(outbox))
    assert sorted(answers) == [False, True, True]
    assert sorted(await published_movies.titles()) == ["one", "two"]
    assert await is_empty(channel, "of the broker")


# Message storage


@on_every_driver
async def test_a_message_is_stored_once_however_often_it_comes(make_outbox: MakeOutbox, outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("published_movies", "#")])
    message = incoming()
    assert await outbox.receive("published_movies", message)
    assert not await outbox.receive("published_movies", message)
    receivers = [make_outbox() for _ in range(3)]
    another = incoming()
    answers = await asyncio.gather(*(each.receive("published_movies", another) for each in receivers))
    assert sorted(answers) == [False, False, True]
    assert [each.message for each in await outbox.messages()] == [message, another]


async def test_what_is_stored_in_a_transaction_is_stored_if_that_commits(
    outbox: Outbox, published_movies: Shelf
) -> None:
    await outbox.store.queues.bind([Binding("published_movies", "#")])
    message = incoming()
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            await session.execute(published_movies.put("seen"))
            assert await outbox.receive(session, "published_movies", message)
            raise ZeroDivisionError
    assert (await outbox.messages(), await published_movies.titles()) == ([], [])
    async with outbox.transaction() as session:
        await session.execute(published_movies.put("seen"))
        assert await outbox.receive(session, "published_movies", message)
    assert len(await outbox.messages()) == len(await published_movies.titles()) == 1


async def test_messages_are_stored_while_nobody_handles_them_and_handled_later(
    outbox: Outbox, published_movies: Shelf
) -> None:
    listener = publish_into(published_movies)
    async with outbox.running(listeners=[listener]):
        pass
    for number in range(5):
        assert await outbox.receive("published_movies", incoming(f"movie {number}"))
    assert await published_movies.titles() == []
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: is_done(outbox))
    assert sorted(await published_movies.titles()) == [f"movie {number}" for number in range(5)]


# The inbox is not emptied by handling


async def test_a_message_that_was_handled_stays_known_for_as_long_as_the_inbox_keeps_it(
    outbox: Outbox, published_movies: Shelf
) -> None:
    message = incoming()
    async with outbox.running(listeners=[publish_into(published_movies)]):
        assert await outbox.receive("published_movies", message)
        await eventually(lambda: is_done(outbox))
        assert await entries(outbox) == 1
        assert not await outbox.receive("published_movies", message), "a replay attack"
    assert await published_movies.titles() == ["some movie"]
    assert outbox.settings.inbox_retention == timedelta(days=30)


@on_both_stores
async def test_a_message_that_is_older_than_what_the_inbox_keeps_is_not_processed_any_more(
    make_rabbitmq_outbox: MakeOutbox, published_movies: Shelf, recorder: Recorder
) -> None:
    outbox = make_rabbitmq_outbox(inbox_retention=timedelta(hours=4))
    now = datetime.now(UTC)
    old, young = (incoming(title, created_at=now - age) for title, age in AGES.items())
    async with outbox.running(listeners=[publish_into(published_movies, store_first=True)]):
        assert len((await outbox.transport.publish([old, young])).confirmed) == 2
        await eventually(published_movies.titles)
        [letter] = await eventually(lambda: outbox.dead_letters.list(queue="published_movies"))
    assert await published_movies.titles() == ["young"]
    assert (letter.message.id, letter.reason) == (old.id, Reason.EXPIRED)


AGES = {"old": timedelta(hours=5), "young": timedelta(hours=3)}


# Inbox listener and message handlers


@on_both_stores
async def test_of_all_handlers_the_one_with_the_aggregate_and_the_message_type_is_called(
    rabbitmq_outbox: Outbox, recorder: Recorder
) -> None:
    called: dict[str, list[str]] = {"created": [], "deleted": [], "customer": []}

    @listen("movie.movie_created", queue="created", store_first=True)
    async def created(payload: object, routing_key: str) -> None:
        called["created"].append(routing_key)

    @listen("movie.movie_deleted", queue="deleted", store_first=True)
    async def deleted(payload: object, routing_key: str) -> None:
        called["deleted"].append(routing_key)

    @listen("customer.movie_created", queue="customer", store_first=True)
    async def customer(payload: object, routing_key: str) -> None:
        called["customer"].append(routing_key)

    async with rabbitmq_outbox.running(relay=True, listeners=[created, deleted, customer]):
        for routing_key in ("movie.movie_created", "movie.movie_deleted", "customer.movie_created"):
            await tell(rabbitmq_outbox, "some movie", routing_key=routing_key)
        await recorder.wait_for(Handled, 3)
    assert called == {
        "created": ["movie.movie_created"],
        "deleted": ["movie.movie_deleted"],
        "customer": ["customer.movie_created"],
    }


@on_sqlite
async def test_a_message_without_a_handler_is_not_lost(make_outbox: MakeOutbox, outbox: Outbox) -> None:
    """The ruling for what is emitted: it waits. What is received for a queue that nobody has is a dead letter."""
    await outbox.receive("nobodys queue", incoming())
    [letter] = await outbox.dead_letters.list()
    assert letter.reason is Reason.UNWANTED
    await tell(outbox, "some movie")
    assert [each.state for each in await outbox.messages()] == ["waiting"]


@on_every_driver
async def test_what_the_handler_wrote_commits_with_the_mark_that_the_message_was_processed(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, published_movies: Shelf, recorder: Recorder
) -> None:
    outbox = make_outbox(db_engine=db_engine, clean_up_after=NEVER, observers=[recorder])
    handled, release = asyncio.Event(), asyncio.Event()

    @listen(MOVIE_CREATED, queue="published_movies")
    async def handle(movie: dict[str, str], session: AsyncSession) -> None:
        await session.execute(published_movies.put(movie["title"]))
        handled.set()
        await eventually(release.is_set)

    async def state() -> tuple[list[str], bool]:
        [stored] = await outbox.find(message.id)
        return await published_movies.titles(), stored.done_at is not None

    message = incoming()
    async with outbox.running(listeners=[handle]):
        await outbox.receive("published_movies", message)
        await eventually(handled.is_set)
        assert await state() == ([], False)
        release.set()
        await recorder.wait_for(Handled)
    assert await state() == (["some movie"], True)


async def test_a_handler_that_fails_leaves_nothing_and_is_called_again(
    outbox: Outbox, published_movies: Shelf, recorder: Recorder
) -> None:
    @listen(MOVIE_CREATED, queue="published_movies", retry_delays=(0.02,))
    async def handle(movie: dict[str, str], session: AsyncSession, attempt_count: int) -> None:
        await session.execute(published_movies.put(f"{movie['title']}, attempt {attempt_count}"))
        if attempt_count == 1:
            raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[handle]):
        await outbox.receive("published_movies", incoming())
        ended = await recorder.wait_for(Handled, 2)
    assert [type(event.outcome) for event in ended] == [RetryIn, Done]
    assert await published_movies.titles() == ["some movie, attempt 2"]


async def test_a_handler_gets_the_message_and_a_client_that_is_in_a_transaction(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[tuple[Message, bool]] = asyncio.Queue()

    @listen(MOVIE_CREATED, queue="published_movies")
    async def handle(payload: object, message: Message, session: AsyncSession) -> None:
        await session.connection()
        arrivals.put_nowait((message, session.in_transaction()))

    async with outbox.running(listeners=[handle]):
        sent = incoming(headers={"region": "eu"}, key="7")
        await outbox.receive("published_movies", sent)
        assert await arrival(arrivals) == (sent, True)


async def test_a_payload_that_is_not_what_the_handler_asks_for_is_a_dead_letter(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    """The project's handler looks for `id` and `title` by itself and takes anything else for handled."""
    async with outbox.running(listeners=[publish_into(published_movies)]):
        await outbox.receive("published_movies", replace(incoming(), body=b'{"title":7}'))
        [ended] = await recorder.wait_for(Handled)
    assert isinstance(ended.outcome, Dead)
    assert ended.outcome.reason is Reason.UNDECODABLE
    assert await published_movies.titles() == []
