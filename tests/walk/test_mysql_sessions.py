"""What callers have made of their sessions on MariaDB: time zones, sql_mode, character sets, autocommit, packets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import BodyTooLarge, ConfigurationError, Listener, Message, NotAtomicWarning, Outbox, TransactionError
from outbox.core.attempt import Done
from outbox.core.binding import Binding
from outbox.core.diagnosis import Level
from outbox.core.store import Selection
from outbox.doctor import examine
from outbox.testing.servers import MariaDB
from tests.support.databases import url_on
from tests.support.mariadb import statement
from tests.support.observing import arrival, eventually
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Watch

ODD = "straße 🚀 ключ \\' \" % %s"


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """MariaDB alone."""
    return url_on(request, "mysql+asyncmy", tmp_path)


@asynccontextmanager
async def engine_on(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def told(url: str, *statements: str) -> AsyncIterator[AsyncSession]:
    """A session whose connection was told something first."""
    async with engine_on(url) as engine, AsyncSession(engine) as session, session.begin():
        for each in statements:
            await session.execute(text(each))
        yield session


# Time zones

ZONES = ["+00:00", "+05:30", "-11:00"]


@pytest.mark.parametrize("zone", ZONES)
async def test_times_are_utc_whatever_the_sessions_time_zone_is(
    make_outbox: MakeOutbox, database_url: str, zone: str
) -> None:
    outbox = make_outbox()
    due = datetime.now(UTC) + timedelta(hours=2)
    async with told(database_url, f"SET time_zone = '{zone}'") as session:
        at_once = await outbox.emit(session, "a", 1, expiration=timedelta(hours=1))
        await outbox.emit(session, "a", 2, eta=due)
        await outbox.emit(session, "a", 3, eta=timedelta(hours=1), timer_id="t")
    first, second, third = sorted(await outbox.messages(), key=lambda stored: stored.row_id)
    assert at_once is not None and first.message.created_at == at_once.created_at
    minute = timedelta(minutes=1)
    now = datetime.now(UTC)
    assert abs(first.due_at - now) < minute and second.due_at == due
    assert abs(third.due_at - now - timedelta(hours=1)) < minute
    assert first.message.expires_at is not None
    assert abs(first.message.expires_at - now - timedelta(hours=1)) < minute
    async with outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=30))) as claim:
        [attempt] = claim.attempts
        assert attempt.message.body == b"1"
        await claim.settle({attempt.id: Done()})
    async with told(database_url, f"SET time_zone = '{zone}'") as session:
        assert await outbox.cancel_timer(session, "t")


async def test_a_server_in_another_time_zone_delivers_at_the_right_time(table_name: str, watch: Watch) -> None:
    with MariaDB(settings={"default-time-zone": "+05:30"}) as server:
        url = server.url.replace("mariadb://", "mysql+asyncmy://")
        outbox = Outbox(db_engine_url=url, table_name=table_name, poll_interval=0.1, observers=[watch])
        arrivals: asyncio.Queue[Any] = asyncio.Queue()

        async def listener(body: int, message: Message) -> None:
            await arrivals.put((body, time.monotonic()))

        try:
            async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
                begun = time.monotonic()
                await emit(outbox, 1, eta=timedelta(seconds=1.5))
                await emit(outbox, 2)
                first, second = [await arrival(arrivals) for _ in range(2)]
        finally:
            await outbox.close()
    assert (first[0], second[0]) == (2, 1)
    assert 1.4 < second[1] - begun < 30


# Nothing is truncated or changed


@pytest.mark.parametrize("mode", ["", "ANSI,TRADITIONAL", "PIPES_AS_CONCAT,HIGH_NOT_PRECEDENCE"])
async def test_nothing_is_changed_in_any_mode(make_outbox: MakeOutbox, database_url: str, mode: str) -> None:
    outbox = make_outbox()
    longest = "🚀" * 63 + "abc"
    options: dict[str, Any] = {
        "key": ODD,
        "headers": {"tenant": ODD, "long": "ü" * 5000},
        "content_type": "application/" + "x" * 88,
    }
    async with told(database_url, f"SET SESSION sql_mode = '{mode}'") as session:
        sent = [
            await outbox.emit(session, longest, bytes(range(256)) * 100, **options),
            await outbox.emit(session, "a", ODD, timer_id=ODD, eta=timedelta(hours=1)),
        ]
        assert await outbox.emit(session, "a", 1, timer_id=ODD, eta=timedelta(hours=1)) is None
    assert [stored.message for stored in await outbox.messages()] == sent
    async with told(database_url, f"SET SESSION sql_mode = '{mode}'") as session:
        assert await outbox.cancel_timer(session, ODD)


async def test_asyncmy_is_refused_where_it_would_store_backslashes_in_bytes(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    outbox = make_outbox()
    await outbox.create_tables()
    async with told(database_url, "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'") as session:
        with pytest.raises(TransactionError, match="NO_BACKSLASH_ESCAPES"):
            await outbox.emit(session, "a", {"id": 1})
    assert await outbox.messages() == []

    def emit_plainly() -> None:
        engine = create_engine(database_url.replace("asyncmy", "pymysql"))
        with Session(engine) as session, session.begin():
            session.execute(text("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"))
            outbox.emit_sync(session, "a", {"id": ODD})
        engine.dispose()

    await asyncio.to_thread(emit_plainly)
    [stored] = await outbox.messages()
    assert json.loads(stored.message.body) == {"id": ODD}


@pytest.mark.parametrize("charset", ["utf8mb4", "utf8mb3"])
async def test_nothing_is_changed_over_a_connection_of_another_charset(
    make_outbox: MakeOutbox, database_url: str, charset: str
) -> None:
    """What such a connection cannot carry is refused, and not stored as question marks."""
    outbox = make_outbox()
    await outbox.create_tables()
    sent = None
    async with engine_on(database_url) as engine, AsyncSession(engine) as session:
        await session.execute(text(f"SET NAMES {charset}"))
        try:
            sent = await outbox.emit(session, ODD, ODD, key=ODD, headers={"tenant": ODD})
            await session.commit()
        except DBAPIError:
            assert charset != "utf8mb4"
            await session.rollback()
    stored = [stored.message for stored in await outbox.messages()]
    assert stored in ([sent], []) and (stored or charset != "utf8mb4")


async def test_names_that_differ_in_spaces_case_or_accents_are_different_names(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    names = ["a", "a ", "a  ", "A", "á", "ａ"]  # noqa: RUF001 - the last one is a wide letter
    outbox = make_outbox(observers=[watch])
    seen: list[tuple[str, str]] = []

    def listener_of(name: str) -> Listener:
        async def note(body: str, message: Message) -> None:
            seen.append((name, body))

        return Listener(name, note, queue=f"q{name}")

    async with outbox.running(listeners=[listener_of(name) for name in names]):
        for name in names:
            async with outbox.transaction() as session:
                await outbox.emit(session, name, name)
        await eventually(lambda: len(seen) >= len(names))
        await asyncio.sleep(0.3)
    assert sorted(seen) == sorted((name, name) for name in names)

    async with outbox.transaction() as session:
        for name in names:
            assert await outbox.emit(session, "later", name, timer_id=name, eta=timedelta(hours=1)) is not None
        assert await outbox.cancel_timer(session, "a ")
        assert not await outbox.cancel_timer(session, "a ")
        assert await outbox.cancel_timer(session, "a")

    await outbox.store.queues.bind([Binding("inbox", "#")])
    async with outbox.transaction() as session:
        for name in names:
            message = Message(routing_key="x", body=b"1", tracking_ids=(f"id-{name}",))
            assert await outbox.receive(session, "inbox", message)
            assert not await outbox.receive(session, "inbox", message)


# Autocommit


@pytest.mark.parametrize(
    "options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}], ids=["engine", "driver"]
)
async def test_emit_in_autocommit_warns(make_outbox: MakeOutbox, database_url: str, options: dict[str, Any]) -> None:
    outbox = make_outbox()
    await outbox.create_tables()
    async with engine_on(database_url, **options) as engine, AsyncSession(engine) as session:
        with pytest.warns(NotAtomicWarning, match="AUTOCOMMIT"):
            await outbox.emit(session, "a", 1)
        await session.rollback()
    assert len(await outbox.messages()) == 1


@pytest.mark.parametrize(
    "options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}], ids=["engine", "driver"]
)
async def test_a_plain_session_in_autocommit_is_warned_of_too(
    make_outbox: MakeOutbox, database_url: str, options: dict[str, Any]
) -> None:
    outbox = make_outbox()
    await outbox.create_tables()

    def emit_plainly() -> None:
        engine = create_engine(database_url.replace("asyncmy", "pymysql"), **options)
        with Session(engine) as session, pytest.warns(NotAtomicWarning, match="AUTOCOMMIT"):
            outbox.emit_sync(session, "a", 1)
            session.rollback()
        engine.dispose()

    await asyncio.to_thread(emit_plainly)
    assert len(await outbox.messages()) == 1


@pytest.mark.parametrize(
    "options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}], ids=["engine", "driver"]
)
async def test_a_worker_on_an_engine_in_autocommit_is_refused_at_its_start(
    make_outbox: MakeOutbox, database_url: str, options: dict[str, Any]
) -> None:
    async def listener(body: int, session: AsyncSession) -> None: ...

    async with engine_on(database_url, **options) as engine:
        outbox = make_outbox(db_engine=engine)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
                pass


# Packets

MIB = 1024 * 1024


async def test_a_body_that_fits_into_no_packet_is_refused_and_found_before_it_happens(table_name: str) -> None:
    with MariaDB(settings={"max-allowed-packet": str(2 * MIB)}) as server:
        url = server.url.replace("mariadb://", "mysql+asyncmy://")
        outbox = Outbox(db_engine_url=url, table_name=table_name, max_body_size=4 * MIB)
        try:
            await outbox.create_tables()
            told = [finding for finding in await examine(outbox) if finding.subject == "bodies"]
            async with outbox.transaction() as session:
                sent = await outbox.emit(session, "a", b"x" * MIB)
            with pytest.raises(BodyTooLarge, match=f"max_allowed_packet={2 * MIB}"):
                async with outbox.transaction() as session:
                    await outbox.emit(session, "a", b"x" * (3 * MIB))
            assert [stored.message for stored in await outbox.messages()] == [sent]
            assert [finding.level for finding in told] == [Level.WARNING]
            assert f"max_body_size={4 * MIB}" in told[0].what and "max_allowed_packet" in told[0].advice
        finally:
            await outbox.close()


async def test_bodies_of_the_largest_size_pass_in_both_directions(make_outbox: MakeOutbox, mariadb_url: str) -> None:
    [(largest,)] = statement(mariadb_url, "SELECT @@max_allowed_packet")
    outbox = make_outbox(max_body_size=largest)
    body = bytes(range(256)) * ((largest - MIB) // 256 // 3)  # each byte may take two, escaped
    async with outbox.transaction() as session:
        sent = await outbox.emit(session, "a", body)
    async with outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=30))) as claim:
        [attempt] = claim.attempts
        assert attempt.message == sent
