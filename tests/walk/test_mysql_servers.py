"""MariaDB's connections and servers: what idles too long, is ended, is cut off, or may not be written to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import Listener, Outbox, TransactionError, listen
from outbox.core.attempt import Done, Released
from outbox.core.events import Handled, Recovered, Troubled
from outbox.testing.servers import MariaDB
from tests.support.databases import url_on
from tests.support.mariadb import arguments, statement
from tests.support.observing import eventually
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch, reached


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """MariaDB alone."""
    return url_on(request, "mysql+asyncmy", tmp_path)


class Sessions:
    """The connections of one user, seen from the server."""

    def __init__(self, url: str, user: str) -> None:
        self._url = url
        self._user = user

    def statements(self) -> dict[int, str]:
        """What each is doing, by its number; empty where it idles."""
        asked = "SELECT id, COALESCE(info, '') FROM information_schema.processlist WHERE user = %s"
        return dict(statement(self._url, asked, self._user))

    def end_all(self) -> int:
        """End them from the server's side; how many there were."""
        found = list(self.statements())
        for number in found:
            try:
                statement(self._url, f"KILL {number}")
            except Exception as error:  # noqa: BLE001 - it has ended by itself meanwhile
                assert "Unknown thread id" in str(error)
        return len(found)


@pytest.fixture
def user(database_url: str, table_name: str) -> Iterator[str]:
    """A user of this test's own, who may do everything in the database and nothing to the server."""
    url = database_url.replace("+asyncmy", "")
    statement(url, f"CREATE USER {table_name}@'%'")
    statement(url, f"GRANT ALL ON {arguments(url)['database']}.* TO {table_name}@'%'")
    yield table_name
    Sessions(url, table_name).end_all()
    statement(url, f"DROP USER {table_name}@'%'")


@pytest.fixture
def sessions(database_url: str, user: str) -> Sessions:
    return Sessions(database_url.replace("+asyncmy", ""), user)


@pytest.fixture
def users_url(database_url: str, user: str) -> str:
    """How that user connects."""
    return database_url.replace("//outbox@", f"//{user}@")


@pytest.fixture
async def outbox(make_outbox: MakeOutbox, users_url: str, watch: Watch) -> Outbox:
    outbox = make_outbox(db_engine_url=users_url, observers=[watch], restart_delay=0.05)
    await outbox.create_tables()
    return outbox


# Connections that are gone


@pytest.mark.parametrize("given", [False, True], ids=["own engine", "given engine"])
async def test_connections_that_were_ended_while_idle_are_found_out_before_they_are_used(
    make_outbox: MakeOutbox, users_url: str, sessions: Sessions, given: bool
) -> None:
    engine = create_async_engine(users_url, pool_pre_ping=True)
    outbox = make_outbox(**({"db_engine": engine} if given else {"db_engine_url": users_url}))
    try:
        await emit(outbox, 1)
        assert await asyncio.to_thread(sessions.end_all) >= 1
        await emit(outbox, 2)
        await asyncio.to_thread(sessions.end_all)
        assert len(await outbox.messages()) == 2
        await asyncio.to_thread(sessions.end_all)
        assert (await outbox.backlog()).waiting == 2
    finally:
        await outbox.close()
        await engine.dispose()


async def test_connections_that_are_ended_all_the_time_lose_and_repeat_nothing(
    outbox: Outbox, sessions: Sessions, effects: Effects
) -> None:
    @listen("a", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write(str(body)))
        await asyncio.sleep(0.01)

    async def emitted(bodies: range) -> None:
        while True:
            try:
                async with outbox.transaction() as session:
                    for body in bodies:
                        await outbox.emit(session, "a", body)
                        await session.execute(effects.write(f"emitted {body}"))
                return
            except DBAPIError:
                await asyncio.sleep(0.05)

    async with outbox.running(listeners=[listener]):
        for start in range(0, 60, 10):
            await emitted(range(start, start + 10))
            await asyncio.to_thread(sessions.end_all)
        await eventually(lambda: _has(effects, 60))
    found = [what for what in await effects.all() if what.isdigit()]
    # A commit whose answer was lost may have stored its messages, and the loop above emits them again.
    emitted_bodies = [what for what in await effects.all() if what.startswith("emitted ")]
    assert sorted(found, key=int) == sorted((what.removeprefix("emitted ") for what in emitted_bodies), key=int)
    assert set(found) == set(map(str, range(60)))
    assert await outbox.dead_letters.list() == []


async def _has(effects: Effects, count: int) -> bool:
    try:
        return len({what for what in await effects.all() if what.isdigit()}) >= count
    except DBAPIError:
        return False


async def test_a_connection_that_is_lost_under_a_listener_uses_up_no_attempt(
    outbox: Outbox, sessions: Sessions, effects: Effects, watch: Watch
) -> None:
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(f"run {len(runs)}"))
        if len(runs) == 1:
            await asyncio.to_thread(sessions.end_all)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: any(isinstance(event.outcome, Done) for event in watch.of(Handled)))
    assert await effects.all() == ["run 2"]
    assert await outbox.dead_letters.list() == []


# Servers of one test


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[MariaDB]:
    """A server with the settings that the test says."""
    with MariaDB(settings=getattr(request, "param", {})) as server:
        yield server


MakeShop = Callable[..., Outbox]


@pytest.fixture
async def on_server(server: MariaDB, watch: Watch) -> AsyncIterator[MakeShop]:
    """Outboxes on that server, of a user who may do nothing to it."""
    statement(server.url, "CREATE USER shop@'%'")
    statement(server.url, "GRANT ALL ON outbox.* TO shop@'%'")
    made: list[Outbox] = []

    def make(**options: Any) -> Outbox:
        url = server.url.replace("mariadb://outbox@", "mysql+asyncmy://shop@")
        ours = {"poll_interval": 0.1, "restart_delay": 0.05, "observers": [watch]}
        made.append(Outbox(db_engine_url=url, **{**ours, **options}))
        return made[-1]

    yield make
    for outbox in made:
        await outbox.close()


@pytest.mark.parametrize("server", [{"wait-timeout": "1"}], indirect=True)
async def test_connections_that_idle_longer_than_wait_timeout_are_no_error(
    on_server: MakeShop, server: MariaDB, watch: Watch
) -> None:
    outbox = on_server(poll_interval=5)
    handled: list[int] = []

    async def listener(body: int) -> None:
        handled.append(body)

    async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
        for number in range(3):
            async with outbox.transaction() as session:
                await outbox.emit(session, "a", number)
            await eventually(lambda: len(handled) == number + 1)  # noqa: B023
            await asyncio.sleep(1.5)
            assert len(await outbox.messages()) == 0
    assert handled == [0, 1, 2]
    assert watch.of(Troubled) == []


async def test_a_server_that_is_restarted_is_found_again(on_server: MakeShop, server: MariaDB, watch: Watch) -> None:
    outbox = on_server()
    handled: list[int] = []

    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        handled.append(body)

    async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
        await emit(outbox, 1)
        await eventually(lambda: handled == [1])
        await asyncio.to_thread(server.kill)
        await watch.wait_for(Troubled)
        await asyncio.to_thread(server.start)
        await watch.wait_for(Recovered)
        await eventually(lambda: _emitted(outbox, 2))
        await eventually(lambda: 2 in handled)
    assert await outbox.dead_letters.list() == []


async def _emitted(outbox: Outbox, body: int) -> bool:
    try:
        await emit(outbox, body)
    except DBAPIError:
        return False
    return True


async def test_a_server_that_may_only_be_read_uses_up_no_attempts(
    on_server: MakeShop, server: MariaDB, effects_on: Callable[[Outbox], Any], watch: Watch
) -> None:
    """As after a failover, when connections lead to what has become a replica: error 1290."""
    outbox = on_server()
    await outbox.create_tables()
    effects = effects_on(outbox)
    await effects.create()
    entered, go_on = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        entered.set()
        await go_on.wait()
        await session.execute(effects.write(str(body)))

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await reached(entered)
        statement(server.url, "SET GLOBAL read_only = 1")
        with pytest.raises(TransactionError, match="1290"):
            await emit(outbox, 2)
        go_on.set()
        await watch.wait_for(Troubled)
        await asyncio.sleep(0.5)
        assert await effects.all() == []
        statement(server.url, "SET GLOBAL read_only = 0")
        await eventually(lambda: _are(effects, ["1"]))
        await emit(outbox, 3)
        await eventually(lambda: _are(effects, ["1", "3"]))
    assert await outbox.dead_letters.list() == []
    assert {type(event.outcome) for event in watch.of(Handled)} <= {Done, Released}
    assert all(event.attempt.attempt_count == 1 for event in watch.of(Handled) if isinstance(event.outcome, Done))


async def _are(effects: Effects, expected: list[str]) -> bool:
    return await effects.all() == expected


@pytest.fixture
def effects_on(table_name: str) -> Callable[[Outbox], Effects]:
    return lambda outbox: Effects(outbox, table_name)


# A statement that is cancelled


async def test_the_connection_of_a_cancelled_statement_is_not_used_again(outbox: Outbox, sessions: Sessions) -> None:
    """asyncmy leaves the statement running, and its answer would be taken for that of the next one."""

    async def sleep(begun: asyncio.Event) -> None:
        async with outbox.transaction() as session:
            number = await session.scalar(text("SELECT CONNECTION_ID()"))
            numbers.append(number)
            begun.set()
            await session.execute(text("SELECT SLEEP(20)"))

    numbers: list[int] = []
    for _ in range(3):
        begun = asyncio.Event()
        task = asyncio.create_task(sleep(begun))
        await reached(begun)
        await eventually(lambda: asyncio.to_thread(_sleeps, sessions))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with outbox.transaction() as session:
            number, answer = (await session.execute(text("SELECT CONNECTION_ID(), 42"))).one()
        assert answer == 42 and number not in numbers
    assert len(set(numbers)) == 3


def _sleeps(sessions: Sessions) -> bool:
    return any("SLEEP" in doing for doing in sessions.statements().values())


async def test_a_cancelled_emit_leaves_nothing_that_commits_later(outbox: Outbox, sessions: Sessions) -> None:
    async def emit_and_sleep() -> None:
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", 1)
            await session.execute(text("SELECT SLEEP(2)"))

    task = asyncio.create_task(emit_and_sleep())
    await eventually(lambda: asyncio.to_thread(_sleeps, sessions))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline = time.monotonic() + 10
    while await asyncio.to_thread(_sleeps, sessions):  # on the server it may go on to its end
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await outbox.messages() == []
