"""Listeners at REPEATABLE READ or SERIALIZABLE: the renewal of their own lease is not in their way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import Listener, listen
from outbox.core.attempt import Dead, Done
from outbox.core.events import Conflicted, LeaseWasLost
from tests.support.databases import on_asyncpg
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch

LEASE = 1.5  # seconds: it is renewed at a third
LONG = 0.7  # seconds that a listener takes: the lease would be renewed meanwhile, and has not run out
LIMIT = 20.0


class Long:
    """A listener of each kind that reads, takes long, and writes."""

    def __init__(self, effects: Effects, kind: str, **options: Any) -> None:
        self._effects = effects
        self.runs = 0
        callbacks: dict[str, Callable[..., Any]] = {"async": self._awaited, "plain": self._plain, "list": self._many}
        batch = 10 if kind == "list" else None
        self.listener = Listener(
            "#", callbacks[kind], queue="q", retry_delays=(), timeout=LIMIT, batch=batch, **options
        )

    async def _awaited(self, body: int, session: AsyncSession) -> None:
        await self._many([body], session)

    async def _many(self, bodies: list[int], session: AsyncSession) -> None:
        self.runs += 1
        await session.execute(select(self._effects.table))
        await asyncio.sleep(LONG)
        for body in bodies:
            await session.execute(self._effects.write(str(body)))

    def _plain(self, body: int, session: Session) -> None:
        self.runs += 1
        session.execute(select(self._effects.table))
        time.sleep(LONG)
        session.execute(self._effects.write(str(body)))


@on_asyncpg
@pytest.mark.parametrize(
    "kind, level", [("async", "REPEATABLE READ"), ("plain", "SERIALIZABLE"), ("list", "repeatable_read")]
)
async def test_a_listener_that_keeps_its_snapshot_may_take_longer_than_a_third_of_its_lease(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, kind: str, level: str
) -> None:
    outbox = make_outbox(lease=LEASE, observers=[watch])
    long = Long(effects, kind, isolation_level=level)
    await emit(outbox, 1)
    async with outbox.running(listeners=[long.listener]):
        assert await watch.outcomes(1) == [Done(in_transaction=True)]
    assert (long.runs, watch.of(Conflicted), watch.of(LeaseWasLost)) == (1, [], [])
    assert await effects.all() == ["1"]


@asynccontextmanager
async def strict_engine(url: str, where: str) -> AsyncIterator[AsyncEngine]:
    """An engine whose transactions keep their snapshots, although no listener says so."""
    if where == "engine":
        engine = create_async_engine(url, isolation_level="REPEATABLE READ")
    elif "asyncpg" in url:
        settings = {"default_transaction_isolation": "repeatable read"}
        engine = create_async_engine(url, connect_args={"server_settings": settings})
    else:
        options = r"-c default_transaction_isolation=repeatable\ read"
        engine = create_async_engine(url, connect_args={"options": options})
    try:
        yield engine
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    "database_url, where",
    [("postgresql+asyncpg", "engine"), ("postgresql+asyncpg", "server"), ("postgresql+psycopg", "server")],
    indirect=["database_url"],
)
async def test_the_same_where_it_is_the_default(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str, where: str
) -> None:
    async with strict_engine(database_url, where) as engine:
        outbox = make_outbox(db_engine=engine, lease=LEASE, observers=[watch])
        long = Long(effects, "async")
        await emit(outbox, 1, 2, 3)
        async with outbox.running(listeners=[long.listener]):
            assert await watch.outcomes(3) == [Done(in_transaction=True)] * 3
    assert (long.runs, watch.of(Conflicted), watch.of(LeaseWasLost)) == (3, [], [])
    assert sorted(await effects.all()) == ["1", "2", "3"]


@on_asyncpg
async def test_its_lease_lasts_for_its_timeout_and_the_grace_and_others_are_renewed_meanwhile(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    """One at a time: the second message waits in the same claim as the first."""
    outbox = make_outbox(lease=3 * LEASE, grace=5, observers=[watch])
    leases: list[tuple[datetime, ...]] = []

    async def look() -> tuple[datetime, ...]:
        stored = sorted(await outbox.messages(), key=lambda each: each.row_id)
        return tuple(each.leased_until for each in stored if each.leased_until is not None)

    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write(str(body)))
        leases.append(await look())
        while body == 1 and leases[-1][1] == leases[0][1]:
            await asyncio.sleep(0.01)
            leases.append(await look())

    began = datetime.now(UTC)
    options: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "timeout": LIMIT, "concurrency": 1}
    await emit(outbox, 1, 2)
    async with outbox.running(listeners=[Listener("#", listener, queue="q", retry_delays=(), **options)]):
        assert await watch.outcomes(2) == [Done(in_transaction=True)] * 2
    assert watch.of(Conflicted) == []
    own, others = leases[0]
    assert own - began > timedelta(seconds=LIMIT + 5) and others - began < timedelta(seconds=LIMIT)
    assert leases[-2][0] == own and leases[-2][1] > others


@on_asyncpg
async def test_what_on_error_writes_in_such_a_transaction_commits_with_the_end_of_the_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str
) -> None:
    async def listener(body: int, session: AsyncSession) -> None:
        raise ValueError("failed")

    async def on_error(error: BaseException, message: object, session: AsyncSession, attempt: object) -> None:
        await session.execute(select(effects.table))
        await asyncio.sleep(LONG)
        await session.execute(effects.write("noted"))

    async with strict_engine(database_url, "server") as engine:
        outbox = make_outbox(db_engine=engine, lease=LEASE, observers=[watch])
        await emit(outbox, 1)
        noting = Listener("#", listener, queue="q", retry_delays=(), on_error=on_error, timeout=LIMIT)
        async with outbox.running(listeners=[noting]):
            [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and outcome.in_transaction
    assert await effects.all() == ["noted"]
    assert watch.of(Conflicted) == []


# Sessions that read as soon as they begin, as to set a tenant for row-level security: that takes the snapshot.

SET_TENANT = "SELECT set_config('app.tenant', 'a', true)"


@asynccontextmanager
async def reading_sessions(url: str, where: str) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """A factory of sessions that read when they begin, by a hook of the session or of its engine."""
    engine = create_async_engine(url)

    class Reading(Session):
        pass

    if where == "session":
        event.listen(Reading, "after_begin", lambda session, transaction, own: own.execute(text(SET_TENANT)))
    elif where == "engine":
        event.listen(engine.sync_engine, "begin", lambda own: own.exec_driver_sql(SET_TENANT))
    try:
        yield async_sessionmaker(engine, sync_session_class=Reading)
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    "database_url, where, kind",
    [
        ("postgresql+asyncpg", "session", "async"),
        ("postgresql+asyncpg", "engine", "async"),
        ("postgresql+asyncpg", "session", "list"),
        ("postgresql+psycopg", "session", "async"),
        ("postgresql+psycopg", "engine", "list"),
    ],
    indirect=["database_url"],
)
async def test_a_session_that_reads_when_it_begins_does_not_collide_with_its_own_lease(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str, where: str, kind: str
) -> None:
    async with reading_sessions(database_url, where) as factory:
        outbox = make_outbox(lease=LEASE, observers=[watch])
        long = Long(effects, kind, isolation_level="REPEATABLE READ", session_factory=factory, concurrency=1)
        for number in range(1, 3):
            await emit(outbox, number)
            async with outbox.running(listeners=[long.listener]):
                assert await watch.outcomes(number) == [Done(in_transaction=True)] * number
    assert (long.runs, watch.of(Conflicted), watch.of(LeaseWasLost)) == (2, [], [])
    assert await effects.all() == ["1", "2"]


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
@pytest.mark.parametrize("where", ["session", "engine"])
async def test_a_plain_session_that_reads_when_it_begins_does_not_either(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str, where: str
) -> None:
    engine = create_engine(database_url.replace("+asyncpg", "+psycopg"))

    class Reading(Session):
        pass

    if where == "session":
        event.listen(Reading, "after_begin", lambda session, transaction, own: own.execute(text(SET_TENANT)))
    else:
        event.listen(engine, "begin", lambda own: own.exec_driver_sql(SET_TENANT))
    outbox = make_outbox(lease=LEASE, observers=[watch])
    factory = sessionmaker(engine, class_=Reading)
    long = Long(effects, "plain", isolation_level="SERIALIZABLE", session_factory=factory)
    await emit(outbox, 1)
    async with outbox.running(listeners=[long.listener]):
        assert await watch.outcomes(1) == [Done(in_transaction=True)]
    engine.dispose()
    assert (long.runs, watch.of(Conflicted), watch.of(LeaseWasLost)) == (1, [], [])


@on_asyncpg
async def test_an_on_error_whose_session_reads_when_it_begins_does_not_either(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str
) -> None:
    async def listener(body: int, session: AsyncSession) -> None:
        raise ValueError("failed")

    async def on_error(error: BaseException, message: object, session: AsyncSession, attempt: object) -> None:
        await asyncio.sleep(LONG)
        await session.execute(effects.write("noted"))

    async with strict_engine(database_url, "server") as engine:
        event.listen(engine.sync_engine, "begin", lambda own: own.exec_driver_sql(SET_TENANT))
        outbox = make_outbox(lease=LEASE, observers=[watch])
        await emit(outbox, 1)
        noting = Listener(
            "#",
            listener,
            queue="q",
            retry_delays=(),
            on_error=on_error,
            timeout=LIMIT,
            session_factory=async_sessionmaker(engine),
        )
        async with outbox.running(listeners=[noting]):
            [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and outcome.in_transaction
    assert (await effects.all(), watch.of(Conflicted)) == (["noted"], [])


@on_asyncpg
async def test_where_sessions_read_when_they_begin_only_the_first_is_begun_twice(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str
) -> None:
    async with reading_sessions(database_url, "engine") as factory:
        begun: list[str] = []
        event.listen(factory.kw["bind"].sync_engine, "begin", lambda own: begun.append("begun"))
        outbox = make_outbox(observers=[watch])

        async def listener(body: int, session: AsyncSession) -> None:
            await session.execute(effects.write(str(body)))

        options: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "session_factory": factory, "concurrency": 1}
        async with outbox.running(listeners=[Listener("#", listener, queue="q", retry_delays=(), **options)]):
            await emit(outbox, 1)
            await watch.outcomes(1)
            begun.clear()
            await emit(outbox, 2, 3)
            assert await watch.outcomes(3) == [Done(in_transaction=True)] * 3
    assert len(begun) == 2


@on_asyncpg
async def test_a_listener_that_reads_anew_with_each_statement_costs_no_further_statement(
    make_outbox: MakeOutbox, watch: Watch, database_url: str
) -> None:
    """Its lease is renewed while it runs, and nothing is asked for a second message."""
    engine = create_async_engine(database_url)
    outbox = make_outbox(db_engine=engine, observers=[watch])
    statements: list[str] = []

    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 'its own'"))

    async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
        await emit(outbox, 1)
        await watch.outcomes(1)
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
        await emit(outbox, 2)
        await watch.outcomes(2)
    await engine.dispose()
    assert [statement.split()[0] for statement in statements] == ["INSERT", "SELECT", "DELETE"]


@on_asyncpg
async def test_a_listener_that_sets_its_isolation_by_a_statement_is_told_how_to(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    """Its lease would be renewed during the transaction, which could never end its message."""
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))

    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and "Set isolation_level= of the listener instead" in outcome.error


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
@pytest.mark.parametrize(
    "statement",
    [
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET default_transaction_isolation = 'repeatable read'",
    ],
    ids=["characteristics", "default"],
)
async def test_a_listener_that_sets_the_isolation_of_its_connection_is_told_too(
    make_outbox: MakeOutbox, watch: Watch, statement: str
) -> None:
    """The pool gives the connection out again, and whoever gets it would collide with the renewal of its lease."""
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text(statement))

    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and "Set isolation_level= of the listener instead" in outcome.error
