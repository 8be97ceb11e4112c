"""Connections that are lost under a listener: what the database did is not the listener's failure, up to a limit."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from outbox import Listener, listen
from outbox.core.attempt import Dead, Done, Outcome, Released
from outbox.core.events import Handled, Troubled
from outbox.core.listener_options import FailedAttempt
from outbox.inbound import reruns
from outbox.testing.servers import PgBouncer
from outbox.testing.servers.postgresql_server import PostgreSQL
from tests.support.broker import VirtualHost
from tests.support.databases import on_asyncpg
from tests.support.observing import eventually
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch

OF_THE_BACKEND = text("SELECT pg_backend_pid()")


class Server:
    """Ends its side of connections, and waits until it has."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)

    def end(self, *backends: int | None) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            for backend in backends:
                connection.execute("SELECT pg_terminate_backend(%s, 60000)", [backend])

    async def end_that_of(self, session: AsyncSession) -> None:
        await asyncio.to_thread(self.end, await session.scalar(OF_THE_BACKEND))


@pytest.fixture
def server(database_url: str) -> Server:
    return Server(database_url)


class Runs:
    """A listener of each kind that writes, loses its connection the first times it is called, and returns."""

    def __init__(self, server: Server, effects: Effects, losses: int = 1) -> None:
        self._server = server
        self._effects = effects
        self._losses = losses
        self.count = 0

    def listener(self, kind: str) -> Listener:
        callbacks: dict[str, Callable[..., Any]] = {"async": self.awaited, "plain": self.plain, "list": self.many}
        return Listener("#", callbacks[kind], queue="q", retry_delays=(), batch=10 if kind == "list" else None)

    async def awaited(self, body: int, session: AsyncSession) -> None:
        await self.many([body], session)

    async def many(self, bodies: list[int], session: AsyncSession) -> None:
        self.count += 1
        for body in bodies:
            await session.execute(self._effects.write(f"{body} in run {self.count}"))
        if self.count <= self._losses:
            await self._server.end_that_of(session)

    def plain(self, body: int, session: Session) -> None:
        self.count += 1
        session.execute(self._effects.write(f"{body} in run {self.count}"))
        if self.count <= self._losses:
            self._server.end(session.scalar(OF_THE_BACKEND))


@pytest.mark.parametrize(
    "database_url, kind",
    [
        ("postgresql+asyncpg", "async"),
        ("postgresql+psycopg", "async"),
        ("postgresql+asyncpg", "plain"),
        ("postgresql+asyncpg", "list"),
    ],
    indirect=["database_url"],
)
async def test_a_connection_that_is_lost_after_the_listener_returned_uses_up_no_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, server: Server, kind: str
) -> None:
    outbox = make_outbox(observers=[watch])
    runs = Runs(server, effects)
    await emit(outbox, 1)
    async with outbox.running(listeners=[runs.listener(kind)]):
        assert await watch.outcomes(1) == [Done(in_transaction=True)]
    assert await effects.all() == ["1 in run 2"]
    [lost] = watch.of(Troubled)
    assert lost.where == "session for q" and isinstance(lost.error, DBAPIError)


@on_asyncpg
@pytest.mark.parametrize("transport", [None, "memory://"], ids=["database", "memory"])
@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
async def test_a_connection_that_is_lost_under_the_listener_uses_up_no_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, server: Server, transport: str | None, caught: bool
) -> None:
    """Whatever the listener makes of the error: it is the connection that counts."""
    outbox = make_outbox(transport=transport, observers=[watch])
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        if len(runs) == 1:
            await server.end_that_of(session)
        try:
            await session.execute(effects.write(f"run {len(runs)}"))
        except DBAPIError:
            if not caught:
                raise KeyError("something that tells nothing") from None

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [handled] = await watch.wait_for(Handled)
    assert isinstance(handled.outcome, Done) and handled.attempt.attempt_count == 1
    assert await effects.all() == ["run 2"]


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_connections_that_died_in_the_pool_of_a_given_engine_use_up_no_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, server: Server, database_url: str
) -> None:
    engine = create_async_engine(database_url)
    outbox = make_outbox(db_engine=engine, observers=[watch])

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write(str(body)))

    try:
        await emit(outbox, *range(10))
        connections = [await engine.connect() for _ in range(5)]
        backends = [await each.scalar(OF_THE_BACKEND) for each in connections]
        for each in connections:
            await each.close()
        server.end(*backends)  # without a turn of the event loop, which might notice
        async with outbox.running(listeners=[listener]):
            await eventually(lambda: len([each for each in watch.of(Handled) if isinstance(each.outcome, Done)]) == 10)
    finally:
        await engine.dispose()
    assert {type(each.outcome) for each in watch.of(Handled)} <= {Done, Released}, "given back untried at the most"
    assert sorted(await effects.all()) == [str(number) for number in range(10)]


@on_asyncpg
async def test_lost_connections_have_a_limit_of_their_own_and_then_the_attempt_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, server: Server
) -> None:
    outbox = make_outbox(observers=[watch])
    runs = Runs(server, effects, losses=2 * reruns.LOSSES)
    told: list[BaseException] = []

    async def on_error(error: BaseException, message: object, session: AsyncSession, attempt: FailedAttempt) -> None:
        told.append(error)

    listener = Listener("#", runs.awaited, queue="q", retry_delays=(), on_error=on_error)
    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and "connection" in outcome.error
    assert runs.count == reruns.LOSSES and len(watch.of(Troubled)) == reruns.LOSSES - 1
    assert len(told) == 1 and isinstance(told[0], DBAPIError)  # in which of its classes, the driver decides each time
    assert await effects.all() == []


@on_asyncpg
async def test_a_listener_whose_first_statement_costs_its_connection_does_not_run_for_ever(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    """As one that crashes the server: the database answers before each further run, so it is not away."""
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    outbox = make_outbox(observers=[watch])
    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        assert [type(outcome) for outcome in await watch.outcomes(1)] == [Dead]
    assert len(runs) == reruns.LOSSES


@on_asyncpg
async def test_what_the_listener_does_to_itself_is_its_own_failure(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, server: Server, database_url: str
) -> None:
    """A socket of its own, another connection of its own, and statements that it cancels: one run each."""
    outbox = make_outbox(observers=[watch])
    elsewhere = create_async_engine(database_url)
    runs: list[str] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: str, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(body))
        match body:
            case "socket":
                raise ConnectionResetError("a call of another service")
            case "elsewhere":
                async with AsyncSession(elsewhere) as another:
                    await server.end_that_of(another)
                    await another.execute(text("SELECT 1"))
            case "hasty":
                async with asyncio.timeout(0.05):
                    await session.execute(text("SELECT pg_sleep(600)"))
            case "indifferent":
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await session.execute(text("SELECT pg_sleep(600)"))

    await emit(outbox, "socket", "elsewhere", "hasty", "indifferent")
    async with outbox.running(listeners=[listener]):
        outcomes = await watch.outcomes(4)
    await elsewhere.dispose()
    assert [type(outcome) for outcome in outcomes] == [Dead] * 4
    assert sorted(runs) == ["elsewhere", "hasty", "indifferent", "socket"]
    assert watch.of(Troubled) == []


# What a listener does to its connection, so that nothing can be committed, and some drivers' commit says nothing.


def invalidate(session: Session) -> None:
    session.connection().connection.invalidate()


def close_adapter(session: Session) -> None:
    session.connection().connection.dbapi_connection.close()  # type: ignore[union-attr]


def terminate(session: Session) -> None:
    connection = session.connection()
    connection.dialect.do_terminate(connection.connection.dbapi_connection)  # type: ignore[arg-type]


def close_driver(session: Session) -> None:
    closing: Any = session.connection().connection.driver_connection.close()  # type: ignore[union-attr]
    if asyncio.iscoroutine(closing):
        await_only(closing)


@pytest.mark.parametrize("transport", [None, "memory://"], ids=["database", "memory"])
@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_a_listener_that_closes_its_connection_is_not_handled_and_does_not_run_for_ever(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    runs: Counter[str] = Counter()

    def listeners_that(break_it: Callable[[Session], None]) -> list[Listener]:
        async def awaited(body: int, session: AsyncSession) -> None:
            await session.run_sync(lambda plain: write_and_break("awaited", plain))

        async def many(bodies: list[int], session: AsyncSession) -> None:
            await session.run_sync(lambda plain: write_and_break("list", plain))

        def in_thread(body: int, session: Session) -> None:
            write_and_break("plain", session)

        def write_and_break(kind: str, session: Session) -> None:
            runs[f"{kind} {break_it.__name__}"] += 1
            session.execute(effects.write(kind))
            break_it(session)

        name, options = break_it.__name__, dict[str, Any](retry_delays=())
        return [
            Listener("#", awaited, queue=f"awaited {name}", **options),
            Listener("#", many, queue=f"list {name}", batch=10, **options),
            Listener("#", in_thread, queue=f"plain {name}", **options),
        ]

    listeners = [each for end in (invalidate, close_adapter, terminate, close_driver) for each in listeners_that(end)]
    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=listeners):
        await watch.wait_for(Handled, len(listeners))
    outcomes = {event.queue: event.outcome for event in watch.of(Handled)}
    assert {type(outcome) for outcome in outcomes.values()} == {Dead}, outcomes
    assert await effects.all() == []
    assert max(runs.values()) <= 2 * reruns.LOSSES, runs


@on_asyncpg
async def test_a_listener_that_invalidates_its_connection_is_not_acknowledged_to_rabbitmq(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, vhost: VirtualHost
) -> None:
    outbox = make_outbox(rabbitmq_url=vhost.url, observers=[watch])
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(str(body)))
        await session.run_sync(invalidate)

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [handled] = await watch.wait_for(Handled)
    assert isinstance(handled.outcome, Dead) and "ConnectionGone" in handled.outcome.error
    assert len(runs) == reruns.LOSSES and await effects.all() == []


# Behind a pooler, which takes connections although its database is away: there the first statement is what fails.


@pytest.mark.parametrize(
    "database_url, kind",
    [("postgresql+asyncpg", "async"), ("postgresql+asyncpg", "plain"), ("postgresql+psycopg", "list")],
    indirect=["database_url"],
)
async def test_a_database_that_is_away_behind_its_pooler_uses_up_no_attempt(
    make_outbox: MakeOutbox, watch: Watch, table_name: str, database_url: str, kind: str
) -> None:
    with PostgreSQL() as database, PgBouncer(database.url, pool_size=9, settings={"server_login_retry": "1"}) as pooler:
        url = make_url(pooler.url).set(drivername=make_url(database_url).drivername)
        outbox = make_outbox(db_engine_url=url, observers=[watch])
        await outbox.create_tables()
        effects = Effects(outbox, table_name)
        await effects.create()
        away = threading.Event()
        called: Counter[int] = Counter()

        async def awaited(body: int, session: AsyncSession) -> None:
            await many([body], session)

        async def many(bodies: list[int], session: AsyncSession) -> None:
            for body in bodies:
                await session.execute(effects.write(str(body)))
            called.update(bodies)
            await asyncio.to_thread(away.wait)
            await session.execute(text("SELECT 1"))

        def plain(body: int, session: Session) -> None:
            called[body] += 1
            session.execute(effects.write(str(body)))
            away.wait()
            session.execute(text("SELECT 1"))

        callbacks: dict[str, Callable[..., Any]] = {"async": awaited, "plain": plain, "list": many}
        options: dict[str, Any] = {"concurrency": 2, "batch": 2 if kind == "list" else None}
        await emit(outbox, *range(6))
        async with outbox.running(listeners=[Listener("#", callbacks[kind], queue="q", retry_delays=(), **options)]):
            await eventually(lambda: len(called) >= 2)
            await asyncio.to_thread(database.stop, "immediate")
            away.set()
            await asyncio.sleep(2)  # five runs in vain, one right after the other, do not take that long
            await asyncio.to_thread(database.start)
            await eventually(lambda: len(ended(watch)) == 6)
        assert {type(outcome) for outcome in ended(watch)} == {Done}
        assert sorted(await effects.all()) == list("012345")
        await outbox.close()


def ended(watch: Watch) -> list[Outcome]:
    return [each.outcome for each in watch.of(Handled) if not isinstance(each.outcome, Released)]
