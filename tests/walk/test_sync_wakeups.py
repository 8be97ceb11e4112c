"""Commits without an event loop wake those who sleep in other processes, through PostgreSQL, from a thread of ours."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.orm import Session

from outbox import Outbox, listen
from outbox.stores.postgresql import PostgresqlStore
from outbox.stores.postgresql.notifying_thread import thread
from tests.support.observing import PATIENCE, Statements, arrival, eventually

ROOT = Path(__file__).parents[2]
SOON = 15.0  # seconds: far more than a wake-up takes
QUIET = 0.3  # seconds in which nothing is heard


class Listening:
    """A connection to the server that hears what is notified for a table, and a sleeper for whom it is worthwhile."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], outbox: Outbox) -> None:
        self._connection = connection
        self.outbox = outbox

    async def next(self) -> int:
        """The next notification: the process of the server that it came from."""
        async for notification in self._connection.notifies(timeout=SOON, stop_after=1):
            return notification.pid
        raise AssertionError(f"nothing was notified within {SOON} s")

    async def is_quiet(self) -> bool:
        return [each async for each in self._connection.notifies(timeout=QUIET)] == []

    async def has_connection(self, pid: int) -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        return bool((await (await self._connection.execute(query, [pid])).fetchone() or [0])[0])

    async def cut(self, pid: int) -> None:
        await self._connection.execute("SELECT pg_terminate_backend(%s)", [pid])


@pytest.fixture
def url(postgresql_url: str) -> URL:
    return make_url(postgresql_url)


@pytest.fixture
async def listening(url: URL, table_name: str) -> AsyncIterator[Listening]:
    consumer = Outbox(db_engine_url=url.set(drivername="postgresql+asyncpg"), table_name=table_name)
    await consumer.create_tables()
    store = consumer.store
    assert isinstance(store, PostgresqlStore)
    notifier: Any = store.wakeup.notifier
    await store.runner.apply(lambda connection: notifier._say_asleep(connection, 3600))
    async with await psycopg.AsyncConnection.connect(
        url.render_as_string(hide_password=False), autocommit=True
    ) as connection:
        await connection.execute(f'LISTEN "outbox .{table_name}"')
        yield Listening(connection, consumer)
    await consumer.close()


def emit(outbox: Outbox, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        outbox.emit_sync(session, "order.created", 1)


CONFIGURED: dict[str, dict[str, Any]] = {
    "a URL for asyncpg": {"db_engine_url": "postgresql+asyncpg"},
    "a URL for psycopg": {"db_engine_url": "postgresql+psycopg"},
    "a plain engine": {"db_engine": "postgresql+psycopg"},
    "nothing": {},
}


@pytest.mark.parametrize("configured", CONFIGURED)
async def test_a_commit_without_an_event_loop_is_notified_after_it(
    configured: str, url: URL, table_name: str, listening: Listening
) -> None:
    """From one connection of its own, which is closed together with the outbox and made again after it was lost."""
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    options: dict[str, Any] = {name: url.set(drivername=driver) for name, driver in CONFIGURED[configured].items()}
    if "db_engine" in options:
        options["db_engine"] = engine
    producer = Outbox(table_name=table_name, **options)
    await asyncio.to_thread(emit, producer, engine)
    pid = await listening.next()
    with Session(engine) as session:
        producer.emit_sync(session, "order.created", 1)
        assert await listening.is_quiet(), "nothing is told before the commit"
        session.rollback()
    assert await listening.is_quiet(), "nor after a rollback"
    await asyncio.to_thread(emit, producer, engine)
    assert await listening.next() == pid
    await listening.cut(pid)
    for _ in range(10):  # the first one may be lost over a connection that was cut
        await asyncio.to_thread(emit, producer, engine)
        with suppress(AssertionError, TimeoutError):
            pid = await asyncio.wait_for(listening.next(), 1)
            break
    assert await listening.has_connection(pid)
    await producer.close()
    await eventually(lambda: _is_gone(listening, pid))
    engine.dispose()


async def _is_gone(listening: Listening, pid: int) -> bool:
    return not await listening.has_connection(pid)


async def test_the_transaction_gets_no_statement_of_it(url: URL, table_name: str, listening: Listening) -> None:
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    producer = Outbox(db_engine=engine, table_name=table_name)
    await asyncio.to_thread(emit, producer, engine)
    await listening.next()
    with Statements(engine) as statements:
        await asyncio.to_thread(emit, producer, engine)
        await listening.next()
    assert [statement.split()[0] for statement in statements] == ["INSERT"]
    await producer.close()
    engine.dispose()


async def test_it_can_be_switched_off(url: URL, table_name: str, listening: Listening) -> None:
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    producer = Outbox(db_engine=engine, table_name=table_name, sync_wakeups=False)
    await asyncio.to_thread(emit, producer, engine)
    assert await listening.is_quiet()
    engine.dispose()


async def test_what_goes_wrong_with_it_is_not_the_callers_affair(
    url: URL, table_name: str, listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    """The address of the outbox leads nowhere; that of the caller does."""
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    producer = Outbox(db_engine_url=url.set(drivername="postgresql+asyncpg", port=1), table_name=table_name)
    caplog.set_level(logging.DEBUG, "outbox")
    await asyncio.to_thread(emit, producer, engine)
    await eventually(lambda: "no worker was notified" in caplog.text)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert len(await listening.outbox.messages()) == 1
    engine.dispose()


async def test_a_worker_is_woken_long_before_its_next_poll(url: URL, table_name: str) -> None:
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("order.created", queue="orders")
    async def on_order(number: int) -> None:
        await arrivals.put(number)

    asyncpg = url.set(drivername="postgresql+asyncpg")
    consumer = Outbox(db_engine_url=asyncpg, table_name=table_name, poll_interval=4 * PATIENCE)
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    producer = Outbox(db_engine=engine, table_name=table_name)
    async with consumer.running(listeners=[on_order]):
        state = text(f"SELECT count(*) FROM {table_name}_state WHERE asleep_until > now()")
        with engine.connect() as connection:

            def asleep() -> bool:
                with connection.begin():
                    return bool(connection.scalar(state))

            await eventually(asleep)
        await asyncio.to_thread(emit, producer, engine)
        assert await arrival(arrivals) == 1
    await producer.close()
    await consumer.close()
    engine.dispose()


PROGRAM = """
import os, sys, threading, warnings
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from outbox import Outbox

warnings.simplefilter("error", DeprecationWarning)
engine = create_engine(sys.argv[1])
outbox = Outbox(db_engine=engine, table_name=sys.argv[2])

def emit():
    with Session(engine) as session, session.begin():
        outbox.emit_sync(session, "order.created", 1)

assert threading.active_count() == 1
emit()
assert [thread.daemon for thread in threading.enumerate()[1:]] == [True]
sys.stdin.readline()
child = os.fork()
if not child:
    engine.dispose(close=False)
    sys.stdin = None
    emit()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("forked", flush=True)
sys.stdin.readline()
emit()
"""


async def test_it_is_safe_in_forks_and_at_the_end_of_a_process(url: URL, table_name: str, listening: Listening) -> None:
    """What the last commits of parent and child tell goes out before they end, and they end in silence."""
    arguments = [url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False), table_name]
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdin is not None and program.stdout is not None
    pids = {await listening.next()}
    program.stdin.write(b"\n")
    pids.add(await listening.next())
    assert await program.stdout.readline() == b"forked\n"
    program.stdin.write(b"\n")
    pids.add(await listening.next())
    async with asyncio.timeout(PATIENCE):
        output, errors = await program.communicate()
    assert (output, errors, program.returncode) == (b"", b"", 0)
    assert len(pids) == 3


FORKING = """
import os, threading
os.register_at_fork(before=lambda: commit())  # what is registered first is called last

from outbox.stores.postgresql.notifying_thread import thread

class Told:
    def notify_here(self, destinations):
        told.set()

def commit():
    thread.notify(Told(), {""})
    counts.append(threading.active_count())

told, counts = threading.Event(), []
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
assert counts == [1], "it was begun too early"
assert told.wait(10)
"""


def test_a_commit_while_the_process_forks_is_notified_after_the_fork() -> None:
    """A thread that began meanwhile would be connecting when the process forks."""
    done = subprocess.run([sys.executable, "-c", FORKING], cwd=ROOT, capture_output=True, timeout=SOON, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_where_no_thread_can_be_started_nothing_is_notified_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread.end()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        thread.notify(object(), {""})  # type: ignore[arg-type]
    assert thread._loop is None
    assert not thread._pending
