"""Over RabbitMQ: "Emit inside database transaction", "Delayed execution", "Automatic (de)serialization of
Pydantic models", message expiration, "Outbox table cleanup", and the API of `emit()`.
"""

from __future__ import annotations

import datetime
import time
from datetime import timedelta
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import IMMEDIATELY, NEVER, Listener, Message, Outbox, listen
from outbox.core.events import CleanedUp, Handled, Relayed
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, eventually, routing_keys
from tests.support.outboxes import MakeOutbox
from tests.support.queues import EXPIRES_AT, bring_back, is_empty, make_older, older, taken

from .users import JOHN, Arrivals, User


@pytest.fixture
def users(arrivals: Arrivals) -> Listener:
    """Tells which users it heard of, and how."""

    @listen("user.*", queue="users", retry_delays=(300,))
    async def users(user: object, routing_key: str) -> None:
        arrivals.put_nowait((routing_key, user))

    return users


async def bind(outbox: Outbox, listener: Listener) -> None:
    """Have a queue that nobody consumes from: its worker was here, and went."""
    async with outbox.running(listeners=[listener]):
        pass


# Emit inside database transaction


@on_both_stores
async def test_data_and_message_succeed_together_or_fail_together(
    rabbitmq_outbox: Outbox,
    db_engine: AsyncEngine,
    user_model: Any,
    users: Listener,
    arrivals: Arrivals,
    recorder: Recorder,
) -> None:
    async with rabbitmq_outbox.running(relay=True, listeners=[users]):
        with pytest.raises(ZeroDivisionError):
            async with AsyncSession(db_engine) as session, session.begin():
                session.add(user_model(id=1, username="nobody"))
                await rabbitmq_outbox.emit(session, "user.created", {"id": 1, "username": "nobody"})
                raise ZeroDivisionError
        async with AsyncSession(db_engine) as session, session.begin():
            session.add(user_model(id=123, username="johndoe"))
            await rabbitmq_outbox.emit(session, "user.created", {"id": 123, "username": "johndoe"})
            # commit not needed because of `session.begin()`
        assert await arrival(arrivals) == ("user.created", {"id": 123, "username": "johndoe"})
        await recorder.wait_for(Handled)
    async with AsyncSession(db_engine) as session:
        assert list(await session.scalars(select(user_model.id))) == [123]
    assert arrivals.empty()
    assert len(recorder.of(Relayed)) == 1


# Bodies


@on_both_stores
async def test_models_dicts_and_bytes_travel_with_the_content_type_of_what_they_are(
    rabbitmq_outbox: Outbox, db_engine: AsyncEngine, users: Listener, channel: AbstractChannel
) -> None:
    bodies = {
        "user.model": (User(id=123, username="johndoe"), b'{"id":123,"username":"johndoe"}', "application/json"),
        "user.dict": ({"id": 123}, b'{"id":123}', "application/json"),
        "user.bytes": (b"\x00\xff no JSON", b"\x00\xff no JSON", "application/octet-stream"),
        "user.text": ("Ätna", '"Ätna"'.encode(), "application/json"),
        "user.nothing": (None, b"null", "application/json"),
    }
    await bind(rabbitmq_outbox, users)
    emitted: dict[str, Message | None] = {}
    async with rabbitmq_outbox.running(relay=True):
        async with AsyncSession(db_engine) as session:
            for routing_key, (body, _, _) in bodies.items():
                emitted[routing_key] = await rabbitmq_outbox.emit(session, routing_key, body, headers={"tenant": "a"})
            await session.commit()
        found = [await taken(channel, "users") for _ in bodies]
    assert {each.routing_key: (each.body, each.content_type) for each in found} == {
        routing_key: (on_the_wire, kind) for routing_key, (_, on_the_wire, kind) in bodies.items()
    }
    for each in found:
        message = emitted[each.routing_key or ""]
        assert message is not None
        assert (each.message_id, each.headers["tenant"], each.delivery_mode) == (message.id, "a", 2)
        assert each.exchange == "outbox"


# Delayed execution


@on_both_stores
async def test_eta_holds_a_message_in_the_table_until_it_is_due(
    rabbitmq_outbox: Outbox, db_engine: AsyncEngine, users: Listener, arrivals: Arrivals
) -> None:
    began = time.time()
    etas: dict[str, Any] = {
        "user.naive": datetime.datetime.now() + timedelta(seconds=0.4),  # noqa: DTZ005 - the project's words
        "user.aware": datetime.datetime.now(datetime.UTC) + timedelta(seconds=0.4),
        "user.timedelta": timedelta(seconds=0.4),
        "user.milliseconds": 400,
    }
    async with rabbitmq_outbox.running(relay=True, listeners=[users]):
        async with AsyncSession(db_engine) as session:
            await rabbitmq_outbox.emit(
                session,
                "user.created",
                {"id": 123, "username": "johndoe"},
                eta=datetime.datetime.now() + datetime.timedelta(minutes=5),  # noqa: DTZ005 - the project's words
            )
            for routing_key, eta in etas.items():
                await rabbitmq_outbox.emit(session, routing_key, JOHN, eta=eta)
            await session.commit()
        assert {(await arrival(arrivals))[0] for _ in etas} == etas.keys()
        assert time.time() - began > 0.39  # SQLite's clock counts in milliseconds
    assert await routing_keys(rabbitmq_outbox) == ["user.created"]
    assert arrivals.empty()


# Expiration


@on_both_stores
async def test_an_expiration_of_setup_and_one_of_emit_end_in_the_queue(
    make_rabbitmq_outbox: MakeOutbox,
    users: Listener,
    arrivals: Arrivals,
    recorder: Recorder,
    channel: AbstractChannel,
) -> None:
    """Expired messages are dead letters with a reason, and are not dropped."""
    outbox = make_rabbitmq_outbox(expiration=3600)
    await bind(outbox, users)
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            short = await outbox.emit(session, "user.short", JOHN)
            await outbox.emit(session, "user.long", JOHN, expiration=7200)
        await recorder.wait_for(Relayed, 2)
    for _ in range(2):
        message = await taken(channel, "users")
        longest = {"user.short": 3600, "user.long": 7200}[message.routing_key or ""]
        assert isinstance(message.expiration, float)  # seconds: what is left, as RabbitMQ counts it
        assert longest - 600 < message.expiration <= longest
        await bring_back(channel, older(message, timedelta(hours=1.5)), exchange="outbox")
    async with outbox.running(listeners=[users]):
        letter = await taken(channel, "users.dlq")
        assert await arrival(arrivals) == ("user.long", JOHN)
    assert short is not None
    assert (letter.message_id, letter.headers["outbox-reason"]) == (short.id, "expired")
    assert letter.headers["outbox-attempt"] == 1
    assert arrivals.empty()


@on_sqlite
async def test_without_an_expiration_a_message_carries_none(
    rabbitmq_outbox: Outbox, users: Listener, channel: AbstractChannel
) -> None:
    await bind(rabbitmq_outbox, users)
    async with rabbitmq_outbox.running(relay=True):
        async with rabbitmq_outbox.transaction() as session:
            await rabbitmq_outbox.emit(session, "user.created", JOHN)
        message = await taken(channel, "users")
    assert EXPIRES_AT not in message.headers
    assert message.expiration is None


@on_sqlite
async def test_an_expiration_limits_all_retries_together(
    rabbitmq_outbox: Outbox, recorder: Recorder, channel: AbstractChannel
) -> None:
    attempts: list[int] = []

    @listen("user.created", queue="fails", retry_delays=(300, 300, 300))
    async def fails(user: object, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ConnectionError

    async with rabbitmq_outbox.running(relay=True, listeners=[fails]):
        async with rabbitmq_outbox.transaction() as session:
            await rabbitmq_outbox.emit(session, "user.created", JOHN, expiration=3600)
        await recorder.wait_for(Handled)
        await make_older(channel, "outbox.delay_300s", timedelta(hours=2))
        letter = await taken(channel, "fails.dlq")
    assert letter.headers["outbox-reason"] == "expired"
    assert letter.headers["outbox-routing-key"] == "user.created"
    assert attempts == [1]


# Outbox table cleanup


@on_both_stores
@pytest.mark.parametrize("clean_up_after", [IMMEDIATELY, NEVER, timedelta(seconds=0.2)], ids=str)
async def test_a_message_that_was_sent_is_cleaned_up_as_setup_says(
    make_rabbitmq_outbox: MakeOutbox,
    db_engine: AsyncEngine,
    table_name: str,
    users: Listener,
    arrivals: Arrivals,
    recorder: Recorder,
    clean_up_after: Any,
) -> None:
    table = f"{table_name}_mine"
    outbox = make_rabbitmq_outbox(clean_up_after=clean_up_after, table_name=table, poll_interval=0.02)
    began = time.monotonic()
    async with outbox.running(relay=True, listeners=[users]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)
        await arrival(arrivals)
        await recorder.wait_for(Relayed)
        if clean_up_after == timedelta(seconds=0.2):
            assert await recorder.wait_for(CleanedUp) == [CleanedUp("sent", 1)]
            assert time.monotonic() - began > 0.195
    async with db_engine.connect() as connection:
        rows = list(await connection.scalars(text(f"SELECT routing_key FROM {table}")))
    assert rows == (["user.created"] if clean_up_after == NEVER else [])
    assert [stored.state for stored in await outbox.messages()] == ["sent" for _ in rows]


# "No need for migrations, `setup` will get-or-create the outbox table automatically."


@on_both_stores
async def test_what_was_emitted_before_a_relay_ever_ran_is_sent_by_the_first(
    make_rabbitmq_outbox: MakeOutbox, db_engine: AsyncEngine, table_name: str, users: Listener, arrivals: Arrivals
) -> None:
    application = Outbox(db_engine=db_engine, table_name=table_name)  # it names no broker, and needs none
    async with AsyncSession(db_engine) as session, session.begin():
        await application.emit(session, "user.created", {"id": 123, "username": "johndoe"})
    await application.close()
    outbox = make_rabbitmq_outbox()
    async with outbox.running(relay=True, listeners=[users]):
        assert await arrival(arrivals) == ("user.created", {"id": 123, "username": "johndoe"})
        await eventually(lambda: _is_cleaned_up(outbox))


async def _is_cleaned_up(outbox: Outbox) -> bool:
    return await routing_keys(outbox) == []


@on_sqlite
async def test_a_relay_alone_keeps_what_no_queue_is_bound_to(
    make_rabbitmq_outbox: MakeOutbox, users: Listener, arrivals: Arrivals, recorder: Recorder, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(relay_retry_delays=(0.05,) * 1000)
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)
        await recorder.wait_for(Relayed)
        assert await routing_keys(outbox) == ["user.created"]
        await bind(make_rabbitmq_outbox(), users)
        await eventually(lambda: _is_cleaned_up(outbox))
    assert not await is_empty(channel, "users")
    assert arrivals.empty()
