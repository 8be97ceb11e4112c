"""Outages: what the log of a relay and of a worker says while the database is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Outbox
from outbox.core.events import Handled, Recovered, Troubled
from outbox.testing.servers import PostgreSQL
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import emit


@pytest.fixture
def server() -> Iterator[PostgreSQL]:
    """One that may be stopped."""
    with PostgreSQL() as server:
        yield server


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_database_that_is_restarted_is_two_lines_of_the_log(
    server: PostgreSQL, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()

    async def plain(number: int) -> None: ...

    async def in_session(number: int, session: AsyncSession) -> None: ...

    listeners = [Listener("order.*", plain, queue=f"plain{number}") for number in range(3)]
    listeners.append(Listener("order.*", in_session, queue="in_session"))
    url = server.url.replace("postgresql:", f"postgresql+{driver}:")
    outbox = Outbox(db_engine_url=url, poll_interval=0.1, restart_delay=0.1, observers=[recorder])
    with caplog.at_level(logging.WARNING):
        async with outbox.running(listeners=listeners):
            await emit(outbox, *range(5))
            await recorder.wait_for(Handled, 20)
            await asyncio.to_thread(server.stop)
            await recorder.wait_for(Troubled, 20)
            await asyncio.to_thread(server.start)
            await recorder.wait_for(Recovered)
            await eventually(lambda: _emitted(outbox))
            await recorder.wait_for(Handled, 24)
        await outbox.close()
    begins, ends = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "outbox"]
    assert begins[0] == "ERROR" and "; again in 100ms" in begins[1]
    assert ends[0] == "WARNING" and ends[1].startswith("the database answers again after ")


async def test_a_busy_worker_tells_no_end_of_an_outage_before_the_database_is_back(
    server: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, running, go_on = Recorder(), set[int](), asyncio.Event()

    async def slow(number: int) -> None:
        running.add(number)
        await go_on.wait()

    def of_the_router() -> list[Troubled]:
        return [event for event in recorder.of(Troubled) if event.where == "relay"]

    outbox = Outbox(
        db_engine_url=server.url, poll_interval=0.2, restart_delay=0.1, prefetch_count=5, observers=[recorder]
    )
    with caplog.at_level(logging.WARNING):
        async with outbox.running(listeners=[Listener("order.*", slow, queue="orders")]):
            await emit(outbox, *range(20))
            await eventually(lambda: len(running) == 5)  # the queue is full, and wants nothing of the router
            await asyncio.to_thread(server.stop)
            await eventually(lambda: len(of_the_router()) >= 3)
            too_early = recorder.of(Recovered)
            await asyncio.to_thread(server.start)
            await recorder.wait_for(Recovered)
            go_on.set()
            await recorder.wait_for(Handled, 20)
        await outbox.close()
    assert too_early == []
    begins, ends = [record.getMessage() for record in caplog.records if record.name == "outbox"]
    assert "; again in 100ms" in begins
    assert ends.startswith("the database answers again after ")


async def _emitted(outbox: Outbox) -> bool:
    """Producers of the same process get the database's error until it is back."""
    try:
        await emit(outbox, *range(1))
    except Exception:  # noqa: BLE001 - drivers throw what they like
        await asyncio.sleep(0.05)
        return False
    return True
