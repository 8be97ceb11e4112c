"""An outbox whose relay reads the log, and a destination that tells what it got, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Message, Outbox
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import dropped


class Place:
    """A destination: takes messages, refuses some, holds others back."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.refused: set[str] = set()
        self.opened = asyncio.Event()
        self.opened.set()
        self._came = asyncio.Event()
        self.asked: list[str] = []
        self.held = ""
        self._released = asyncio.Event()

    async def publish(self, message: Message) -> None:
        body = message.body[:20].decode()
        self.asked.append(body)
        await self.opened.wait()
        if body == self.held:
            await self._released.wait()
        if body in self.refused:
            raise ValueError("no")
        self.bodies.append(body)
        self._came.set()

    def release(self) -> None:
        self._released.set()

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(20):
            while len(self.bodies) < count:
                self._came.clear()
                await self._came.wait()
        return self.bodies


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def driver() -> str:
    """The store's; the log is always read through psycopg."""
    return "asyncpg"


@pytest.fixture
def log_url(postgresql_url: str, driver: str) -> str:
    return postgresql_url.replace("postgresql://", f"postgresql+{driver}://", 1)


@pytest.fixture
async def make(log_url: str, table_name: str, place: Place, recorder: Recorder) -> AsyncIterator[Callable[..., Outbox]]:
    made: list[Outbox] = []

    def make(**options: Any) -> Outbox:
        given = {
            "db_engine_url": log_url,
            "table_name": table_name,
            "transport": place.publish,
            "relay_from": "wal",
            "poll_interval": 0.2,
            "observers": [recorder],
            **options,
        }
        made.append(Outbox(**given))
        return made[-1]

    yield make
    last = make()
    await eventually(lambda: dropped(last))
    for outbox in made:
        await outbox.close()


@pytest.fixture
async def outbox(make: Callable[..., Outbox]) -> Outbox:
    outbox = make()
    await outbox.create_tables()
    await outbox.wal.create()
    return outbox


@pytest.fixture
def emit(outbox: Outbox) -> Callable[..., Any]:
    async def emit(*bodies: str, **options: Any) -> None:
        async with outbox.transaction() as session:
            for body in bodies:
                await outbox.emit(session, "order.created", body.encode(), **options)

    return emit


@pytest.fixture
def rows(outbox: Outbox) -> Callable[[], Any]:
    async def rows() -> int:
        async with outbox.transaction() as session:
            found = await session.scalar(text(f"SELECT count(*) FROM {outbox.tables.messages.fullname}"))
        return int(found or 0)

    return rows


@pytest.fixture
def until_empty(rows: Callable[[], Any]) -> Callable[[], Any]:
    async def until_empty() -> None:
        async with asyncio.timeout(20):
            while await rows():
                await asyncio.sleep(0.02)

    return until_empty
