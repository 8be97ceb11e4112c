""" "What is the PostgreSQL Logical Replication", its set-up, and "Listener restart time strategy".

The rulings: the replication listener is a relay with `relay_from="wal"`. Publication and slot have one name,
`wal_slot`. The config of the replication role is `wal_url`. `restartDelaySlotInUse` is `slot_in_use_delay`, 1 s in
place of 10 s; `restartDelay`, and the strategy as a function, are `restart_delay`. The inbox is polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox import Message, Outbox
from outbox.core.events import SlotInUse, SlotTaken, Troubled
from outbox.settings import Settings
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
        made.append(Outbox(transport=message_publisher, observers=[recorder], **given, **options))
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


def test_the_delays_have_defaults() -> None:
    settings = Settings.of({}, environment={})
    assert settings.duration("slot_in_use_delay") == timedelta(seconds=1)
    assert settings.restart_delay is None
