""" "What is the PostgreSQL Logical Replication", its set-up, and "Listener restart time strategy".

The rulings: the outbox listener is a relay with `relay_from="wal"`. Publication and slot have one name, `wal_slot`. The
config of the replication role is `wal_url`. `restartDelaySlotInUse` is `slot_in_use_delay`, 1 s in place of 10 s;
`restartDelay`, and the strategy as a function, are `restart_delay`. No strategy makes the slot again: that is done by
`outbox wal create`. The inbox listener is a worker with the same setting: the log wakes it, and what it handles
it claims from the table, so a failed attempt neither ends the stream nor holds back the log. A concurrency controller
of the outbox is the transport: a broker gets messages in commit order, a function is called for several at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import ConfigurationError, Listener, Message, Outbox
from outbox.core.backoff import Backoff
from outbox.core.events import SlotInUse, SlotTaken, Troubled
from outbox.settings import Settings
from outbox.stores.postgresql.wal.connection import as_position
from outbox.testing.servers import PostgreSQL
from tests.support.observing import Recorder, arrival, eventually

Arrivals = asyncio.Queue[Message]


@pytest.fixture
def slot(table_name: str) -> str:
    return f"{table_name}_slot"


@pytest.fixture
async def administrator(postgresql_url: str, slot: str) -> AsyncIterator[Callable[[str], Any]]:
    """Runs what the project's set-up runs, and removes the slot at the end: it would keep the server's log."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:

        def run(statement: str) -> Any:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

        yield run

        def dropped() -> bool:
            run(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{slot}' AND active_pid IS NOT NULL"
            )
            try:
                run(f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{slot}'")
            except psycopg.errors.ObjectInUse:
                return False
            return True

        await eventually(dropped)


@pytest.fixture
async def make(
    postgresql_url: str, table_name: str, slot: str, recorder: Recorder, administrator: Any
) -> AsyncIterator[Callable[..., Outbox]]:
    made: list[Outbox] = []

    def make(sent: Arrivals, **options: Any) -> Outbox:
        async def message_publisher(message: Message) -> None:
            sent.put_nowait(message)

        url = postgresql_url.replace("postgresql://", "postgresql+psycopg://", 1)
        given: dict[str, Any] = {"db_engine_url": url, "table_name": table_name, "wal_slot": slot, "relay_from": "wal"}
        made.append(Outbox(**{"transport": message_publisher, "observers": [recorder], **given, **options}))
        return made[-1]

    yield make
    for outbox in made:
        await outbox.close()


@pytest.fixture
async def producer(make: Callable[..., Outbox], administrator: Any, table_name: str, slot: str) -> Outbox:
    """The project's own statements make role, publication and slot."""
    outbox = make(asyncio.Queue(), wal_url=None)
    await outbox.create_tables()
    administrator(f"CREATE ROLE {table_name}_db_outbox WITH REPLICATION LOGIN PASSWORD 'db_outbox_password'")
    administrator(f"CREATE PUBLICATION {slot} FOR TABLE public.{table_name} WITH (publish = 'insert')")
    administrator(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    return outbox


async def store(outbox: Outbox, *titles: str) -> None:
    async with outbox.transaction() as session:
        for title in titles:
            await outbox.emit(session, "movie.movie_created", {"title": title})


def title(message: Message) -> str:
    return message.body.decode().split('"')[3]


async def count(outbox: Outbox, wanted: int) -> bool:
    return len(await outbox.messages()) == wanted


async def confirmed(outbox: Outbox) -> int:
    return as_position((await outbox.wal.status()).confirmed or "0/0")


async def position(outbox: Outbox) -> int:
    async with outbox.transaction() as session:
        return as_position(str(await session.scalar(text("SELECT pg_current_wal_insert_lsn()::text"))))


async def is_past(outbox: Outbox, written: int) -> bool:
    return await confirmed(outbox) >= written


async def test_the_listener_gets_what_is_committed_by_a_role_that_may_only_replicate(
    producer: Outbox, make: Callable[..., Outbox], postgresql_url: str, table_name: str
) -> None:
    sent: Arrivals = asyncio.Queue()
    wal_url = postgresql_url.replace("outbox@", f"{table_name}_db_outbox:db_outbox_password@")
    async with make(sent, wal_url=wal_url).running(relay=True):
        await store(producer, "some movie", "another movie")
        assert [title(await arrival(sent)), title(await arrival(sent))] == ["some movie", "another movie"]


async def test_a_listener_that_was_not_there_catches_up_from_its_position(
    producer: Outbox, make: Callable[..., Outbox]
) -> None:
    sent: Arrivals = asyncio.Queue()
    for round in range(2):
        await store(producer, f"movie {round}")
        async with make(sent).running(relay=True):
            assert title(await arrival(sent)) == f"movie {round}"
    assert sent.empty()


async def test_a_slot_that_is_in_use_is_waited_for_with_its_own_delay(
    producer: Outbox, make: Callable[..., Outbox], recorder: Recorder
) -> None:
    """`restartDelaySlotInUse`, whatever `restartDelay` is."""
    sent: Arrivals = asyncio.Queue()
    first, second = make(sent), make(sent, slot_in_use_delay=0.2, restart_delay=60)
    async with second.running(relay=True):
        await recorder.wait_for(SlotTaken)
        waiting = first.running(relay=True)
        await waiting.__aenter__()
        await recorder.wait_for(SlotInUse)
        await waiting.__aexit__(None, None, None)
        await store(producer, "some movie")
        assert title(await arrival(sent)) == "some movie"
    assert recorder.of(Troubled) == []


async def test_after_another_error_the_restart_strategy_is_asked_for_the_delay(
    producer: Outbox, make: Callable[..., Outbox], recorder: Recorder, administrator: Any, slot: str
) -> None:
    """`listenerRestartStrategy`: a function of the error, or `restartDelay`."""
    asked: list[str] = []

    def strategy(count: int, error: BaseException) -> timedelta:
        asked.append(type(error).__name__)
        return timedelta(milliseconds=250)

    sent: Arrivals = asyncio.Queue()
    async with make(sent, restart_delay=strategy).running(relay=True):
        await recorder.wait_for(SlotTaken)
        active = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'"
        administrator(active)
        [trouble, *_] = await recorder.wait_for(Troubled)
        assert trouble.pause == timedelta(milliseconds=250)
        await store(producer, "some movie")
        assert title(await arrival(sent)) == "some movie"
    assert asked


async def test_what_is_not_acknowledged_holds_back_the_position_and_nothing_else(
    producer: Outbox, make: Callable[..., Outbox]
) -> None:
    """ "Everything up to this position is acknowledged." """
    sent, opened = Arrivals(), asyncio.Event()

    async def message_publisher(message: Message) -> None:
        if title(message) == "stuck":
            await opened.wait()
        sent.put_nowait(message)

    async with make(sent, transport=message_publisher).running(relay=True):
        await store(producer, "stuck", "behind it")
        written = await position(producer)
        await store(producer, "later")
        assert {title(await arrival(sent)), title(await arrival(sent))} == {"behind it", "later"}
        await eventually(lambda: count(producer, 1))
        await asyncio.sleep(1.5)  # the server is told positions meanwhile
        assert await confirmed(producer) < written
        opened.set()
        assert title(await arrival(sent)) == "stuck"
        await eventually(lambda: is_past(producer, written))


async def test_keep_alives_are_acknowledged_while_others_write(
    producer: Outbox, make: Callable[..., Outbox], administrator: Any, table_name: str
) -> None:
    """An outbox without messages does not hold back the log of a busy server."""
    async with make(asyncio.Queue()).running(relay=True):
        administrator(f"CREATE TABLE {table_name}_others AS SELECT generate_series(1, 10000) AS n")
        written = await position(producer)
        await eventually(lambda: is_past(producer, written))


async def test_updates_and_deletions_are_not_published(
    producer: Outbox, make: Callable[..., Outbox], administrator: Any, table_name: str
) -> None:
    """`WITH (publish = 'insert')`; what is deleted before the listener comes is not sent."""
    sent: Arrivals = asyncio.Queue()
    await store(producer, "deleted", "changed")
    administrator(f"DELETE FROM {table_name} WHERE convert_from(body, 'UTF8') LIKE '%deleted%'")
    administrator(f"UPDATE {table_name} SET key = 'changed'")
    async with make(sent).running(relay=True):
        await store(producer, "last")
        assert [title(await arrival(sent)), title(await arrival(sent))] == ["changed", "last"]
        await eventually(lambda: count(producer, 0))
    assert sent.empty()


async def test_an_error_of_the_publisher_leaves_the_stream_as_it_is(
    producer: Outbox, make: Callable[..., Outbox], recorder: Recorder
) -> None:
    """There it restarts the listener; here the message is tried again from the table, after `relay_retry_delays`."""
    sent, failures = Arrivals(), iter([True, True, False])

    async def message_publisher(message: Message) -> None:
        if title(message) == "fails" and next(failures):
            raise ConnectionError("the broker said no")
        sent.put_nowait(message)

    async with make(sent, transport=message_publisher, relay_retry_delays=(0.05, 0.05)).running(relay=True):
        await store(producer, "fails")
        await store(producer, "another movie")
        assert {title(await arrival(sent)), title(await arrival(sent))} == {"fails", "another movie"}
        await eventually(lambda: count(producer, 0))
    assert (len(recorder.of(SlotTaken)), recorder.of(Troubled)) == (1, [])


async def test_a_message_has_all_that_the_outbox_has(producer: Outbox, make: Callable[..., Outbox]) -> None:
    """aggregateType and messageType are the routing key, aggregateId and segment the key, metadata the headers."""
    sent: Arrivals = asyncio.Queue()
    async with make(sent).running(relay=True):
        async with producer.transaction() as session:
            [stored] = await producer.emit_many(
                session, "movie.movie_created", [{"id": 1}], key="movie 1", headers={"exchange": "movies"}
            )
        message = await arrival(sent)
    assert (message.id, message.routing_key, message.key) == (stored.id, "movie.movie_created", "movie 1")
    assert (message.body, dict(message.headers)) == (b'{"id":1}', {"exchange": "movies"})
    assert message.created_at == stored.created_at


async def test_a_schema_and_names_of_ones_own(
    make: Callable[..., Outbox], administrator: Any, table_name: str, slot: str
) -> None:
    """`dbSchema`, `dbTable`, `postgresPub`, `postgresSlot`; the exported script is run as it is printed."""
    sent: Arrivals = asyncio.Queue()
    administrator(f"CREATE SCHEMA {table_name}_own")
    outbox = make(sent, schema=f"{table_name}_own", table_name="outbox")
    await outbox.create_tables()
    administrator(f"CREATE ROLE {table_name}_reads LOGIN")
    for statement in await outbox.wal.sql(f"{table_name}_reads"):
        administrator(statement)
    assert administrator(f"SELECT rolreplication FROM pg_roles WHERE rolname = '{table_name}_reads'") == [(True,)]
    found = administrator(f"SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = '{slot}'")
    assert found == [(f"{table_name}_own", "outbox")]
    async with outbox.running(relay=True):
        await store(outbox, "some movie")
        assert title(await arrival(sent)) == "some movie"


async def test_a_slot_of_another_kind_is_refused_by_name(
    producer: Outbox, make: Callable[..., Outbox], administrator: Any, slot: str
) -> None:
    """ "This library uses the standard PostgreSQL logical decoding plugin pgoutput." """
    administrator(f"SELECT pg_drop_replication_slot('{slot}')")
    administrator(f"SELECT pg_create_physical_replication_slot('{slot}')")
    with pytest.raises(ConfigurationError, match=f"the slot {slot} is physical"):
        async with make(asyncio.Queue()).running(relay=True):
            pass


async def test_a_server_without_logical_decoding_is_refused_and_says_what_to_set(table_name: str) -> None:
    """ "The PostgreSQL database server itself must have the wal_level configured as logical." """

    async def message_publisher(message: Message) -> None: ...

    with PostgreSQL(settings={"wal_level": "replica"}) as server:
        url = server.url.replace("postgresql://", "postgresql+psycopg://", 1)
        listener = Outbox(db_engine_url=url, table_name=table_name, transport=message_publisher, relay_from="wal")
        await listener.create_tables()
        with pytest.raises(
            ConfigurationError, match="wal_level is replica: run ALTER SYSTEM SET wal_level = 'logical'"
        ):
            async with listener.running(relay=True):
                pass
        await listener.close()


@pytest.mark.parametrize("fails", [False, True], ids=["handled", "failed once"])
async def test_the_inbox_listener_is_woken_by_the_log_and_handles_a_message_once(
    make: Callable[..., Outbox],
    administrator: Any,
    table_name: str,
    slot: str,
    recorder: Recorder,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program stores a message in the inbox. Its handler runs in the transaction that ends the message."""
    handled, attempts = Arrivals(), iter([fails, False])
    inbox = make(handled, transport=None, poll_interval=120)
    await inbox.create_tables()
    administrator(f"CREATE PUBLICATION {slot} FOR TABLE public.{table_name} WITH (publish = 'insert')")
    administrator(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    administrator(f"CREATE TABLE {table_name}_movies (title text)")

    async def handle(body: bytes, message: Message, session: AsyncSession) -> None:
        await session.execute(text(f"INSERT INTO {table_name}_movies VALUES ('some movie')"))
        if next(attempts):
            raise ValueError("not yet")
        handled.put_nowait(message)

    movies = Listener("movie.*", handle, queue="movies", retry_delays=(0.05,))
    if not fails:
        monkeypatch.setattr(Backoff, "pause", lambda self: self._longest)  # it polls rarely from the beginning
    async with inbox.running(listeners=[movies]):
        await recorder.wait_for(SlotTaken)
        await asyncio.sleep(0.3)  # it sleeps
        columns = "created_at, due_at, message_id, routing_key, content_type, body, destination, routed_at"
        values = (
            "now(), now(), gen_random_uuid()::text, 'movie.movie_created', 'application/json', '{}', 'movies', now()"
        )
        administrator(f"INSERT INTO {table_name} ({columns}) VALUES ({values})")
        await arrival(handled)
        await eventually(lambda: count(inbox, 0))
    assert administrator(f"SELECT title FROM {table_name}_movies") == [("some movie",)]
    assert handled.empty()


def test_the_environment_has_the_same_settings() -> None:
    """There `TRX_OUTBOX_DB_REPLICATION_SLOT`, `…_RESTART_DELAY_IN_MS` and the listener's own connection."""
    environment = {
        "OUTBOX_RELAY_FROM": "wal",
        "OUTBOX_WAL_SLOT": "pg_transactional_outbox_slot",
        "OUTBOX_WAL_URL": "postgresql://db_outbox:db_outbox_password@localhost/pg_transactional_outbox",
        "OUTBOX_SLOT_IN_USE_DELAY": "10",
        "OUTBOX_RESTART_DELAY": "0.25",
    }
    settings = Settings.of({}, environment=environment)
    assert (settings.relay_from, settings.wal_slot) == ("wal", "pg_transactional_outbox_slot")
    assert (settings.duration("slot_in_use_delay"), settings.restart_delay) == (
        timedelta(seconds=10),
        timedelta(milliseconds=250),
    )


def test_the_delays_have_defaults() -> None:
    settings = Settings.of({}, environment={})
    assert settings.duration("slot_in_use_delay") == timedelta(seconds=1)
    assert settings.restart_delay is None
