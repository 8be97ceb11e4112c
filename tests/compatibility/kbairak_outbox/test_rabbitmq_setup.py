"""Over RabbitMQ: "Usage" as the three programs it shows, "Logging", "Singleton vs multiple instances", and the
API of `setup()`.
"""

from __future__ import annotations

import logging
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import outbox as library
from outbox import ConfigurationError, Listener, Outbox, Reject, TransportMismatch, emit, listen, setup
from outbox.core.events import Handled, Relayed
from tests.support.broker import VirtualHost
from tests.support.databases import ASYNCPG, SQLITE, on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.program import program
from tests.support.queues import taken

from .users import JOHN, MAIN_APPLICATION, Arrivals, emit_and_commit


class User(BaseModel):
    id: int


# Usage

MESSAGE_RELAY = """
    import asyncio
    import sys

    from outbox import setup, message_relay

    setup(
        db_engine_url=sys.argv[1],
        table_name=sys.argv[2],
        rabbitmq_url=sys.argv[3],
    )

    asyncio.run(message_relay())
"""

WORKER_BY_DECORATOR = """
    import asyncio
    import sys

    from outbox import setup, listen, worker

    setup(rabbitmq_url=sys.argv[1])

    @listen("user.created")
    async def on_user_created(user):
        print(user)

    asyncio.run(worker([on_user_created]))
"""

WORKER_BY_CLASS = """
    import asyncio
    import sys

    from outbox import setup, Listener, worker

    setup(rabbitmq_url=sys.argv[1])

    async def on_user_created(user):
        print(user)

    handlers = [
        Listener(
            binding_key="user.created",
            callback=on_user_created,
            queue="analytics_service.on_user_created",  # optional, auto-generated if not provided
        )
    ]

    asyncio.run(worker(handlers))
"""


@pytest.mark.parametrize(
    ("database_url", "worker_process", "queue"),
    [
        (SQLITE, WORKER_BY_DECORATOR, "__main__.on_user_created"),
        (ASYNCPG, WORKER_BY_CLASS, "analytics_service.on_user_created"),
    ],
    indirect=["database_url"],
    ids=["decorator and sqlite", "class and asyncpg"],
)
async def test_application_relay_and_worker_run_as_the_programs_they_are_written_as(
    database_url: str, table_name: str, vhost: VirtualHost, worker_process: str, queue: str
) -> None:
    async with (
        program(worker_process, vhost.url) as worker,
        program(MESSAGE_RELAY, database_url, table_name, vhost.url) as relay,
    ):
        await eventually(lambda: (queue, "user.created") in _bindings(vhost))
        async with program(MAIN_APPLICATION, database_url, table_name) as application:
            assert await application.end() == (0, "", "")
        assert await worker.says() == "{'id': 123, 'username': 'johndoe'}"
        for process, number in ((worker, signal.SIGTERM), (relay, signal.SIGINT)):
            process.signal(number)
            code, further, errors = await process.end()
            assert (code, further) == (0, "")
            assert "Traceback" not in errors
            assert ("is named after __main__" in errors) == (process is worker and queue.startswith("__main__"))


def _bindings(vhost: VirtualHost) -> set[tuple[str, str]]:
    return {(binding["destination"], binding["routing_key"]) for binding in vhost.bindings()}


# setup()


@pytest.mark.parametrize("spelling", ["rabbitmq_url", "rmq_connection_url", "transport", "rmq_connection"])
@on_both_stores
async def test_database_and_broker_have_the_spellings_of_the_project(
    database_url: str,
    db_engine: AsyncEngine,
    table_name: str,
    rabbitmq_url: str,
    arrivals: Arrivals,
    recorder: Recorder,
    spelling: str,
) -> None:
    connection = await aio_pika.connect_robust(rabbitmq_url)
    broker: Any = connection if spelling == "rmq_connection" else rabbitmq_url
    database = (
        {"db_engine": db_engine} if spelling in ("rabbitmq_url", "transport") else {"db_engine_url": database_url}
    )
    outbox = Outbox(**database, table_name=table_name, poll_interval=0.2, observers=[recorder], **{spelling: broker})

    @listen("user.created", queue="users", retry_delays=(0.02,))
    async def users(user: object, attempt_count: int) -> None:
        if attempt_count == 1:
            raise ConnectionError
        arrivals.put_nowait(user)

    async with outbox.running(relay=True, listeners=[users]):
        await emit_and_commit(outbox)
        assert await arrival(arrivals) == JOHN
        await recorder.wait_for(Handled, 2)
    await outbox.close()
    assert not connection.is_closed  # what was given stays the application's
    await connection.channel()
    await connection.close()


async def test_a_database_in_memory_works_as_the_project_says(rabbitmq_url: str, arrivals: Arrivals) -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite:///:memory:", rabbitmq_url=rabbitmq_url, poll_interval=0.2)

    @listen("user.created", queue="users", retry_delays=())
    async def users(user: object, session: AsyncSession) -> None:
        arrivals.put_nowait(user)

    async with outbox.running(relay=True, listeners=[users]):
        await emit_and_commit(outbox)
        assert await arrival(arrivals) == JOHN
    await outbox.close()


def test_a_url_and_a_connection_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError):
        Outbox(rmq_connection_url="amqp://guest:guest@localhost:5672/", rmq_connection=object())


def test_the_defaults_of_the_broker_are_those_of_the_project() -> None:
    settings = Outbox(rabbitmq_url="amqp://guest:guest@localhost:5672/").settings
    assert settings.exchange_name == "outbox"
    assert settings.queue_prefix == ""
    assert settings.poll_interval == timedelta(seconds=1)


async def test_names_of_the_exchange_and_a_prefix_for_queues_come_from_setup(
    vhost: VirtualHost, channel: AbstractChannel, arrivals: Arrivals
) -> None:
    """A worker with a broker and no database."""
    outbox = Outbox(rabbitmq_url=vhost.url, exchange_name="shop", queue_prefix="eu.", retry_delays=(0.02,))

    @listen("user.*", queue="users")
    async def users(user: object, attempt_count: int, queue_name: str) -> None:
        arrivals.put_nowait((user, attempt_count, queue_name))
        raise ConnectionError

    async with outbox.running(listeners=[users]):
        exchange = await channel.get_exchange("shop")
        await exchange.publish(aio_pika.Message(b'{"id": 123}'), "user.created")
        consumed = [await arrival(arrivals), await arrival(arrivals)]
        letter = await taken(channel, "eu.users.dlq")
    assert consumed == [({"id": 123}, 1, "eu.users"), ({"id": 123}, 2, "eu.users")]
    assert (letter.body, letter.exchange, letter.routing_key) == (b'{"id": 123}', "shop.dlx", "eu.users")
    assert letter.headers["outbox-queue"] == "eu.users"
    assert vhost.exchanges().keys() == {"shop", "shop.dlx", "shop.delay_20ms", "shop.topology_v1"}
    assert vhost.queues().keys() == {"eu.users", "eu.users.dlq", "shop.delay_20ms"}


async def test_a_worker_without_a_database_refuses_a_listener_that_asks_for_a_session(rabbitmq_url: str) -> None:
    @listen("user.created", queue="users")
    async def users(user: object, session: AsyncSession) -> None: ...

    with pytest.raises(ConfigurationError, match="no database"):
        await Outbox(rabbitmq_url=rabbitmq_url).worker([users])


@on_sqlite
async def test_a_table_of_rabbitmq_is_not_for_a_worker_of_the_database(
    make_outbox: MakeOutbox, rabbitmq_outbox: Outbox
) -> None:
    @listen("user.created", queue="users")
    async def users(user: object) -> None: ...

    async with rabbitmq_outbox.running(relay=True):
        pass
    with pytest.raises(TransportMismatch, match=r"'rabbitmq'.*'database'"):
        async with make_outbox().running(listeners=[users]):
            pass


# Singleton vs multiple instances


@on_both_stores
async def test_several_instances_and_the_singleton_work_side_by_side(
    database_url: str, table_name: str, singleton: Outbox, rabbitmq_url: str, arrivals: Arrivals, tmp_path: Path
) -> None:
    """Two databases and one exchange for the instances; the singleton keeps to an exchange of its own."""
    db_engine1 = create_async_engine(database_url)
    db_engine2 = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'second.db'}")
    options: dict[str, Any] = {"rabbitmq_url": rabbitmq_url, "poll_interval": 0.2, "retry_delays": ()}
    outbox1 = Outbox(db_engine=db_engine1, table_name=table_name, **options)
    outbox2 = Outbox(db_engine=db_engine2, **options)
    setup(db_engine=db_engine1, table_name=f"{table_name}_singleton", exchange_name="singleton", **options)

    def listener(name: str) -> Listener:
        async def callback(user: Any) -> None:
            arrivals.put_nowait((name, user["username"]))

        return Listener("user.created", callback, queue=name)

    async with (
        outbox1.running(relay=True, listeners=[listener("first")]),
        outbox2.running(relay=True, listeners=[listener("second")]),
        library.running(relay=True, listeners=[listener("singleton")]),
    ):
        async with AsyncSession(db_engine1) as session:
            await outbox1.emit(session, "user.created", {"id": 123, "username": "johndoe"})
            await session.commit()
        async with AsyncSession(db_engine2) as session:
            await outbox2.emit(session, "user.created", {"id": 456, "username": "maryjane"})
            await session.commit()
        async with AsyncSession(db_engine1) as session:
            await emit(session, "user.created", {"id": 789, "username": "singleton"})
            await session.commit()
        found = {await arrival(arrivals) for _ in range(5)}
    assert found == {
        ("first", "johndoe"),
        ("first", "maryjane"),
        ("second", "johndoe"),
        ("second", "maryjane"),
        ("singleton", "singleton"),
    }
    assert arrivals.empty()
    for outbox in (outbox1, outbox2):
        await outbox.close()
    await singleton.close()
    await db_engine1.dispose()
    await db_engine2.dispose()


# Logging


def said(caplog: pytest.LogCaptureFixture, level: int, *parts: str) -> bool:
    """Whether a record of that level has all these parts."""
    texts = [record.getMessage() for record in caplog.records if (record.name, record.levelno) == ("outbox", level)]
    return any(all(part in text for part in parts) for text in texts)


@on_both_stores
async def test_what_happens_is_logged_at_the_levels_of_the_project(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture, rabbitmq_url: str
) -> None:
    caplog.set_level(logging.DEBUG, "outbox")
    outbox = make_rabbitmq_outbox(retry_delays=(0.02,))

    @listen("user.*", queue="users")
    async def users(user: object, routing_key: str) -> None:
        if routing_key == "user.fails":
            raise ConnectionError("not there")
        if routing_key == "user.rejected":
            raise Reject("never again")

    @listen("user.created", queue="strict")
    async def strict(user: User) -> None: ...

    async with outbox.running(relay=True, listeners=[users, strict]):
        created = await emit_and_commit(outbox, "user.created", {"id": "johndoe"})
        fails = await emit_and_commit(outbox, "user.fails")
        rejected = await emit_and_commit(outbox, "user.rejected")
        await recorder.wait_for(Handled, 5)
        await recorder.wait_for(Relayed, 3)
    assert said(caplog, logging.DEBUG, "users", "user.*")
    for words in ("emitted", "sent", "handled"):
        assert said(caplog, logging.INFO, words, "user.created", created.id)
    assert said(caplog, logging.WARNING, "attempt 1", "user.fails", fails.id, "users", "again in 20ms", "not there")
    assert said(caplog, logging.WARNING, "user.fails", fails.id, "users", "dead", "exhausted")
    assert said(caplog, logging.WARNING, "user.rejected", rejected.id, "dead", "rejected", "never again")
    assert said(caplog, logging.ERROR, "user.created", created.id, "strict", "dead", "undecodable")
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
    assert "johndoe" not in caplog.text
    assert rabbitmq_url not in caplog.text


async def test_unexpected_errors_of_the_broker_are_logged_as_errors_and_outlived(
    vhost: VirtualHost, channel: AbstractChannel, arrivals: Arrivals, caplog: pytest.LogCaptureFixture
) -> None:
    @listen("user.created", queue="users", retry_delays=())
    async def users(user: object) -> None:
        arrivals.put_nowait(user)

    async with Outbox(rabbitmq_url=vhost.url).running(listeners=[users]):
        exchange = await channel.get_exchange("outbox")
        await exchange.publish(aio_pika.Message(b"1"), "user.created")
        assert await arrival(arrivals) == 1
        await channel.queue_delete("users")
        await eventually(lambda: said(caplog, logging.ERROR, "consumer of users"))
        await eventually(lambda: ("users", "user.created") in _bindings(vhost))
        await exchange.publish(aio_pika.Message(b"2"), "user.created")
        assert await arrival(arrivals) == 2
    assert vhost.url not in caplog.text
