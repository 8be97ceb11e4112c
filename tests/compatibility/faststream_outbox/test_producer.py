""" "The transactional outbox pattern" and "Producer side", with what its API adds: batches, headers, limits.

The ruling on NOTIFY: nothing of the kind runs in the producer's transaction; sleepers are woken after its commit.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from outbox import (
    BodyTooLarge,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    Message,
    Outbox,
    RoutingKeyInvalid,
    TimeInvalid,
    TooManyHeaders,
    listen,
)
from outbox.core.events import Handled
from outbox.stores.postgresql import PostgresqlStore
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import PATIENCE, Recorder, Statements, arrival, eventually, routing_keys
from tests.support.outboxes import MakeOutbox

SOON = 15.0  # seconds: far more than a wake-up takes, far less than the sleep it ends


# One transaction


async def test_the_row_commits_with_the_domain_write(outbox: Outbox, db_engine: AsyncEngine, user_model: Any) -> None:
    session_factory = async_sessionmaker(db_engine)
    order = user_model(id=7, username="order")
    async with session_factory() as session, session.begin():
        session.add(order)  # domain write
        await outbox.emit(session, "orders", 7)
        # session.begin() commits both atomically on exit
    async with session_factory() as session:
        assert await session.get(user_model, 7) is not None
    assert await routing_keys(outbox) == ["orders"]


async def test_emit_does_not_flush(outbox: Outbox, db_engine: AsyncEngine, user_model: Any) -> None:
    async with AsyncSession(db_engine) as session, session.begin():
        order = user_model(id=7, username="order")
        session.add(order)
        await outbox.emit(session, "orders", 7)
        await outbox.emit_many(session, "orders", [8, 9])
        await outbox.emit(session, "orders", 10, timer_id="ten")
        await outbox.cancel_timer(session, "ten")
        assert order in session.new
        session.expunge(order)


async def test_a_plain_session_is_not_flushed_either(outbox: Outbox, sync_engine: Engine, user_model: Any) -> None:
    with Session(sync_engine) as session, session.begin():
        order = user_model(id=7, username="order")
        session.add(order)
        outbox.emit_sync(session, "orders", 7)
        assert order in session.new
        session.expunge(order)


async def test_emit_neither_commits_nor_opens_a_transaction_of_its_own(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    happened: list[str] = []
    for name in ("begin", "commit", "rollback", "savepoint"):
        event.listen(db_engine.sync_engine, name, lambda *_, name=name: happened.append(name))
    async with AsyncSession(db_engine) as session, session.begin():
        await session.connection()
        assert happened == ["begin"]
        await outbox.emit(session, "orders", 7)
        await outbox.emit_many(session, "orders", [8, 9])
        assert happened == ["begin"]
    assert happened == ["begin", "commit"]


@on_sqlite
async def test_a_transaction_that_fails_after_the_emit_leaves_no_trace(
    outbox: Outbox, db_engine: AsyncEngine, recorder: Recorder
) -> None:
    seen: list[int] = []

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        seen.append(number)

    async with outbox.running(listeners=[orders]):
        for number in range(10):
            try:
                async with AsyncSession(db_engine) as session, session.begin():
                    await outbox.emit(session, "orders", number)
                    if number % 2:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
        await recorder.wait_for(Handled, 5)
    assert sorted(seen) == [0, 2, 4, 6, 8]
    assert await outbox.messages() == []


# A batch


@on_every_driver
async def test_a_batch_is_one_round_trip_for_many_rows(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "warm up", 0)
        with Statements(db_engine.sync_engine) as statements:
            messages = await outbox.emit_many(session, "orders", range(500))
    assert len(statements) == 1
    assert len({message.id for message in messages}) == 500
    stored = await outbox.messages(limit=1000)
    assert [each.message for each in stored[1:]] == messages


async def test_a_batch_rolls_back_as_a_whole(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    with pytest.raises(ZeroDivisionError):
        async with AsyncSession(db_engine) as session, session.begin():
            await outbox.emit_many(session, "orders", range(20))
            raise ZeroDivisionError
    assert await outbox.messages() == []


@on_sqlite
async def test_a_batch_with_one_bad_body_writes_nothing(outbox: Outbox) -> None:
    await outbox.create_tables()
    async with outbox.transaction() as session:
        with pytest.raises(ValueError, match="orders"):
            await outbox.emit_many(session, "orders", [1, object(), 3])
    assert await outbox.messages() == []


@on_sqlite
async def test_an_empty_batch_is_nothing(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        assert await outbox.emit_many(session, "orders", []) == []
    assert await outbox.messages() == []


@on_sqlite
async def test_none_survives_in_a_batch_and_alone(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(body):  # type: ignore[no-untyped-def]
        await arrivals.put(body)

    async with outbox.running(listeners=[orders]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "orders", [None, None])
            await outbox.emit(session, "orders", None)
        assert [await arrival(arrivals) for _ in range(3)] == [None] * 3


async def test_a_batch_shares_headers_and_eta_and_may_compute_its_keys(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(
            session,
            "orders",
            [{"id": 1}, {"id": 2}],
            key=lambda order: f"order-{order['id']}",
            headers={"tenant": "acme"},
            eta=timedelta(hours=1),
            expiration=60,
        )
    first, second = await outbox.messages()
    assert (first.message.key, second.message.key) == ("order-1", "order-2")
    assert first.message.headers == second.message.headers == {"tenant": "acme"}
    assert first.due_at - first.message.created_at > timedelta(minutes=59)
    assert (await outbox.backlog()).due == 0


# What a message may be


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"routing_key": ""}, RoutingKeyInvalid),
        ({"routing_key": "x" * 256}, RoutingKeyInvalid),
        ({"routing_key": "ä" * 128}, RoutingKeyInvalid),
        ({"routing_key": "new\nline"}, RoutingKeyInvalid),
        ({"routing_key": 7}, RoutingKeyInvalid),
        ({"key": ""}, KeyInvalid),
        ({"headers": {"näme": "value"}}, HeaderInvalid),
        ({"headers": {"name": "va\r\nlue"}}, HeaderInvalid),
        ({"headers": {"name": 7}}, HeaderInvalid),
        ({"headers": {f"n{number}": "" for number in range(65)}}, TooManyHeaders),
        ({"headers": {"name": "x" * 65_536}}, HeadersTooLarge),
        ({"body": b"x" * (1024 * 1024 + 1)}, BodyTooLarge),
        ({"expiration": 0}, TimeInvalid),
        ({"expiration": -1}, TimeInvalid),
        ({"timer_id": ""}, ValueError),
    ],
)
@on_sqlite
async def test_what_could_not_travel_is_refused_before_anything_is_written(
    outbox: Outbox, options: dict[str, Any], error: type[Exception]
) -> None:
    arguments = {"routing_key": "orders", "body": 7, **options}
    async with outbox.transaction() as session:
        with Statements() as statements, pytest.raises(error):
            await outbox.emit(session, arguments.pop("routing_key"), arguments.pop("body"), **arguments)
        await outbox.emit(session, "the session is still good", 1)
    assert statements == []
    assert await routing_keys(outbox) == ["the session is still good"]


@on_every_driver
async def test_the_largest_message_travels_unchanged(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[Message] = asyncio.Queue()

    @listen("#", queue="large")
    async def large(body: bytes, message: Message) -> None:
        await arrivals.put(message)

    headers = {f"n{number}": "ü" * 100 for number in range(64)}
    async with outbox.running(listeners=[large]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit(
                session, "r" * 255, b"\x00" * 1024 * 1024, key="k" * 255, headers=headers, content_type="image/png"
            )
        assert await arrival(arrivals) == emitted


# Waking sleepers


async def asleep(outbox: Outbox) -> asyncio.Task[None]:
    """Somebody who sleeps until there is something to do, for much longer than this test may take."""
    sleeping = asyncio.create_task(outbox.store.feed.wait(4 * PATIENCE))
    await eventually(lambda: _hears(outbox))
    async with asyncio.timeout(PATIENCE):
        while True:
            await asyncio.wait([sleeping], timeout=0.2)  # whatever was announced earlier wakes it meanwhile
            await _hears(outbox)
            if not sleeping.done():
                return sleeping
            sleeping = asyncio.create_task(outbox.store.feed.wait(4 * PATIENCE))


async def _hears(outbox: Outbox) -> bool:
    """Whether wake-ups of other processes arrive: PostgreSQL tells who listens, SQLite's file is always there."""
    if not isinstance(outbox.store, PostgresqlStore):
        return True
    line = outbox.store.runner.direct.line
    if line is not None:  # it is asked other things as well, and PostgreSQL tells the last one
        return bool(line._raw._listeners)
    async with outbox.transaction() as session:
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND query LIKE :name"
        name = f'%{outbox.tables.messages.name}"%'
        return bool(await session.scalar(text(listening), {"name": name}))


@on_every_driver
async def test_a_sleeper_in_another_process_is_woken_by_a_commit(make_outbox: MakeOutbox) -> None:
    producer, consumer = make_outbox(), make_outbox()
    await producer.create_tables()
    async with producer.transaction() as session:
        await producer.emit(session, "warm up", 0)
    sleeping = await asleep(consumer)
    async with producer.transaction() as session:
        await producer.emit(session, "orders", 7)
    await asyncio.wait_for(sleeping, SOON)


async def test_a_sleeper_in_the_same_process_is_woken_by_a_commit(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    sleeping = await asleep(outbox)
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "orders", 7)
        await asyncio.sleep(0.1)
        assert not sleeping.done()  # nobody hears of what has not committed
    await asyncio.wait_for(sleeping, SOON)


async def test_a_rollback_wakes_nobody(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    sleeping = await asleep(outbox)
    async with AsyncSession(db_engine) as session:
        await outbox.emit(session, "orders", 7)
        await session.rollback()
        await session.execute(select(1))
        await session.commit()
    await asyncio.sleep(0.1)
    assert not sleeping.done()
    sleeping.cancel()


@on_every_driver
async def test_a_savepoint_that_rolled_back_does_not_suppress_the_wake_up(make_outbox: MakeOutbox) -> None:
    producer, consumer = make_outbox(), make_outbox()
    await producer.create_tables()
    async with producer.transaction() as session:
        await producer.emit(session, "warm up", 0)
    sleeping = await asleep(consumer)
    async with producer.transaction() as session:
        await producer.emit(session, "orders", 7)
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await producer.emit(session, "orders", 8)
                raise ZeroDivisionError
    await asyncio.wait_for(sleeping, SOON)


async def test_a_savepoint_that_was_released_wakes_nobody_before_the_whole_has_committed(
    make_outbox: MakeOutbox,
) -> None:
    producer, consumer = make_outbox(), make_outbox()
    async with producer.transaction() as session:
        await producer.emit(session, "warm up", 0)
    sleeping = await asleep(consumer)
    async with producer.transaction() as session:
        async with session.begin_nested():
            await producer.emit(session, "orders", 7)
        await asyncio.sleep(0.1)
        assert not sleeping.done()
    await asyncio.wait_for(sleeping, SOON)


async def test_nothing_but_the_insert_runs_in_the_producers_transaction(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    with Statements(db_engine.sync_engine) as first:
        async with AsyncSession(db_engine) as session, session.begin():
            await outbox.emit(session, "orders", 6)  # an engine that was never met: are the tables there?
    assert [statement.split()[0] for statement in first if "pg_class" not in statement] == ["INSERT"]
    with Statements(db_engine.sync_engine) as statements:
        async with AsyncSession(db_engine) as session, session.begin():
            await outbox.emit(session, "orders", 7)
            await outbox.emit_many(session, "orders", [8, 9])
    assert len(statements) == 2
    assert all(statement.startswith("INSERT") for statement in statements)
    assert not any("notify" in statement.lower() for statement in statements)


async def test_a_message_emitted_while_everybody_sleeps_is_handled_long_before_the_next_poll(
    make_outbox: MakeOutbox,
) -> None:
    producer, consumer = make_outbox(), make_outbox(poll_interval=4 * PATIENCE)
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        await arrivals.put(number)

    async with consumer.running(listeners=[orders]):
        for number in range(3):
            async with producer.transaction() as session:
                await producer.emit(session, "orders", number)
            assert await arrival(arrivals) == number
            await eventually(lambda: _is_empty(producer))


async def _is_empty(outbox: Outbox) -> bool:
    return not await outbox.messages()
