"""The line: one connection for wake-ups and for the statements that a message waits for, if it leads anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Executable, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox import Message, Outbox
from outbox.core.attempt import Done
from outbox.core.binding import Binding
from outbox.core.store import Routing, Selection, Wanted
from outbox.stores.callers import PlacingStatements
from outbox.stores.postgresql import PostgresqlStore, connection, wakeup
from outbox.stores.postgresql.connection import DirectConnection, Line
from outbox.stores.postgresql.wakeup import Notifier
from outbox.stores.rows import placed_row
from tests.support.observing import PATIENCE
from tests.walk.cutting import connections_taken

LEASE = timedelta(seconds=60)


class Straight:
    """A store that listens, and an administrator beside it."""

    def __init__(self, outbox: Outbox, admin: AsyncEngine) -> None:
        assert isinstance(outbox.store, PostgresqlStore)
        self.outbox = outbox
        self.store = outbox.store
        self._admin = admin

    async def line(self, other_than: Line | None = None) -> Line:
        """The line, once there is one."""
        async with asyncio.timeout(PATIENCE):
            while True:
                await self.store.feed.wait(0.01)
                line = self.store.runner.direct.line
                if line is not None and line is not other_than and line.is_free and line._raw._listeners:
                    return line

    async def emit(self) -> None:
        async with self.outbox.transaction() as session:
            await self.outbox.emit(session, "order.created", 1)

    async def handled(self) -> int:
        """Route and settle what is there; how many messages that were."""
        count = 0
        for claim in (await self.routed()).claims.values():
            async with claim:
                assert not await claim.settle({attempt.id: Done() for attempt in claim.attempts})
                count += len(claim.attempts)
        return count

    async def routed(self) -> Routing:
        return await self.store.queues.route(10, {}, {"q": Wanted(10, LEASE)})

    async def cut(self, line: Line) -> None:
        """End the line from the server's side."""
        async with self._admin.connect() as connection:
            await connection.execute(text(f"SELECT pg_terminate_backend({line._raw.get_server_pid()})"))


@pytest.fixture
async def straight(postgresql_url: str, table_name: str) -> AsyncIterator[Straight]:
    url = make_url(postgresql_url).set(drivername="postgresql+asyncpg")
    admin = create_async_engine(url)
    outbox = Outbox(db_engine_url=url, table_name=table_name)
    await outbox.create_tables()
    await outbox.store.queues.bind([Binding("q", "#")])
    straight = Straight(outbox, admin)
    await straight.emit()
    assert await straight.handled() == 1  # by the long way: the routing key is known from now on
    yield straight
    await outbox.close()
    await admin.dispose()


async def test_known_messages_are_routed_over_the_line(straight: Straight, monkeypatch: pytest.MonkeyPatch) -> None:
    line = await straight.line()
    asked: list[Executable] = []

    async def ask(statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        asked.append(statement)
        return await Line.ask(line, statement, parameters)

    monkeypatch.setattr(line, "ask", ask)
    selecting: Any = straight.store.feed.selecting
    async with asyncio.timeout(PATIENCE):
        while selecting._route_statement not in asked:  # now and then a notification is in its way
            await straight.emit()
            assert await straight.handled() == 1


async def test_a_line_that_is_cut_loses_nothing_and_comes_back(straight: Straight) -> None:
    line = await straight.line()
    for _ in range(3):
        await straight.emit()
        await straight.cut(line)
        handled = 0
        async with asyncio.timeout(PATIENCE):
            while not handled:
                try:
                    handled = await straight.handled()
                except Exception:  # noqa: BLE001 - the driver's word for a connection that ended
                    await asyncio.sleep(0.01)
        line = await straight.line(other_than=line)
    assert (await straight.outbox.backlog()).waiting == 0


async def test_while_the_line_is_busy_others_go_through_the_pool(straight: Straight) -> None:
    line = await straight.line()
    await straight.emit()
    async with line._turn:
        assert await straight.handled() == 1


async def test_a_line_that_somebody_gave_up_is_ended(straight: Straight) -> None:
    """Nobody could tell what the next statement's answer belongs to."""
    line = await straight.line()
    sleeping = asyncio.create_task(line.ask(text("SELECT pg_sleep(CAST(:seconds AS float))"), {"seconds": 60.0}))
    while line.is_free:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    sleeping.cancel()
    await asyncio.wait([sleeping])
    assert line.is_closed
    await straight.emit()
    await straight.line(other_than=line)
    assert await straight.handled() == 1


async def test_while_nothing_happens_only_the_line_is_asked(straight: Straight) -> None:
    """And what nobody was told of is found all the same."""
    await straight.line()
    store = straight.store
    statements: list[str] = []

    def count(connection: Connection, _: object, statement: str, *__: object) -> None:
        if "pg_notify" not in statement:  # on a busy machine a wake-up for a commit from before may come this late
            statements.append(statement)

    async def claimed() -> int:
        async with store.feed.claim(Selection(limit=10, lease=LEASE, destination="q")) as claim:
            assert not await claim.settle({attempt.id: Done() for attempt in claim.attempts})
            return len(claim.attempts)

    assert await claimed() == 0
    event.listen(Engine, "before_cursor_execute", count)
    try:
        for _ in range(3):
            await store.feed.wait(0.25, destination="q")
            assert await claimed() == 0
        assert statements == []
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    silent = Message(routing_key="order.created", body=b"1")
    await store.runner.transact(
        lambda connection: PlacingStatements(store.tables, store.dialect).place_all(
            connection, [placed_row("q", silent)]
        )
    )
    assert await claimed() == 1


async def test_a_line_that_comes_too_late_is_closed(straight: Straight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LATE_CONNECTION", 0.01)
    monkeypatch.setattr(wakeup, "LATE_CONNECTION", 0.01)
    store = straight.store
    connect, may_connect, asked = store.runner.spare_engine, asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncEngine:
        asked.set()
        await may_connect.wait()
        return await connect()

    await straight.line()  # it is no line that nobody closed
    coming = DirectConnection(slowly, store.runner.driver, store.runner)
    notifier = Notifier(store.tables, store.dialect, store.runner, coming, store.wakeup)
    with connections_taken() as taken:
        await notifier.listen(0)
        async with asyncio.timeout(PATIENCE):
            await asked.wait()
        await notifier.close()
        may_connect.set()
        async with asyncio.timeout(PATIENCE):
            while coming._letting_go:
                await asyncio.sleep(0.01)
        assert not taken
