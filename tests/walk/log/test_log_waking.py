"""Where messages are routed in the database, the log wakes routers and workers, whoever wrote the row."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from outbox import Listener, Message, Outbox
from outbox.core.backoff import Backoff
from outbox.core.events import Advised, SlotTaken, Troubled
from outbox.stores.postgresql.wal.connection import ReplicationConnection, as_position
from outbox.testing.servers import PostgreSQL
from tests.support.observing import Recorder, eventually
from tests.support.program import program

from .hidden_commits import hidden_commit

RARELY = 120.0  # seconds: a message that arrives within the patience of a test was not found by polling
SOON = 20.0  # seconds, on the slowest machine

COLUMNS = "created_at, due_at, message_id, routing_key, content_type, body"
VALUES = "now(), now(), gen_random_uuid()::text, 'order.created', 'text/plain'"

HOLDER = """
import asyncio, sys
from outbox import Outbox
from outbox.core.events import SlotInUse, SlotTaken

def told(event):
    if isinstance(event, SlotInUse | SlotTaken):
        print(type(event).__name__, flush=True)

outbox = Outbox(
    db_engine_url=sys.argv[1], table_name=sys.argv[2], relay_from="wal", poll_interval=120, slot_in_use_delay=0.2,
    observers=[told],
)
asyncio.run(outbox.message_relay())
"""

Arrivals = asyncio.Queue[str]
MakeOutbox = Callable[..., Outbox]


@pytest.fixture
def polls_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first empty poll on the pause is the longest one, not only after a minute."""
    monkeypatch.setattr(Backoff, "pause", lambda self: self._longest)


@pytest.fixture
def arrivals() -> Arrivals:
    return asyncio.Queue()


@pytest.fixture
def listener(arrivals: Arrivals) -> Listener:
    async def on_order(body: bytes, message: Message) -> None:
        arrivals.put_nowait(message.body.decode())

    return Listener("order.*", on_order, queue="orders")


@pytest.fixture
async def shop(make: MakeOutbox) -> Outbox:
    """Reads the log, for nothing but wake-ups."""
    shop = make(transport=None, poll_interval=RARELY)
    await shop.create_tables()
    await shop.wal.create()
    return shop


@pytest.fixture
def insert(postgresql_url: str, table_name: str) -> Callable[..., Any]:
    """Another program writes to the table: it sends no notification."""

    async def insert(body: str, further: dict[str, str] | None = None) -> None:
        columns = ", ".join([COLUMNS, *(further or {})])
        values = ", ".join([f"{VALUES}, %s", *(further or {}).values()])
        async with await psycopg.AsyncConnection.connect(postgresql_url) as connection:
            await connection.execute(f"INSERT INTO {table_name} ({columns}) VALUES ({values})", [body])

    return insert


@pytest.fixture
def holder(shop: Outbox, table_name: str) -> Callable[[], Any]:
    """A process that has the slot, or waits for it, and has no listener."""
    return lambda: program(HOLDER, str(shop.settings.db_engine_url), table_name)


async def soon(arrivals: Arrivals) -> str:
    async with asyncio.timeout(SOON):
        return await arrivals.get()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_row_of_another_program_reaches_the_listener_at_once(
    shop: Outbox, listener: Listener, insert: Any, arrivals: Arrivals, recorder: Recorder, polls_rarely: None
) -> None:
    async with shop.running(listeners=[listener]):
        await recorder.wait_for(SlotTaken)
        for body in ("one", "two"):
            await asyncio.sleep(0.2)  # the worker sleeps
            await insert(body)
            assert await soon(arrivals) == body


async def test_it_reaches_a_listener_of_another_process(
    make: MakeOutbox, holder: Any, listener: Listener, arrivals: Arrivals, insert: Any, polls_rarely: None
) -> None:
    """That one reads no log: it is notified by the process that does."""
    worker = make(transport=None, relay_from="table", poll_interval=RARELY)
    async with worker.running(listeners=[listener]), holder() as process:
        assert await process.says() == "SlotTaken"
        await insert("by a driver")
        assert await soon(arrivals) == "by a driver"


async def test_statements_as_psql_sends_them_wake_too(
    make: MakeOutbox,
    holder: Any,
    listener: Listener,
    arrivals: Arrivals,
    postgresql_url: str,
    table_name: str,
    polls_rarely: None,
) -> None:
    worker = make(transport=None, relay_from="table", poll_interval=RARELY)
    script = f"""
        BEGIN;
        INSERT INTO {table_name} ({COLUMNS}) VALUES ({VALUES}, 'one');
        SAVEPOINT a; INSERT INTO {table_name} ({COLUMNS}) VALUES ({VALUES}, 'never'); ROLLBACK TO SAVEPOINT a;
        INSERT INTO {table_name} ({COLUMNS}) SELECT {VALUES}, 'two';
        COMMIT;
    """
    async with worker.running(listeners=[listener]), holder() as process:
        assert await process.says() == "SlotTaken"
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            assert connection.pgconn.exec_(script.encode()).status == psycopg.pq.ExecStatus.COMMAND_OK
        assert {await soon(arrivals), await soon(arrivals)} == {"one", "two"}
    assert arrivals.empty()


async def test_when_the_holder_is_killed_the_next_one_wakes(
    make: MakeOutbox, holder: Any, listener: Listener, arrivals: Arrivals, insert: Any, polls_rarely: None
) -> None:
    worker = make(transport=None, relay_from="table", poll_interval=RARELY)
    async with worker.running(listeners=[listener]), holder() as first:
        assert await first.says() == "SlotTaken"
        async with holder() as second:
            assert await second.says() == "SlotInUse"
            first.signal(signal.SIGKILL)
            await insert("meanwhile")
            assert await second.says() == "SlotTaken"
            assert await soon(arrivals) == "meanwhile"
            await insert("afterwards")
            assert await soon(arrivals) == "afterwards"


async def test_without_its_slot_messages_are_polled_and_it_is_said(
    make: MakeOutbox, listener: Listener, arrivals: Arrivals, insert: Any, recorder: Recorder
) -> None:
    worker = make(transport=None, poll_interval=0.2, restart_delay=0.2)
    await worker.create_tables()
    async with worker.running(listeners=[listener]):
        [advised] = await recorder.wait_for(Advised)
        assert "run outbox wal create" in advised.advice and "found by polling" in advised.advice
        await insert("polled")
        assert await soon(arrivals) == "polled"
        [*_, trouble] = await recorder.wait_for(Troubled)
        assert "run outbox wal create" in str(trouble.error)
        await worker.wal.create()
        await recorder.wait_for(SlotTaken)
        await insert("by the log")
        assert await soon(arrivals) == "by the log"


async def test_a_slot_that_is_lost_at_work_ends_no_worker(
    shop: Outbox, make: MakeOutbox, listener: Listener, arrivals: Arrivals, insert: Any, recorder: Recorder
) -> None:
    worker = make(transport=None, poll_interval=0.2, restart_delay=0.2)
    async with worker.running(listeners=[listener]):
        await recorder.wait_for(SlotTaken)
        status = await worker.wal.status()
        with psycopg.connect(str(worker.settings.db_engine_url).replace("+asyncpg", ""), autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s, 60000)", [status.active_pid])
            await eventually(lambda: _dropped(connection, worker.wal.name))
        await recorder.wait_for(Troubled)
        await insert("polled")
        assert await soon(arrivals) == "polled"


def _dropped(connection: Any, slot: str) -> bool:
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    except psycopg.errors.ObjectInUse:  # the worker was quicker
        connection.execute(
            "SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots WHERE slot_name = %s", [slot]
        )
        return False
    return True


async def test_a_frame_that_cannot_be_decoded_ends_no_worker(
    shop: Outbox,
    make: MakeOutbox,
    listener: Listener,
    arrivals: Arrivals,
    insert: Any,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = ReplicationConnection.frame

    def garbled(self: ReplicationConnection) -> bytes | None:
        frame = original(self)
        return frame[:25] + b"?" + frame[26:] if frame is not None and frame[25:26] == b"I" else frame

    monkeypatch.setattr(ReplicationConnection, "frame", garbled)
    worker = make(transport=None, poll_interval=0.2, restart_delay=0.2)
    async with worker.running(listeners=[listener]):
        await recorder.wait_for(SlotTaken)
        await insert("polled")
        assert await soon(arrivals) == "polled"
        await recorder.wait_for(Troubled)


async def test_a_position_is_confirmed_although_messages_wait(
    shop: Outbox, insert: Any, recorder: Recorder, postgresql_url: str
) -> None:
    """They are in the table: the log is not needed for them any more."""
    async with shop.running(relay=True):
        await recorder.wait_for(SlotTaken)
        await insert("no queue is bound to it")
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            [position] = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or [""]

        async def confirmed() -> bool:
            return as_position((await shop.wal.status()).confirmed or "0/0") >= as_position(position)

        await eventually(confirmed)
    assert len(await shop.messages()) == 1


async def test_routes_are_woken_too(
    make: MakeOutbox, shop: Outbox, arrivals: Arrivals, insert: Any, recorder: Recorder, polls_rarely: None
) -> None:
    async def to_a(message: Message) -> None:
        arrivals.put_nowait("a")

    async def to_b(message: Message) -> None:
        arrivals.put_nowait("b")

    relay = make(transport=None, routes={"order.*": to_a, "#": to_b}, poll_interval=RARELY)
    async with relay.running(relay=True):
        await recorder.wait_for(SlotTaken)
        await asyncio.sleep(0.5)  # all of them sleep
        await insert("to both")
        assert {await soon(arrivals), await soon(arrivals)} == {"a", "b"}


async def test_beside_a_relay_with_a_feed_rows_that_have_a_queue_wake_its_worker(
    make: MakeOutbox, shop: Outbox, arrivals: Arrivals, insert: Any, recorder: Recorder, polls_rarely: None
) -> None:
    """Deliveries that another program stores for a listener: the inbox of pg-transactional-outbox."""

    async def on_order(body: bytes, message: Message) -> None:
        arrivals.put_nowait(message.body.decode())

    inbox = make(transport="memory://", poll_interval=RARELY)
    async with inbox.running(relay=True, listeners=[Listener("order.*", on_order, queue="orders", store_first=True)]):
        await recorder.wait_for(SlotTaken)
        await asyncio.sleep(0.5)  # the worker sleeps
        await insert("stored", {"destination": "'orders'", "routed_at": "now()"})
        assert await soon(arrivals) == "stored"


async def test_who_is_woken_can_see_the_row(
    table_name: str, listener: Listener, arrivals: Arrivals, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log tells a commit before others see it. A claim that came too soon would be the last one for long."""
    with PostgreSQL(settings={"synchronous_commit": "local"}) as server:
        url = server.url.replace("postgresql://", "postgresql+asyncpg://")
        shop = Outbox(
            db_engine_url=url, table_name=table_name, relay_from="wal", poll_interval=RARELY, observers=[recorder]
        )
        await shop.create_tables()
        await shop.wal.create()

        async def commit() -> None:
            async with await psycopg.AsyncConnection.connect(server.url) as connection:
                await connection.execute("SET synchronous_commit = on")
                await connection.execute(f"INSERT INTO {table_name} ({COLUMNS}) VALUES ({VALUES}, 'hidden')")

        monkeypatch.setattr(Backoff, "pause", lambda self: self._longest)
        async with shop.running(listeners=[listener]):
            await recorder.wait_for(SlotTaken)
            async with hidden_commit(server, commit) as show:
                await asyncio.sleep(0.5)
                assert arrivals.empty()
                await show()
                assert await soon(arrivals) == "hidden"
        await shop.close()
