"""The proxy does what it says to a connection, and nothing to one that it should leave alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aio_pika
import psycopg
import pytest
from sqlalchemy import make_url
from yarl import URL

from outbox.testing.servers.private_server import free_port
from tests.support.broker import VirtualHost
from tests.support.proxy import CONFIRM, Link, Proxy

SOON = 30.0  # seconds
LONG_ENOUGH = 0.5  # seconds without an answer where one would take milliseconds


@pytest.fixture
def link(postgresql_url: str) -> Iterator[Link]:
    port = make_url(postgresql_url).port
    assert port is not None
    with Proxy() as proxy:
        yield proxy.link("worker-1.1", port)


@asynccontextmanager
async def connected(link: Link, postgresql_url: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[object, ...]]]:
    url = make_url(postgresql_url).set(port=link.port).render_as_string(hide_password=False)
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    try:
        yield connection
    finally:
        await connection.close()


async def test_a_connection_bears_the_name_of_its_link(link: Link, postgresql_url: str) -> None:
    async with connected(link, postgresql_url) as connection:
        cursor = await connection.execute("SHOW application_name")
        assert await cursor.fetchone() == ("worker-1.1",)


async def test_a_large_answer_comes_through_whole(link: Link, postgresql_url: str) -> None:
    async with connected(link, postgresql_url) as connection:
        cursor = await connection.execute("SELECT number, repeat('x', 1000) FROM generate_series(1, 2000) AS number")
        rows = await cursor.fetchall()
    assert [row[0] for row in rows] == list(range(1, 2001))
    assert {row[1] for row in rows} == {"x" * 1000}


async def test_a_new_connection_leads_to_the_next_server_where_one_is_gone(link: Link, postgresql_url: str) -> None:
    link.server_ports = (free_port(), *link.server_ports)
    async with connected(link, postgresql_url) as connection:
        await connection.execute("SELECT 1")


async def test_where_no_server_is_a_connection_ends(link: Link, postgresql_url: str) -> None:
    link.server_ports = (free_port(), free_port())
    with pytest.raises(psycopg.OperationalError):
        async with connected(link, postgresql_url):
            pass


async def test_a_cut_ends_connections_and_the_next_one_works(link: Link, postgresql_url: str) -> None:
    async with connected(link, postgresql_url) as connection:
        assert link.cut() == 1
        with pytest.raises(psycopg.OperationalError):
            while True:
                await connection.execute("SELECT 1")
    async with connected(link, postgresql_url) as connection:
        await connection.execute("SELECT 1")


async def test_a_commit_whose_answer_is_cut_off_has_happened(link: Link, postgresql_url: str, table_name: str) -> None:
    async with connected(link, postgresql_url) as connection:
        await connection.execute(f"CREATE TABLE {table_name} (id integer)")
        link.trip_at(["COMMIT"])
        with pytest.raises(psycopg.OperationalError):
            async with connection.transaction():
                await connection.execute(f"INSERT INTO {table_name} VALUES (1)")
    assert link.tripped.is_set()
    async with connected(link, postgresql_url) as connection:
        async with connection.transaction():  # it strikes once
            cursor = await connection.execute(f"SELECT id FROM {table_name}")
            assert await cursor.fetchall() == [(1,)]
        await connection.execute(f"DROP TABLE {table_name}")


async def test_at_a_tripwire_that_hangs_nothing_is_answered_any_more(
    link: Link, postgresql_url: str, table_name: str
) -> None:
    async with connected(link, postgresql_url) as connection:
        await connection.execute(f"CREATE TABLE {table_name} (id integer)")
        link.trip_at(["INSERT"], hangs=True)
        asking = asyncio.ensure_future(connection.execute(f"INSERT INTO {table_name} VALUES (1)"))
        answered, _ = await asyncio.wait([asking], timeout=LONG_ENOUGH)
        assert link.tripped.is_set() and not answered
        link.heal()
        async with asyncio.timeout(SOON):
            with pytest.raises(psycopg.OperationalError):
                await asking
    link.trip_at([])
    async with connected(link, postgresql_url) as connection:
        cursor = await connection.execute(f"SELECT id FROM {table_name}")
        assert await cursor.fetchall() == [(1,)]
        await connection.execute(f"DROP TABLE {table_name}")


async def test_a_black_hole_answers_nothing_and_ends_in_a_reset(link: Link, postgresql_url: str) -> None:
    async with connected(link, postgresql_url) as connection:
        link.swallow()
        asking = asyncio.ensure_future(connection.execute("SELECT 1"))
        connecting = asyncio.ensure_future(connected(link, postgresql_url).__aenter__())
        answered, _ = await asyncio.wait([asking, connecting], timeout=LONG_ENOUGH)
        assert not answered
        link.heal()
        async with asyncio.timeout(SOON):
            with pytest.raises(psycopg.OperationalError):
                await asking
            await asyncio.wait([connecting])
        if connecting.exception() is None:  # it had sent nothing that could be swallowed
            await connecting.result().close()


async def test_a_delay_holds_answers_back(link: Link, postgresql_url: str) -> None:
    async with connected(link, postgresql_url) as connection:
        link.slow_down(LONG_ENOUGH / 2)
        began = time.monotonic()
        await connection.execute("SELECT 1")
        assert time.monotonic() - began >= LONG_ENOUGH  # there and back
        link.heal()
        await connection.execute("SELECT 1")


async def test_a_message_whose_confirm_is_cut_off_is_in_its_queue(vhost: VirtualHost) -> None:
    address = URL(vhost.url)
    with Proxy() as proxy:
        link = proxy.broker_link("relay-1.1", address.port or 5672)
        connection = await aio_pika.connect(address.with_port(link.port))
        channel = await connection.channel()
        queue = await channel.declare_queue("facts", durable=True)
        message = aio_pika.Message(b"x" * 200_000)
        await channel.default_exchange.publish(message, "facts", timeout=SOON)
        link.trip_at([CONFIRM])
        with pytest.raises(aio_pika.exceptions.AMQPError):
            await channel.default_exchange.publish(message, "facts", timeout=SOON)
        assert link.tripped.is_set()
        async with await aio_pika.connect(address.with_port(link.port)) as again:
            channel = await again.channel()
            queue = await channel.get_queue("facts")
            bodies = [(await queue.get(no_ack=True, timeout=SOON)).body for _ in range(2)]
        assert bodies == [message.body, message.body]
