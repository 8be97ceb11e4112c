"""Conflicts on MariaDB: deadlocks and lock waits that a foreign transaction provokes, in ours and in a listener's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import pymysql
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Outbox, Reason, Reject, TransactionError, listen
from outbox.core.attempt import Done
from outbox.core.events import Conflicted, Handled
from outbox.testing.servers import MariaDB
from tests.support.mariadb import arguments, statement
from tests.support.observing import eventually
from tests.support.outboxes import emit

from .strategies import Effects, Watch, reached


class Foreign:
    """Another program's transaction. It has written much, so that a deadlock never ends it instead of ours."""

    def __init__(self, url: str) -> None:
        self.connection = pymysql.connect(**arguments(url))
        self.cursor = self.connection.cursor()
        self.cursor.execute("SET innodb_lock_wait_timeout = 30")
        self.cursor.execute("INSERT INTO ballast (word) SELECT 'x' FROM seq_1_to_2000")

    def __call__(self, text: str) -> None:
        self.cursor.execute(text)

    async def later(self, text: str) -> None:
        await asyncio.to_thread(self.cursor.execute, text)

    def end(self) -> None:
        with suppress(pymysql.Error):
            self.connection.rollback()
        self.connection.close()


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDB]:
    """It waits for a lock for a second, as far as it is not told otherwise."""
    with MariaDB(settings={"innodb-lock-wait-timeout": "1"}) as server:
        statement(server.url, "CREATE TABLE ballast (id INT AUTO_INCREMENT PRIMARY KEY, word TEXT) ENGINE=InnoDB")
        yield server


@pytest.fixture
async def outbox(server: MariaDB, table_name: str, watch: Watch) -> AsyncIterator[Outbox]:
    url = server.url.replace("mariadb://", "mysql+asyncmy://")
    outbox = Outbox(
        db_engine_url=url, table_name=table_name, poll_interval=0.1, restart_delay=0.05, lease=5, observers=[watch]
    )
    await outbox.create_tables()
    yield outbox
    await outbox.close()


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Effects:
    """Two rows to lock, and room for effects."""
    effects = Effects(outbox, table_name)
    await effects.create()
    return effects


@pytest.fixture
async def rows(outbox: Outbox, table_name: str) -> str:
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TABLE {table_name}_rows (id INT PRIMARY KEY, n INT) ENGINE=InnoDB"))
        await session.execute(text(f"INSERT INTO {table_name}_rows VALUES (1, 0), (2, 0)"))
    return f"{table_name}_rows"


@pytest.fixture
def foreign(server: MariaDB) -> Iterator[Foreign]:
    foreign = Foreign(server.url)
    yield foreign
    foreign.end()


def touch(rows: str, id: int) -> Any:
    return text(f"UPDATE {rows} SET n = n + 1 WHERE id = {id}")


async def crossing(session: AsyncSession, rows: str, foreign: Foreign) -> asyncio.Task[None]:
    """Take the first row, for which the other transaction waits then; it has the second one."""
    await session.execute(touch(rows, 1))
    waiting = asyncio.create_task(foreign.later(str(touch(rows, 1))))
    await asyncio.sleep(0.2)
    return waiting


# In a listener's transaction


async def test_a_deadlock_of_the_listener_is_a_conflict_and_uses_up_no_attempt(
    outbox: Outbox, effects: Effects, rows: str, foreign: Foreign, watch: Watch
) -> None:
    runs: list[int] = []
    waiting: list[asyncio.Task[None]] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(f"run {len(runs)}"))
        if len(runs) == 1:
            waiting.append(await crossing(session, rows, foreign))
        else:
            await session.execute(touch(rows, 1))
        await session.execute(touch(rows, 2))

    foreign(str(touch(rows, 2)))
    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: runs and waiting and waiting[0].done())
        foreign.connection.rollback()
        [handled] = await watch.wait_for(Handled)
    assert isinstance(handled.outcome, Done) and handled.attempt.attempt_count == 1
    assert len(watch.of(Conflicted)) >= 1
    assert await effects.all() == [f"run {len(runs)}"]


async def test_a_lock_wait_of_the_listener_that_takes_too_long_is_a_conflict_too(
    outbox: Outbox, effects: Effects, rows: str, foreign: Foreign, watch: Watch
) -> None:
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(f"run {len(runs)}"))
        await session.execute(touch(rows, 1))

    foreign(str(touch(rows, 1)))
    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Conflicted)
        foreign.connection.rollback()
        [handled] = await watch.wait_for(Handled)
    assert isinstance(handled.outcome, Done) and handled.attempt.attempt_count == 1
    assert await effects.all() == [f"run {len(runs)}"]


async def test_a_deadlock_that_the_listener_swallows_commits_nothing_half_done(
    outbox: Outbox, effects: Effects, rows: str, foreign: Foreign, watch: Watch
) -> None:
    """The server has rolled everything back, and what is written then would be another transaction."""
    runs: list[int] = []
    waiting: list[asyncio.Task[None]] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(effects.write(f"before, run {len(runs)}"))
        if len(runs) == 1:
            waiting.append(await crossing(session, rows, foreign))
        else:
            await session.execute(touch(rows, 1))
        with suppress(DBAPIError):
            await session.execute(touch(rows, 2))
        await session.execute(effects.write(f"after, run {len(runs)}"))

    foreign(str(touch(rows, 2)))
    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: waiting and waiting[0].done())
        foreign.connection.rollback()
        await watch.wait_for(Handled)
    found = await effects.all()
    last = len(runs)
    assert found in ([], [f"before, run {last}", f"after, run {last}"])
    assert last > 1 or [letter.reason for letter in await outbox.dead_letters.list()] == [Reason.EXHAUSTED]


async def test_a_callers_transaction_that_swallowed_a_deadlock_is_told_so(
    outbox: Outbox, effects: Effects, rows: str, foreign: Foreign
) -> None:
    foreign(str(touch(rows, 2)))
    with pytest.raises(TransactionError):
        async with outbox.transaction() as session:
            await session.execute(effects.write("before"))
            waiting = await crossing(session, rows, foreign)
            with suppress(DBAPIError):
                await session.execute(touch(rows, 2))
            await waiting
            await outbox.emit(session, "order.created", 1)
    assert await outbox.messages() == []
    assert await effects.all() == []


async def test_a_lock_wait_that_a_caller_swallowed_leaves_the_rest_of_the_transaction(
    outbox: Outbox, effects: Effects, rows: str, foreign: Foreign
) -> None:
    """The server undoes the statement alone, and says so by going on."""
    foreign(str(touch(rows, 2)))
    async with outbox.transaction() as session:
        await session.execute(effects.write("before"))
        with pytest.raises(DBAPIError, match="1205"):
            await session.execute(touch(rows, 2))
        await outbox.emit(session, "order.created", 1)
    assert len(await outbox.messages()) == 1
    assert await effects.all() == ["before"]


async def test_a_drivers_transaction_that_was_ended_by_a_deadlock_takes_no_message_in_silence(
    outbox: Outbox, server: MariaDB, rows: str, foreign: Foreign
) -> None:
    """In autocommit, where a transaction was begun by hand, the server's next answer tells."""

    def work() -> None:
        with pymysql.connect(**arguments(server.url), autocommit=True) as connection, connection.cursor() as cursor:
            connection.begin()
            cursor.execute(str(touch(rows, 1)))
            waiting = Thread(target=foreign, args=(str(touch(rows, 1)),))
            waiting.start()
            with suppress(pymysql.OperationalError):
                cursor.execute(str(touch(rows, 2)))
            waiting.join()
            with pytest.raises(TransactionError, match="rolled this transaction back"):
                outbox.emit_sync(connection, "order.created", 1)

    foreign(str(touch(rows, 2)))
    await asyncio.to_thread(work)


# In ours


async def test_a_lock_on_the_message_holds_its_completion_back_and_no_more(
    outbox: Outbox, effects: Effects, foreign: Foreign, watch: Watch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        entered.set()
        await go_on.wait()
        await session.execute(effects.write(f"run {len(runs)}"))

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await reached(entered)
        await foreign.later(f"SELECT id FROM {outbox.tables.messages.name} FOR UPDATE")
        go_on.set()
        await asyncio.sleep(1.5)  # longer than the server lets wait for a lock
        assert await effects.all() == []
        foreign.connection.rollback()
        await eventually(lambda: any(isinstance(event.outcome, Done) for event in watch.of(Handled)))
        await eventually(lambda: _is_settled(outbox))
    assert len(await effects.all()) == 1
    assert await outbox.dead_letters.list() == []


async def _is_settled(outbox: Outbox) -> bool:
    backlog = await outbox.backlog()
    return backlog.waiting == 0 and all(not queue.open for queue in backlog.queues)


async def test_a_deadlock_with_a_burial_is_run_again_and_buries_once(
    outbox: Outbox, effects: Effects, foreign: Foreign, server: MariaDB
) -> None:
    """A burial writes the letter and deletes the message; the foreign transaction locks them the other way round."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int) -> None:
        entered.set()
        await go_on.wait()
        raise Reject("nobody wants it")

    messages, letters = outbox.tables.messages.name, outbox.tables.dead_letters.name
    await emit(outbox, 1)
    before = deadlocks(server)
    async with outbox.running(listeners=[listener]):
        await reached(entered)
        await foreign.later(f"SELECT id FROM {letters} FOR UPDATE")
        go_on.set()
        await asyncio.sleep(0.3)
        with suppress(pymysql.OperationalError):
            await foreign.later(f"SELECT id FROM {messages} FOR UPDATE")
        foreign.connection.rollback()
        await eventually(lambda: _is_settled(outbox))
    [letter] = await outbox.dead_letters.list()
    assert letter.reason is Reason.REJECTED
    assert deadlocks(server) > before


def deadlocks(server: MariaDB) -> int:
    [(_, count)] = statement(server.url, "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")
    return int(count)


async def test_a_table_that_is_locked_as_a_whole_is_waited_for(outbox: Outbox, foreign: Foreign, watch: Watch) -> None:
    """The gaps are locked too: nothing can be emitted, claimed or routed for longer than the server lets wait."""
    handled: list[int] = []

    async def listener(body: int) -> None:
        handled.append(body)

    await emit(outbox, 1)
    async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
        await eventually(lambda: handled == [1])
        await foreign.later(f"SELECT id FROM {outbox.tables.messages.name} FOR UPDATE")
        with pytest.raises(DBAPIError, match="1205"):
            await emit(outbox, 2)
        await asyncio.sleep(1.5)
        foreign.connection.rollback()
        await emit(outbox, 3)
        await eventually(lambda: handled == [1, 3])
        await eventually(lambda: _is_settled(outbox))
    assert await outbox.dead_letters.list() == []
