""" "Outbox table cleanup", "Logging", "Singleton vs multiple instances", and the API of `setup()`.

The options that only RabbitMQ reads are left to its own tests; their spellings are checked here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import inspect
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import outbox as library
from outbox import (
    IMMEDIATELY,
    NEVER,
    ConfigurationError,
    Message,
    Outbox,
    Reject,
    TransportMismatch,
    emit,
    listen,
    setup,
)
from outbox.core.events import CleanedUp, Handled, Relayed
from outbox.observers.logging import LoggingObserver
from tests.support.databases import on_postgresql, on_sqlite
from tests.support.observing import Recorder, arrival, eventually, routing_keys
from tests.support.outboxes import MakeOutbox
from tests.support.program import program

from .users import JOHN, MAIN_APPLICATION, emit_and_commit


class User(BaseModel):
    id: int


# Singleton vs multiple instances


async def test_the_names_of_the_module_belong_to_one_outbox(
    db_engine: AsyncEngine, singleton: Outbox, table_name: str
) -> None:
    setup(db_engine=db_engine, table_name=table_name)
    async with AsyncSession(db_engine) as session:
        await emit(session, "user.created", {"id": 123, "username": "johndoe"})
        await session.commit()
    assert await routing_keys(library.outbox) == ["user.created"]
    for name in ("emit", "emit_many", "emit_sync", "cancel_timer", "transaction", "message_relay", "worker", "running"):
        assert getattr(library, name) == getattr(library.outbox, name)


@on_sqlite
async def test_the_singleton_can_be_used_by_name(db_engine: AsyncEngine, singleton: Outbox, table_name: str) -> None:
    from outbox import outbox

    outbox.setup(db_engine=db_engine, table_name=table_name)
    async with AsyncSession(db_engine) as session:
        await outbox.emit(session, "user.created", {"id": 123, "username": "johndoe"})
        await session.commit()
    assert await routing_keys(singleton) == ["user.created"]


@on_sqlite
async def test_main_application_and_worker_process_run_as_the_scripts_they_are_written_as(
    database_url: str, table_name: str
) -> None:
    worker_process = """
        import asyncio
        import os
        import signal
        import sys

        from outbox import setup, listen, worker

        setup(db_engine_url=sys.argv[1], table_name=sys.argv[2])

        @listen("user.created", queue="users")
        async def on_user_created(user):
            print(user)
            os.kill(os.getpid(), signal.SIGTERM)

        asyncio.run(worker([on_user_created]))
    """
    async with program(MAIN_APPLICATION, database_url, table_name) as application:
        assert await application.end() == (0, "", "")
    async with program(worker_process, database_url, table_name) as process:
        assert await process.end() == (0, "{'id': 123, 'username': 'johndoe'}\n", "")


async def test_several_instances_have_a_database_each(tmp_path: Path) -> None:
    db_engine1 = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'one.db'}")
    db_engine2 = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'two.db'}")
    outbox1 = Outbox(db_engine=db_engine1)
    outbox2 = Outbox(db_engine=db_engine2)

    async with AsyncSession(db_engine1) as session:
        await outbox1.emit(session, "user.created", {"id": 123, "username": "johndoe"})
        await session.commit()
    async with AsyncSession(db_engine2) as session:
        await outbox2.emit(session, "user.created", {"id": 456, "username": "maryjane"})
        await session.commit()

    for outbox, name in ((outbox1, b"johndoe"), (outbox2, b"maryjane")):
        [stored] = await outbox.messages()
        assert name in stored.message.body
        await outbox.close()
    await db_engine1.dispose()
    await db_engine2.dispose()


async def test_several_outboxes_in_one_database_keep_to_their_own_tables(
    make_outbox: MakeOutbox, table_name: str
) -> None:
    first, second = make_outbox(), make_outbox(table_name=f"{table_name}_second")
    arrivals: asyncio.Queue[str] = asyncio.Queue()

    def listener(name: str) -> Any:
        async def callback(body: object) -> None:
            await arrivals.put(f"{name} {body}")

        return listen("#", queue="same name")(callback)

    async with first.running(listeners=[listener("first")]), second.running(listeners=[listener("second")]):
        await emit_and_commit(first, body="to first")
        assert await arrival(arrivals) == "first to first"
        await emit_and_commit(second, body="to second")
        assert await arrival(arrivals) == "second to second"
    assert arrivals.empty()


async def test_one_transaction_can_emit_through_several_outboxes(make_outbox: MakeOutbox, table_name: str) -> None:
    first, second = make_outbox(), make_outbox(table_name=f"{table_name}_second")
    async with first.transaction() as session:
        await first.emit(session, "one", JOHN)
        await second.emit(session, "two", JOHN)
    assert await routing_keys(first) == ["one"]
    assert await routing_keys(second) == ["two"]


def test_an_outbox_that_was_not_set_up_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"setup\(db_engine_url="):
        _ = Outbox().store


async def test_a_second_setup_replaces_the_first(singleton: Outbox, tmp_path: Path) -> None:
    for name in ("one", "two"):
        setup(db_engine_url=f"sqlite+aiosqlite:///{tmp_path / name}.db")
        await emit_and_commit(singleton, name)
        assert await routing_keys(singleton) == [name]
        await singleton.close()


# setup()


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "amqp://one/", "rabbitmq_url": "amqp://two/"},
        {"rabbitmq_url": "amqp://one/", "rmq_connection_url": "amqp://two/"},
        {"rmq_connection_url": "amqp://one/", "rmq_connection": object()},
        {"db_engine_url": "sqlite+aiosqlite:///a.db", "db_engine": create_async_engine("sqlite+aiosqlite:///b.db")},
    ],
)
def test_one_thing_said_twice_with_different_values_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Outbox(**options)


@pytest.mark.parametrize("spelling", ["transport", "rabbitmq_url", "rmq_connection_url", "rmq_connection"])
def test_every_spelling_of_the_transport_is_the_same_option(spelling: str) -> None:
    async def publish(message: Message) -> None: ...

    options: dict[str, Any] = {spelling: publish}
    outbox = Outbox(db_engine_url="sqlite+aiosqlite:///never.db", **options)
    assert outbox.transport.name == "function"
    same: dict[str, Any] = dict.fromkeys((spelling, "transport"), "amqp://guest:guest@localhost:5672/")
    assert Outbox(**same).settings.transport == same["transport"]


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match="table_name"):
        Outbox(db_engine_url="sqlite+aiosqlite:///never.db", tablename="typo")  # type: ignore[call-arg]


def test_the_defaults_are_those_of_the_project() -> None:
    settings = Outbox(db_engine_url="sqlite+aiosqlite:///never.db").settings
    assert settings.table_name == "outbox_table"
    assert settings.poll_interval == timedelta(seconds=1)
    assert settings.expiration is None
    assert settings.clean_up_after == IMMEDIATELY


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DB_ENGINE_URL", "sqlite+aiosqlite:///never.db")
    monkeypatch.setenv("OUTBOX_TABLE_NAME", "from_the_environment")
    monkeypatch.setenv("OUTBOX_RETRY_DELAYS", "1, 10s, 1m")
    monkeypatch.setenv("OUTBOX_CLEAN_UP_AFTER", "7d")
    outbox = Outbox()
    assert outbox.settings.table_name == "from_the_environment"
    assert outbox.settings.clean_up_after == timedelta(days=7)
    policy = outbox.settings.policy("retry_delays")
    assert [policy.delay(number, Exception()) for number in (1, 2, 3, 4)] == [
        timedelta(seconds=1),
        timedelta(seconds=10),
        timedelta(minutes=1),
        None,
    ]


async def test_a_database_in_memory_works_as_the_project_says() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite:///:memory:", poll_interval=0.1)
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("user.created", queue="memory", retry_delays=(0,))
    async def memory(user: object, session: AsyncSession, attempt_count: int) -> None:
        if attempt_count == 1:
            raise ConnectionError
        await arrivals.put(user)

    async with outbox.running(listeners=[memory]):
        with pytest.raises(ZeroDivisionError):
            async with outbox.transaction() as session:
                await outbox.emit(session, "user.created", "rolled back")
                raise ZeroDivisionError
        await emit_and_commit(outbox)
        assert await arrival(arrivals) == JOHN
    assert arrivals.empty()
    await outbox.close()


async def test_table_name_names_the_table_and_all_others_derive_from_it(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, table_name: str
) -> None:
    outbox = make_outbox(table_name=f"{table_name}_mine")
    await outbox.create_tables()
    async with db_engine.connect() as connection:
        names = await connection.run_sync(lambda plain: inspect(plain).get_table_names())
    ours = {name for name in names if name.startswith(f"{table_name}_")}
    assert f"{table_name}_mine" in ours
    assert all(name.startswith(f"{table_name}_mine") for name in ours)
    assert ours == set(outbox.metadata.tables)


@pytest.mark.parametrize("name", ["no spaces", "1st", 'quo"ted', "x; DROP TABLE users", "", "ä", "x" * 41])
def test_a_table_name_that_is_no_plain_identifier_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="table_name"):
        Outbox(db_engine_url="sqlite+aiosqlite:///never.db", table_name=name).metadata  # noqa: B018


@on_postgresql
async def test_tables_can_live_in_a_schema_of_their_own(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, table_name: str, recorder: Recorder
) -> None:
    async with db_engine.begin() as connection:
        await connection.exec_driver_sql(f"CREATE SCHEMA {table_name}_schema")
    outbox = make_outbox(schema=f"{table_name}_schema", observers=[recorder])
    plain = make_outbox()

    @listen("user.created", queue="schema", retry_delays=())
    async def rejects(user: object) -> None:
        raise Reject

    async with outbox.running(listeners=[rejects]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled)
    assert len(await outbox.dead_letters.list()) == 1
    assert await plain.dead_letters.list() == []


@on_sqlite
async def test_a_worker_of_another_transport_is_refused_by_both_names(make_outbox: MakeOutbox) -> None:
    async def publish(message: Message) -> None: ...

    @listen("user.created", queue="users")
    async def users(user: object) -> None: ...

    async with make_outbox(transport=publish).running(relay=True):
        pass
    with pytest.raises(TransportMismatch, match=r"'function'.*'database'"):
        async with make_outbox().running(listeners=[users]):
            pass


async def test_columns_that_the_application_added_to_the_table_are_left_alone(
    make_outbox: MakeOutbox, recorder: Recorder, db_engine: AsyncEngine
) -> None:
    outbox = make_outbox(observers=[recorder])
    await outbox.create_tables()
    for table in (outbox.tables.messages, outbox.tables.dead_letters):
        async with db_engine.begin() as connection:
            await connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN audited_by VARCHAR(20)")

    @listen("user.*", queue="users", retry_delays=())
    async def users(user: object, routing_key: str) -> None:
        if routing_key == "user.rejected":
            raise Reject

    async with outbox.running(listeners=[users]):
        await emit_and_commit(outbox, "user.created")
        await emit_and_commit(outbox, "user.rejected")
        await recorder.wait_for(Handled, 2)
    assert await outbox.messages() == []
    assert len(await outbox.dead_letters.list()) == 1


# Outbox table cleanup


async def test_a_message_is_cleaned_up_immediately_by_default(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    published: list[Message] = []

    async def publish(message: Message) -> None:
        published.append(message)

    outbox = make_outbox(transport=publish, observers=[recorder])
    async with outbox.running(relay=True):
        await emit_and_commit(outbox)
        await recorder.wait_for(Relayed)
        assert await outbox.messages() == []
    assert [message.routing_key for message in published] == ["user.created"]


@pytest.mark.parametrize("spelling", [IMMEDIATELY, "IMMEDIATELY", "immediately", NEVER, "NEVER", "never"])
def test_retentions_are_accepted_as_names_and_as_strings(spelling: Any) -> None:
    settings = Outbox(db_engine_url="sqlite+aiosqlite:///never.db", clean_up_after=spelling).settings
    assert settings.clean_up_after == spelling.upper()


async def test_a_message_is_never_cleaned_up_if_so_wished(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    async def publish(message: Message) -> None: ...

    outbox = make_outbox(transport=publish, observers=[recorder], clean_up_after=NEVER, poll_interval=0.01)
    async with outbox.running(relay=True):
        message = await emit_and_commit(outbox)
        await recorder.wait_for(Relayed)
        await emit_and_commit(outbox, "user.deleted")
        await recorder.wait_for(Relayed, 2)
    first, second = await outbox.messages(state="sent")
    assert first.message == message
    assert second.done_at is not None
    assert (await outbox.backlog()).sent == 2
    assert len(recorder.of(Relayed)) == 2


async def test_a_message_is_cleaned_up_after_a_while_even_when_nothing_else_happens(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    async def publish(message: Message) -> None: ...

    outbox = make_outbox(transport=publish, observers=[recorder], clean_up_after=timedelta(seconds=0.3))
    async with outbox.running(relay=True):
        began = time.monotonic()
        await emit_and_commit(outbox)
        assert await recorder.wait_for(CleanedUp) == [CleanedUp("sent", 1)]
        assert time.monotonic() - began > 0.295  # SQLite's clock counts in milliseconds
    assert await outbox.messages() == []
    assert len(recorder.of(Relayed)) == 1


async def test_what_a_worker_handled_is_cleaned_up_by_the_same_rule(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    @listen("user.created", queue="plain")
    async def plain(user: object) -> None: ...

    @listen("user.created", queue="in session")
    async def in_session(user: object, session: AsyncSession) -> None: ...

    outbox = make_outbox(observers=[recorder], clean_up_after=timedelta(seconds=0.3))
    async with outbox.running(listeners=[plain, in_session]):
        began = time.monotonic()
        await emit_and_commit(outbox)
        await eventually(lambda: sum(event.count for event in recorder.of(CleanedUp)) == 2)
        assert time.monotonic() - began > 0.295
    assert await outbox.messages() == []
    assert {event.what for event in recorder.of(CleanedUp)} == {"sent"}
    assert {event.queue for event in recorder.of(Handled)} == {"plain", "in session"}


@on_sqlite
async def test_cleanup_never_takes_what_was_not_sent(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    refusals = 0

    async def publish(message: Message) -> None:
        nonlocal refusals
        if message.routing_key == "user.refused":
            refusals += 1
            raise ConnectionError

    outbox = make_outbox(
        transport=publish, observers=[recorder], clean_up_after=timedelta(0), relay_retry_delays=(0, 0, 60)
    )
    async with outbox.running(relay=True):
        await emit_and_commit(outbox, "user.refused")
        await emit_and_commit(outbox, "user.created")
        await recorder.wait_for(CleanedUp)
        await recorder.wait_for(Relayed, 4)
    assert await routing_keys(outbox) == ["user.refused"]
    assert refusals == 3


@pytest.mark.parametrize("value", ["SOMETIME", timedelta(days=-1), 7, True])
def test_a_retention_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="clean_up_after"):
        Outbox(db_engine_url="sqlite+aiosqlite:///never.db", clean_up_after=value)


# Logging


def levels(caplog: pytest.LogCaptureFixture) -> dict[int, list[str]]:
    """What was logged, by level."""
    found: dict[int, list[str]] = {}
    for record in caplog.records:
        assert record.name == "outbox"
        found.setdefault(record.levelno, []).append(record.getMessage())
    return found


def said(caplog: pytest.LogCaptureFixture, level: int, *parts: str) -> bool:
    return any(all(part in text for part in parts) for text in levels(caplog).get(level, []))


@pytest.fixture
def logging_outbox(make_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> Outbox:
    """An outbox whose log is watched, from DEBUG upwards."""
    caplog.set_level(logging.DEBUG, "outbox")
    return make_outbox(observers=[LoggingObserver(), recorder], retry_delays=(0,))


@on_sqlite
async def test_normal_operations_are_logged_at_info(
    logging_outbox: Outbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    @listen("user.created", queue="users")
    async def users(user: object) -> None: ...

    async with logging_outbox.running(listeners=[users]):
        message = await emit_and_commit(logging_outbox)
        await recorder.wait_for(Handled)
    assert said(caplog, logging.INFO, "emitted", "user.created", message.id)
    assert said(caplog, logging.INFO, "handled", "user.created", message.id, "users")
    assert set(levels(caplog)) <= {logging.DEBUG, logging.INFO}
    assert "johndoe" not in caplog.text


@on_sqlite
async def test_queue_bindings_are_logged_at_debug(logging_outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    @listen("user.*", queue="users")
    async def users(user: object) -> None: ...

    async with logging_outbox.running(listeners=[users]):
        pass
    assert said(caplog, logging.DEBUG, "users", "user.*")


@on_sqlite
async def test_message_polling_is_logged_at_debug(
    logging_outbox: Outbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    @listen("user.*", queue="users")
    async def users(user: object) -> None: ...

    async with logging_outbox.running(listeners=[users]):
        await emit_and_commit(logging_outbox)
        await recorder.wait_for(Handled)
    assert said(caplog, logging.DEBUG, "routed 1", "users")


@on_sqlite
async def test_retries_rejections_and_dead_letters_are_logged_as_warnings(
    logging_outbox: Outbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    @listen("user.created", queue="fails")
    async def fails(user: object) -> None:
        raise ConnectionError("not there")

    @listen("user.created", queue="rejects")
    async def rejects(user: object) -> None:
        raise Reject("never again")

    async with logging_outbox.running(listeners=[fails, rejects]):
        message = await emit_and_commit(logging_outbox)
        await recorder.wait_for(Handled, 3)
    assert said(caplog, logging.WARNING, "attempt 1", message.id, "fails", "not there")
    assert said(caplog, logging.WARNING, message.id, "fails", "dead", "exhausted")
    assert said(caplog, logging.WARNING, message.id, "rejects", "dead", "rejected", "never again")
    assert logging.ERROR not in levels(caplog)
    assert "johndoe" not in caplog.text


@on_sqlite
async def test_failures_during_deserialization_are_logged_as_errors(
    logging_outbox: Outbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    @listen("user.created", queue="strict")
    async def strict(user: User) -> None: ...

    async with logging_outbox.running(listeners=[strict]):
        message = await emit_and_commit(logging_outbox, body={"id": "johndoe"})
        await recorder.wait_for(Handled)
    assert said(caplog, logging.ERROR, message.id, "strict")
    assert "johndoe" not in caplog.text


async def test_unexpected_errors_are_logged_as_errors_without_credentials_and_outlived(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async def publish(message: Message) -> None: ...

    outbox = make_outbox(transport=publish, observers=[LoggingObserver(), recorder])
    name = outbox.tables.messages.name

    async def rename(before: str, after: str) -> None:
        async with db_engine.begin() as connection:
            await connection.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}")

    async with outbox.running(relay=True):
        await emit_and_commit(outbox)
        await recorder.wait_for(Relayed)
        await rename(name, f"{name}_elsewhere")
        await eventually(lambda: said(caplog, logging.ERROR, "relay"))
        await rename(f"{name}_elsewhere", name)
        await emit_and_commit(outbox)
        await recorder.wait_for(Relayed, 2)
    assert outbox.settings.db_engine_url is not None
    assert str(outbox.settings.db_engine_url) not in caplog.text
    assert "johndoe" not in caplog.text


@on_sqlite
async def test_the_level_of_the_logger_decides_what_is_heard(
    make_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @listen("user.created", queue="fails", retry_delays=())
    async def fails(user: object) -> None:
        raise ConnectionError

    outbox = make_outbox(observers=[LoggingObserver(), recorder])
    async with outbox.running(listeners=[fails]):
        caplog.set_level(logging.WARNING, "outbox")  # Only warnings and errors
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled)
        assert set(levels(caplog)) == {logging.WARNING}
        caplog.clear()
        caplog.set_level(logging.CRITICAL, "outbox")  # Or disable outbox logs entirely
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 2)
        assert levels(caplog) == {}
        caplog.set_level(logging.DEBUG, "outbox")
        monkeypatch.setattr(logging.getLogger("outbox"), "propagate", False)  # Or disable propagation to root logger
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 3)
        assert levels(caplog) == {}


async def test_an_application_without_logging_sees_what_went_wrong_and_one_that_asks_for_info_sees_everything(
    tmp_path: Path,
) -> None:
    source = """
        import asyncio, logging, os, signal, sys
        from outbox import Reject, emit, listen, setup, transaction, worker

        if sys.argv[1] == "configured":
            logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s")
        setup(db_engine_url="sqlite+aiosqlite:///" + sys.argv[2])

        @listen("user.created", queue="users")
        async def on_user_created(user):
            os.kill(os.getpid(), signal.SIGTERM)
            raise Reject("never")

        async def main():
            async with transaction() as session:
                await emit(session, "user.created", {"id": 123, "username": "johndoe"})
            await worker([on_user_created])

        asyncio.run(main())
    """
    for how in ("unconfigured", "configured"):
        async with program(source, how, str(tmp_path / f"{how}.db")) as process:
            code, out, errors = await process.end()
        assert (code, out) == (0, "")
        assert "dead (rejected)" in errors
        assert ("- outbox - INFO - emitted" in errors) == (how == "configured")
        assert "johndoe" not in errors


def test_importing_the_library_configures_no_logging() -> None:
    logger = logging.getLogger("outbox")
    assert "outbox" in sys.modules
    assert logger.propagate
    assert logger.level == logging.NOTSET
