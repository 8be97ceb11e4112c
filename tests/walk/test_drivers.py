"""Emitting on a driver's own connection: the message shares the fate of whatever that connection's transaction does."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import django.db
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from outbox import (
    Binding,
    Listener,
    Message,
    NotAtomicWarning,
    Outbox,
    SnapshotConflict,
    TablesMissing,
    TransactionError,
    tracking,
)
from outbox.core.attempt import Done, Reason
from outbox.core.events import Emitted
from outbox.core.prepared import prepare
from outbox.core.store import Selection
from outbox.testing import Emission, emitted, emitted_sync
from tests.support.databases import url_on
from tests.support.observing import Recorder, arrival
from tests.support.outboxes import MakeOutbox

from .drivers import DRIVERS
from .driving import AsyncPsycopg, Django, Driving, Psycopg, Sqlite

YEAR_2100 = datetime(2100, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
TOLD = {"key": "customer-1", "headers": {"tenant": "äöü", "empty": ""}, "content_type": "application/x-thing"}


OTHER_WAYS = ("asyncpg-pool", "asyncmy-pool", "django-alias")  # to a connection of the same kind


@pytest.fixture(params=[name for name in DRIVERS if name not in OTHER_WAYS])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Every driver in turn."""
    return str(request.param)


@pytest.fixture
def database_url(driver_name: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The database that the driver at hand speaks to."""
    return url_on(request, DRIVERS[driver_name].on, tmp_path)


@pytest.fixture
async def closed(driver_name: str, database_url: str) -> AsyncIterator[Driving]:
    """The driver at hand, before it connects: a test says how."""
    address = database_url.removeprefix("sqlite+aiosqlite:///").replace("+asyncpg", "").replace("+asyncmy", "")
    driving = DRIVERS[driver_name](address)
    yield driving
    await driving.end()


@pytest.fixture
async def driver(closed: Driving) -> Driving:
    """The driver at hand, with a fresh connection."""
    await closed.open()
    return closed


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    """An outbox with its tables."""
    outbox = make_outbox()
    await outbox.create_tables()
    return outbox


def only(*names: str) -> Callable[[Any], Any]:
    """What concerns some drivers only."""
    return pytest.mark.parametrize("driver_name", names, indirect=True)


on_sqlite = only("aiosqlite", "sqlite3", "django-sqlite")


async def bodies(outbox: Outbox) -> list[bytes]:
    return [stored.message.body for stored in await outbox.messages(limit=1000)]


async def rows(outbox: Outbox) -> list[dict[str, Any]]:
    """The messages exactly as the database holds them."""

    async def read(connection: AsyncConnection) -> list[dict[str, Any]]:
        found = await connection.execute(text(f"SELECT * FROM {outbox.tables.messages.name} ORDER BY id"))
        return [dict(row) for row in found.mappings()]

    async with outbox.engines.asynchronous.connect() as connection:
        return await read(connection)


# The transaction's fate


async def test_a_message_is_stored_by_the_commit_and_seen_by_nobody_before(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    message = await driver.emit(outbox, "order.created", {"id": 1})
    assert await outbox.messages() == []
    await driver.commit()
    [stored] = await outbox.messages()
    assert stored.message == message


@only(*DRIVERS)
async def test_a_rollback_takes_the_very_first_statement_of_a_connection_too(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "order.created", 1)
    await driver.rollback()
    assert await outbox.messages() == []
    await driver.begin()
    await driver.emit(outbox, "order.created", 2)
    await driver.commit()
    assert await bodies(outbox) == [b"2"]


@only("asyncpg", "psycopg-async", "psycopg", "aiosqlite", "sqlite3", "asyncmy", "pymysql", "mysqlclient")
async def test_a_connection_that_closes_without_commit_stores_nothing(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "order.created", 1)
    await driver.close()
    await driver.open()
    assert await outbox.messages() == []


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_message_and_data_share_one_fate(driver: Driving, outbox: Outbox, table_name: str, ending: str) -> None:
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TABLE {table_name}_orders (id INTEGER)"))
    await driver.begin()
    await driver.execute(f"INSERT INTO {table_name}_orders VALUES (1)")
    await driver.emit(outbox, "order.created", 1)
    await driver.execute(f"INSERT INTO {table_name}_orders VALUES (2)")
    await (driver.commit() if ending == "commit" else driver.rollback())
    async with outbox.transaction() as session:
        orders = (await session.scalars(text(f"SELECT id FROM {table_name}_orders"))).all()
    assert (orders, await bodies(outbox)) == (([1, 2], [b"1"]) if ending == "commit" else ([], []))


@only(*DRIVERS)
async def test_a_savepoint_takes_its_messages_with_it(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "a", "kept")
    await driver.savepoint()
    await driver.emit(outbox, "a", "gone")
    await driver.emit_many(outbox, "a", ["gone", "too"])
    await driver.rollback_to_savepoint()
    await driver.emit(outbox, "a", "kept as well")
    await driver.commit()
    assert await bodies(outbox) == [b'"kept"', b'"kept as well"']


@only(*DRIVERS)
async def test_where_no_transaction_is_open_a_warning_says_so(closed: Driving, outbox: Outbox) -> None:
    await closed.open_autocommit()
    with pytest.warns(NotAtomicWarning, match=r"without an open transaction.*(transaction|begin|BEGIN|atomic)\b"):
        await closed.emit(outbox, "a", 1)
    with pytest.warns(NotAtomicWarning):
        await closed.emit_many(outbox, "a", [2, 3])
    with pytest.warns(NotAtomicWarning):
        await closed.cancel_timer(outbox, "t")
    assert await bodies(outbox) == [b"1", b"2", b"3"]


async def test_a_warning_that_is_an_error_stops_the_emit_before_it_writes(closed: Driving, outbox: Outbox) -> None:
    await closed.open_autocommit()
    with pytest.raises(NotAtomicWarning):
        await closed.emit(outbox, "a", 1)
    assert await outbox.messages() == []


async def test_a_transaction_that_was_begun_by_hand_is_one(closed: Driving, outbox: Outbox) -> None:
    await closed.open_autocommit()
    await closed.begin_explicitly()
    await closed.emit(outbox, "a", "gone")
    await closed.rollback()
    await closed.begin_explicitly()
    await closed.emit(outbox, "a", "kept")
    await closed.commit()
    assert await bodies(outbox) == [b'"kept"']


# What is written


async def test_every_column_is_as_sqlalchemy_writes_it(driver: Driving, outbox: Outbox) -> None:
    emits: list[dict[str, Any]] = [
        {"body": bytes(range(256)), **TOLD, "eta": YEAR_2100, "expiration": timedelta(minutes=5), "timer_id": "{}"},
        {"body": "ü", "eta": YEAR_2100},
        {"body": None, "eta": YEAR_2100, "expiration": 0.5},
    ]
    with tracking():
        async with outbox.transaction() as session:
            for options in emits:
                await outbox.emit(session, "ключ.🚀", **{**options, "timer_id": _named(options, "theirs")})
        await driver.begin()
        for options in emits:
            await driver.emit(outbox, "ключ.🚀", **{**options, "timer_id": _named(options, "ours")})
        await driver.commit()
    found = await rows(outbox)
    theirs, ours = found[: len(emits)], found[len(emits) :]
    assert [_comparable(row) for row in ours] == [_comparable(row) for row in theirs]


def _named(options: dict[str, Any], name: str) -> str | None:
    return name if "timer_id" in options else None


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs between any two messages; of the time of its making, the form."""
    created_at, timer_id = row["created_at"], row["timer_id"]
    form = len(created_at) if isinstance(created_at, str) else created_at.tzinfo
    differing = {"id": None, "message_id": len(row["message_id"]), "created_at": form, "timer_id": bool(timer_id)}
    if "timer_once" in row:  # what MySQL computes from the timer's name
        differing["timer_once"] = bool(row["timer_once"])
    return {**row, **differing}


async def test_a_message_is_unchanged_from_emit_to_store(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    with tracking():
        message = await driver.emit(outbox, "a", b"\x00\xff", **TOLD)
    await driver.commit()
    [stored] = await outbox.messages()
    assert stored.message == message
    assert len(stored.message.tracking_ids) == 2


async def test_a_delay_counts_on_the_databases_clock(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "a", 1, eta=timedelta(hours=1), expiration=timedelta(hours=2))
    await driver.commit()
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 1, eta=timedelta(hours=1), expiration=timedelta(hours=2))
    ours, theirs = await outbox.messages()
    assert ours.message.expires_at is not None
    assert abs(ours.message.expires_at - ours.due_at - timedelta(hours=2)) < timedelta(minutes=1)
    assert abs(theirs.due_at - ours.due_at) < timedelta(minutes=1)


@only("asyncpg", "sqlite3", "asyncmy")
@pytest.mark.parametrize(
    "eta", [datetime(1969, 12, 31, tzinfo=UTC), datetime.min.replace(tzinfo=UTC)], ids=["1969", "year 1"]
)
async def test_what_was_due_before_1970_is_claimed_at_once(driver: Driving, outbox: Outbox, eta: datetime) -> None:
    await driver.begin()
    assert await driver.emit(outbox, "order.created", 1, eta=eta, timer_id="order-1") is not None
    await driver.commit()
    async with outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=30))) as claim:
        [attempt] = claim.attempts
        await claim.settle({attempt.id: Done()})
    await driver.begin()
    assert await driver.emit(outbox, "order.created", 2, eta=eta, timer_id="order-1") is not None, "its name is free"
    await driver.commit()


@only("asyncpg", "sqlite3", "asyncmy")
async def test_an_expiration_counts_from_a_time_before_1970_as_from_any_other(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "order.created", 1, eta=datetime(1960, 1, 1, tzinfo=UTC), expiration=timedelta(days=1))
    await driver.commit()
    async with outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=30))) as claim:
        assert claim.attempts == []
    assert [letter.reason for letter in await outbox.dead_letters.list()] == [Reason.EXPIRED]


async def test_many_messages_go_as_one_batch(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    messages = await driver.emit_many(outbox, "a", range(250), key=str, headers={"a": "b"})
    assert await driver.emit_many(outbox, "a", []) == []
    await driver.commit()
    stored = [stored.message for stored in await outbox.messages(limit=1000)]
    assert stored == messages
    assert [message.key for message in stored] == [str(number) for number in range(250)]


async def test_many_messages_are_gone_with_a_rollback(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit_many(outbox, "a", range(10))
    await driver.rollback()
    assert await outbox.messages() == []


async def test_a_timer_is_set_once_and_cancelled_once(driver: Driving, outbox: Outbox) -> None:
    timer = {"eta": timedelta(hours=1), "timer_id": "t"}
    await driver.begin()
    assert await driver.emit(outbox, "a", "first", **timer) is not None
    assert await driver.emit(outbox, "a", "second", **timer) is None
    await driver.commit()
    await driver.begin()
    assert await driver.cancel_timer(outbox, "t") is True
    assert await driver.cancel_timer(outbox, "t") is False
    await driver.rollback()
    assert await bodies(outbox) == [b'"first"']
    await driver.begin()
    assert await driver.cancel_timer(outbox, "t") is True
    assert await driver.emit(outbox, "a", "third", **timer) is not None
    await driver.commit()
    assert await bodies(outbox) == [b'"third"']


async def test_observers_hear_of_it(driver: Driving, make_outbox: MakeOutbox) -> None:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    await outbox.create_tables()
    await driver.begin()
    message = await driver.emit(outbox, "a", 1)
    await driver.commit()
    assert [list(event.messages) for event in recorder.of(Emitted)] == [[message]]


async def test_a_statement_is_compiled_once(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.emit(outbox, "a", 1)
    before = prepare.cache_info()
    await driver.emit(outbox, "a", 2)
    await driver.emit_many(outbox, "a", [3, 4])
    await driver.rollback()
    after = prepare.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (0, 2)


# What goes wrong

DRIVERS_OWN = ("asyncpg", "psycopg", "sqlite3", "django", "asyncmy", "pymysql", "MySQLdb")


async def test_missing_tables_are_named_with_the_command_that_makes_them(
    driver: Driving, make_outbox: MakeOutbox
) -> None:
    outbox = make_outbox()
    attempts = [
        lambda: driver.emit(outbox, "a", 1),
        lambda: driver.emit_many(outbox, "a", [1, 2]),
        lambda: driver.cancel_timer(outbox, "t"),
    ]
    for attempt in attempts:
        await driver.begin()
        with pytest.raises(TablesMissing, match="outbox tables create"):
            await attempt()
        await driver.rollback()
    await outbox.create_tables()
    await driver.begin()
    await driver.emit(outbox, "a", 2)
    await driver.commit()
    assert await bodies(outbox) == [b"2"]


async def test_another_error_of_the_driver_is_the_drivers_own(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.execute(f"DROP TABLE {outbox.tables.messages.name}")
    await driver.execute(f"CREATE TABLE {outbox.tables.messages.name} (unrelated INTEGER)")
    with pytest.raises(Exception, match=r"created_at|Unknown column") as caught:
        await driver.emit(outbox, "a", 1)
    assert type(caught.value).__module__.split(".")[0] in DRIVERS_OWN
    await driver.rollback()


# Receiving


async def test_a_message_is_received_once_in_the_drivers_own_transaction(driver: Driving, outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("q", "#")])
    sent = Message(routing_key="a", body=b"\x00", headers={"h": "ä"}, key="k", tracking_ids=("x", "evt_1"))
    await driver.begin()
    assert await driver.receive(outbox, "q", sent)
    assert await outbox.messages() == []
    await driver.rollback()
    await driver.begin()
    assert await driver.receive(outbox, "q", sent)
    assert not await driver.receive(outbox, "q", sent)
    await driver.commit()
    [stored] = await outbox.messages(queue="q")
    assert stored.message == sent


async def test_a_message_that_nobody_wants_is_a_dead_letter_of_the_same_transaction(
    driver: Driving, outbox: Outbox
) -> None:
    sent = Message(routing_key="a", body=b"1", tracking_ids=("evt_1",))
    await driver.begin()
    assert await driver.receive(outbox, "lonely", sent)
    assert await outbox.dead_letters.list() == []
    await driver.commit()
    [letter] = await outbox.dead_letters.list()
    assert (letter.message, letter.queue, letter.reason) == (sent, "lonely", "unwanted")


async def test_without_a_transaction_nothing_is_received(closed: Driving, outbox: Outbox) -> None:
    await closed.open_autocommit()
    with pytest.raises(TransactionError, match="receive on a connection without an open transaction"):
        await closed.receive(outbox, "q", Message(routing_key="a", body=b"1"))
    assert await outbox.dead_letters.list() == []


@only(*DRIVERS)
async def test_the_wrong_twin_says_which_is_right(driver: Driving, outbox: Outbox) -> None:
    for call in await driver.mispaired(outbox):
        with pytest.raises(TransactionError, match=r"needs the event loop: use `await emit|would block.*use emit_sync"):
            await call()
    assert await outbox.messages() == []


@on_sqlite
async def test_sqlite_refuses_a_transaction_that_read_before_others_wrote_with_advice(
    closed: Driving, outbox: Outbox
) -> None:
    await closed.open_autocommit()
    await closed.begin_explicitly()
    await _read(closed, f"SELECT count(*) FROM {outbox.tables.messages.name}")
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", "theirs")
    with pytest.raises(SnapshotConflict, match="BEGIN IMMEDIATE"):
        await closed.emit(outbox, "a", "ours")
    await closed.rollback()


async def _read(driver: Driving, statement: str) -> None:
    """A statement whose rows are fetched: SQLite keeps the snapshot of one that was not."""
    if hasattr(driver.connection, "execute_fetchall"):
        await driver.connection.execute_fetchall(statement)
    elif isinstance(driver, Django):
        await driver.execute(statement)
    elif isinstance(driver, Sqlite):
        await driver.run(lambda: driver.connection.execute(statement).fetchall())


@only("django-sqlite")
async def test_what_django_also_calls_a_connection_is_refused(driver: Driving, outbox: Outbox) -> None:
    from django.core.cache import cache

    assert type(cache) is type(django.db.connection)
    with pytest.raises(TransactionError, match="no database"):
        outbox.emit_sync(cache, "a", 1)


@only("asyncmy")
async def test_asyncmy_is_refused_where_it_would_change_bytes(driver: Driving, outbox: Outbox) -> None:
    await driver.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'")
    await driver.begin()
    with pytest.raises(TransactionError, match="NO_BACKSLASH_ESCAPES"):
        await driver.emit(outbox, "a", {"id": 1})
    await driver.rollback()
    assert await outbox.messages() == []


@only("pymysql", "mysqlclient", "django-mysql")
async def test_the_others_carry_it_as_it_is(driver: Driving, outbox: Outbox) -> None:
    await driver.begin()
    await driver.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'")
    await driver.emit(outbox, "a", {"id": "'\\ \""})
    await driver.commit()
    [body] = await bodies(outbox)
    assert json.loads(body) == {"id": "'\\ \""}


# From end to end


async def test_a_worker_handles_what_was_emitted(driver: Driving, outbox: Outbox) -> None:
    arrivals: asyncio.Queue[Any] = asyncio.Queue()

    async def on_order(order: dict[str, int]) -> None:
        await arrivals.put(order)

    async with outbox.running(listeners=[Listener("order.*", on_order, queue="q")]):
        await driver.begin()
        await driver.emit(outbox, "order.created", {"id": -1})
        await driver.rollback()
        await driver.begin()
        await driver.emit(outbox, "order.created", {"id": 1})
        await driver.emit_many(outbox, "order.paid", [{"id": 2}, {"id": 3}])
        await driver.commit()
        found = [(await arrival(arrivals))["id"] for _ in range(3)]
    assert sorted(found) == [1, 2, 3]


@only("django-postgresql", "django-alias", "django-sqlite", "django-mysql")
async def test_django_tells_of_its_commits_and_sleepers_are_woken(
    driver: Driving, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(outbox.store.queues, "announce", told.append)
    await driver.begin()
    await driver.emit(outbox, "a", "gone")
    await driver.rollback()
    await driver.begin()
    await driver.savepoint()
    await driver.emit(outbox, "a", "gone too")
    await driver.rollback_to_savepoint()
    await driver.commit()
    assert told == []
    await driver.begin()
    await driver.emit(outbox, "a", "kept")
    assert told == []
    await driver.commit()
    assert told == [None]


@only("django-postgresql", "django-alias", "django-sqlite", "django-mysql")
async def test_a_test_sees_what_the_open_transaction_of_a_django_connection_has_emitted(
    driver: Driving, outbox: Outbox
) -> None:
    assert isinstance(driver, Django)

    async def seen() -> list[Emission]:
        return await driver.run(emitted_sync, driver.connection)

    told: dict[str, Any] = TOLD
    assert await seen() == []
    await driver.begin()
    sent = await driver.emit(outbox, "order.created", {"id": 1}, **told, eta=YEAR_2100, expiration=timedelta(hours=1))
    await driver.emit_many(outbox, "order.paid", [2, 3])
    await driver.emit(outbox, "order.due", 4, timer_id="t")
    first = Emission("order.created", {"id": 1}, **told, eta=YEAR_2100, expiration=timedelta(hours=1))
    others = [Emission("order.paid", 2), Emission("order.paid", 3)]
    found = await seen()
    assert found == [first, *others, Emission("order.due", 4, timer_id="t")]
    assert found[0].message is not None
    assert replace(found[0].message, expires_at=None) == sent
    await driver.cancel_timer(outbox, "t")
    await driver.savepoint()
    await driver.emit(outbox, "order.lost", 5)
    assert await seen() == [first, *others, Emission("order.lost", 5)]
    await driver.rollback_to_savepoint()
    assert await seen() == [first, *others]
    await driver.rollback()
    assert await seen() == []
    await driver.begin()
    await driver.emit(outbox, "order.created", 6)
    assert await seen() == [Emission("order.created", 6)]
    await driver.commit()
    assert await seen() == []
    with pytest.raises(TransactionError, match="would block the event loop"):
        await emitted(driver.connection)


@only("django-postgresql", "django-sqlite")
async def test_outside_of_an_atomic_block_a_test_is_told_what_is_missing(closed: Driving, outbox: Outbox) -> None:
    await closed.open(AUTOCOMMIT=False)
    assert isinstance(closed, Django)
    await closed.emit(outbox, "a", 1)
    with pytest.raises(TransactionError, match=r"only inside `transaction.atomic\(\)`"):
        await closed.run(emitted_sync, closed.connection)
    await closed.run(lambda: closed.connection.rollback())


@only("psycopg", "sqlite3")
async def test_a_drivers_own_connection_does_not_tell_what_was_emitted(driver: Driving, outbox: Outbox) -> None:
    assert isinstance(driver, Psycopg | Sqlite)
    with pytest.raises(TransactionError, match="only SQLAlchemy's sessions and connections, and Django's"):
        await driver.run(emitted_sync, driver.connection)


@only("django-postgresql", "django-sqlite", "django-mysql")
async def test_a_django_connection_without_autocommit_begins_by_itself(closed: Driving, outbox: Outbox) -> None:
    await closed.open(AUTOCOMMIT=False)
    assert isinstance(closed, Django)
    await closed.emit(outbox, "a", "gone")
    await closed.run(lambda: closed.connection.rollback())
    await closed.emit(outbox, "a", "kept")
    await closed.run(lambda: closed.connection.commit())
    assert await bodies(outbox) == [b'"kept"']


# What callers may have made of their connections


@only("psycopg", "psycopg-async")
async def test_the_cursors_and_rows_of_a_psycopg_connection_may_be_of_any_kind(closed: Driving, outbox: Outbox) -> None:
    threaded = isinstance(closed, Psycopg)
    for factory in (
        (psycopg.RawCursor, psycopg.ClientCursor) if threaded else (psycopg.AsyncRawCursor, psycopg.AsyncClientCursor)
    ):
        await closed.open(cursor_factory=factory, row_factory=psycopg.rows.dict_row)
        await closed.emit(outbox, "a", factory.__name__)
        await closed.emit(outbox, "a", 1, eta=timedelta(hours=1), timer_id=factory.__name__)
        await closed.commit()
        await closed.close()
    assert len(await outbox.messages()) == 4


@only("psycopg-async")
async def test_a_pipeline_of_psycopg_carries_messages_and_timers(closed: Driving, outbox: Outbox) -> None:
    assert isinstance(closed, AsyncPsycopg)
    await closed.open(autocommit=True)
    timer = {"eta": timedelta(hours=1), "timer_id": "t"}
    async with closed.connection.pipeline(), closed.connection.transaction():
        await closed.emit(outbox, "a", 1)
        await closed.emit_many(outbox, "a", [2, 3])
        assert await closed.emit(outbox, "a", 4, **timer) is not None
        assert await closed.emit(outbox, "a", 5, **timer) is None
        assert await closed.cancel_timer(outbox, "t") is True
        assert await closed.cancel_timer(outbox, "t") is False
    assert await bodies(outbox) == [b"1", b"2", b"3"]


MODES: list[dict[str, Any]] = [{"isolation_level": level} for level in ("", "DEFERRED", "IMMEDIATE", "EXCLUSIVE", None)]
if sys.version_info >= (3, 12):
    MODES += [{"autocommit": True}, {"autocommit": False}, {"autocommit": True, "isolation_level": "DEFERRED"}]
UNPROTECTED = ({"isolation_level": None}, {"autocommit": True})


@only("sqlite3", "aiosqlite")
@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_every_mode_of_sqlite3_is_understood(closed: Driving, outbox: Outbox, mode: dict[str, Any]) -> None:
    await closed.open(**mode)
    unprotected = any(mode.items() >= each.items() for each in UNPROTECTED)
    if unprotected:
        with pytest.warns(NotAtomicWarning):
            await closed.emit(outbox, "a", 1)
    else:
        await closed.emit(outbox, "a", 1)
    await closed.rollback()
    assert await bodies(outbox) == ([b"1"] if unprotected else [])


@only("sqlite3")
async def test_a_class_of_the_callers_own_is_what_it_derives_from(closed: Driving, outbox: Outbox) -> None:
    class Traced(sqlite3.Connection):
        pass

    await closed.open(factory=Traced)
    await closed.emit(outbox, "a", 1)
    await closed.commit()
    assert await bodies(outbox) == [b"1"]


@only("asyncpg", "asyncpg-pool")
async def test_a_class_of_the_callers_own_derives_from_asyncpgs(closed: Driving, outbox: Outbox) -> None:
    class Traced(asyncpg.Connection):  # type: ignore[misc]
        pass

    await closed.open(connection_class=Traced)
    await closed.begin()
    await closed.emit(outbox, "a", 1)
    await closed.commit()
    assert await bodies(outbox) == [b"1"]


@only("sqlite3")
async def test_emitting_on_one_driver_imports_no_other(closed: Driving, outbox: Outbox) -> None:
    await closed.open()
    script = (
        "import json, sqlite3, sys; from outbox import Outbox; from sqlalchemy import create_engine\n"
        f"engine = create_engine('sqlite:///{closed.url}')\n"
        f"outbox = Outbox(db_engine=engine, table_name={outbox.tables.messages.name!r})\n"
        f"connection = sqlite3.connect({closed.url!r})\n"
        "outbox.emit_sync(connection, 'a', 1); connection.commit(); print(json.dumps(sorted(sys.modules)))"
    )
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {module.split(".")[0] for module in json.loads(ran.stdout)} & {"asyncpg", "psycopg", "django"}
    assert await bodies(outbox) == [b"1"]
