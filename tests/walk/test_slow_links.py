"""A backlog of large messages over a slow connection to the database: it moves, however large the batches are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import make_url

from outbox import Message, Outbox, listen
from outbox.core.errors import DatabaseSilent
from outbox.core.events import Troubled
from outbox.stores import selecting
from tests.support.observing import Recorder, eventually

KIB = 1024
BODY = b"x" * 100 * KIB
BACKLOG = 14
RATE = 1000 * KIB  # bytes a second
WITHIN = 1.0  # seconds for a piece of work: for less than the backlog


@asynccontextmanager
async def slow(host: str, port: int, rate: list[float]) -> AsyncIterator[int]:
    """A proxy that lets so many bytes a second through, for all connections together; its port."""
    pace = asyncio.Lock()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slowly: bool) -> None:
        try:
            while piece := await reader.read(8 * KIB):
                if slowly:
                    async with pace:
                        await asyncio.sleep(len(piece) / rate[0])
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(carry(reader, back, slowly=False), carry(there, writer, slowly=True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=8 * KIB)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("road", ["relay", "worker"])
async def test_a_backlog_that_no_single_claim_can_fetch_in_time_is_delivered(
    postgresql_url: str, table_name: str, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    monkeypatch.setattr("outbox.stores.runner.WORK_WITHIN", WITHIN)
    monkeypatch.setattr(selecting, "AIM", BACKLOG * len(BODY))
    monkeypatch.setattr(selecting, "QUICK", WITHIN / 4)
    url = make_url(postgresql_url).set(drivername="postgresql+asyncpg")
    producer = Outbox(db_engine_url=url, table_name=table_name)
    came: set[int] = set()
    recorder = Recorder()

    async def publish(message: Message) -> None:
        came.add(int(message.headers["number"]))

    @listen("order.*", queue="q", concurrency=BACKLOG)
    async def listener(body: bytes, whole: Message) -> None:
        came.add(int(whole.headers["number"]))

    rate = [1e9]
    async with slow(url.host or "127.0.0.1", url.port or 5432, rate) as port:
        options = {"transport": publish} if road == "relay" else {"prefetch_count": 100}
        outbox = Outbox(
            db_engine_url=url.set(host="127.0.0.1", port=port), table_name=table_name, observers=[recorder], **options
        )
        await outbox.create_tables()
        if road == "worker":
            await outbox.store.queues.bind([listener.binding])
        async with producer.transaction() as session:
            for number in range(BACKLOG):
                await producer.emit(session, "order.created", BODY, headers={"number": str(number)})
        if road == "worker":
            await producer.store.queues.route(BACKLOG, {})
        running = outbox.running(relay=True) if road == "relay" else outbox.running(listeners=[listener])
        async with running:
            rate[0] = RATE
            await eventually(lambda: len(came) == BACKLOG)
            rate[0] = 1e9
        assert [type(event.error) for event in recorder.of(Troubled)].count(DatabaseSilent) >= 1
        await outbox.close()
    assert await producer.messages() == []
    await producer.close()
