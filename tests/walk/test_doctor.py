"""`outbox doctor`: everything that is wrong is found in a real database, with its level and with advice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, literal, make_url, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox import Binding, Listener, Message, Outbox, Reject
from outbox.cli.exits import ExitCode
from outbox.core.attempt import Dead, Reason
from outbox.core.diagnosis import Finding, Level
from outbox.core.events import Event, Relayed
from outbox.core.store import Selection
from outbox.doctor import examine
from outbox.stores.postgresql import examination as postgresql_examination
from outbox.stores.queries import skew
from outbox.stores.sql import SqlStore
from outbox.stores.sqlite import examination as sqlite_examination
from outbox.testing.servers import PostgreSQL
from outbox.transports.memory import MemoryTransport
from tests.support.commands import Command, until
from tests.support.databases import on_postgresql
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox

LONG_AGO = -300.0  # seconds


async def found(outbox: Outbox, subject: str) -> Finding:
    """The one finding about a subject."""
    [finding] = [finding for finding in await examine(outbox) if finding.subject == subject]
    return finding


async def age(outbox: Outbox, column: str, condition: Any = None) -> None:
    """Let a moment of messages lie five minutes back."""
    store = outbox.store
    assert isinstance(store, SqlStore)
    statement = update(store.tables.messages).values(
        {column: store.dialect.later(store.dialect.clock(), literal(LONG_AGO))}
    )
    statement = statement if condition is None else statement.where(condition)
    await store.runner.transact(lambda connection: connection.execute(statement))


# Health.


async def test_a_healthy_database_is_told_to_be_one(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    async with outbox.running(relay=True):
        pass  # as it does, it records its transport and switches the journal of SQLite
    await outbox.close()
    ran = await command.run("doctor", "--strict")
    assert (ran.code, ran.stderr) == (0, "")
    levels = {line.split()[0] for line in ran.stdout.splitlines() if not line.startswith(" ")}
    assert levels == {"ok"}
    assert "ok       tables: as this version needs them\n" in ran.stdout
    assert "ok       transport: database\n" in ran.stdout
    document = (await command.run("doctor", "--json")).document
    assert document["healthy"] is True
    subjects = [finding["subject"] for finding in document["findings"]]
    assert subjects[:4] == ["versions", "drivers", "tables", "clocks"]
    assert subjects[-5:] == ["transport", "leases", "due messages", "dead letters", "routing"]
    server = "PostgreSQL 1" if "postgresql" in command.settings["OUTBOX_DB_ENGINE_URL"] else "SQLite 3"
    assert f", {server}" in document["findings"][0]["what"]


async def test_without_a_database_there_is_little_to_say(tmp_path: Path) -> None:
    ran = await Command(tmp_path, {"OUTBOX_TRANSPORT": "memory://"}).run("doctor")
    assert (ran.code, ran.stderr) == (0, "")
    last = ["ok       database: none is set up", "ok       dead letters: none in the queues of memory in the last 1h"]
    assert ran.stdout.splitlines()[-2:] == last


async def test_fresh_dead_letters_of_a_transport_from_elsewhere_are_an_error(make_outbox: MakeOutbox) -> None:
    async def reject(order: Any) -> None:
        raise Reject("no such order")

    transport = MemoryTransport()
    outbox = make_outbox(transport=transport)
    async with outbox.running(listeners=[Listener("order.*", reject, queue="billing")]):
        transport.put("billing", Message(routing_key="order.created", body=b"1"))
        await until(lambda: _has_letters(transport))
    told = [finding for finding in await examine(outbox) if finding.subject == "dead letters"]
    assert [(finding.level, finding.what) for finding in told] == [
        (Level.OK, "none of relays in the last 1h"),
        (Level.ERROR, "1 in the queue 'billing', in the last 1h: 1 rejected"),
    ]


async def _has_letters(transport: MemoryTransport) -> bool:
    return bool(await transport.dead_letters.list())


async def test_a_database_that_is_away_is_one_line(tmp_path: Path) -> None:
    url = "postgresql://shop:canary-7hX2@127.0.0.1:1/shop"
    for words in (["doctor"], ["doctor", "--json"]):
        ran = await Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url}).run(*words)
        assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.UNREACHABLE, "", 1)
        assert ran.stderr.startswith("error: cannot reach the database 127.0.0.1:1/shop: ")
        assert "canary" not in ran.said


# Tables.


async def test_tables_that_are_missing_are_errors_and_nothing_is_asked_of_them(
    command: Command, outbox: Outbox, table_name: str
) -> None:
    await outbox.create_tables()
    store = outbox.store
    assert isinstance(store, SqlStore)
    await store.runner.transact(lambda connection: connection.exec_driver_sql(f"DROP TABLE {table_name}_state"))
    ran = await command.run("doctor", "--json")
    assert (ran.code, ran.document["healthy"]) == (ExitCode.UNHEALTHY, False)
    [finding] = [finding for finding in ran.document["findings"] if finding["level"] == "error"]
    assert finding["what"] == f"{table_name}_state: the table is missing"
    assert "outbox tables check" in finding["advice"]
    assert not {"leases", "due messages"} & {finding["subject"] for finding in ran.document["findings"]}
    assert len(await outbox.check_tables()) == 1, "nothing was made"


@pytest.mark.parametrize(
    "there", [[], ["_bindings", "_circuits", "_dead_letters", "_inbox", "_owners", "_state"]], ids=["none", "others"]
)
async def test_without_the_table_of_messages_every_missing_table_is_an_error(
    command: Command, outbox: Outbox, table_name: str, there: list[str]
) -> None:
    await outbox.create_tables()
    store = outbox.store
    assert isinstance(store, SqlStore)
    missing = [name for name in store.tables.metadata.tables if name.removeprefix(table_name) not in there]
    async with outbox.engines.asynchronous.begin() as connection:
        for name in missing:
            await connection.exec_driver_sql(f"DROP TABLE {name}")
    ran = await command.run("doctor", "--json")
    assert (ran.code, ran.stderr, ran.document["healthy"]) == (ExitCode.UNHEALTHY, "", False)
    errors = [finding["what"] for finding in ran.document["findings"] if finding["level"] == "error"]
    assert sorted(errors) == sorted(f"{name}: the table is missing" for name in missing)


async def test_a_warning_counts_only_if_it_shall(command: Command, outbox: Outbox, table_name: str) -> None:
    await outbox.create_tables()
    store = outbox.store
    assert isinstance(store, SqlStore)
    await store.runner.transact(lambda connection: connection.exec_driver_sql(f"DROP INDEX {table_name}_claim"))
    ran = await command.run("doctor")
    assert ran.code == 0
    assert f"warning  tables: {table_name}: the index {table_name}_claim is missing\n" in ran.stdout
    assert "         -> outbox tables check prints the SQL that fixes it\n" in ran.stdout
    strict = await command.run("doctor", "--strict", "--json")
    assert (strict.code, strict.document["healthy"]) == (ExitCode.UNHEALTHY, False)


# Messages.


async def test_messages_that_nobody_routes_are_an_error(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", range(3))
    assert await found(outbox, "due messages") == Finding(Level.OK, "due messages", "3, none for long")
    await age(outbox, "due_at")
    finding = await found(outbox, "due messages")
    assert (finding.level, finding.advice) == (Level.ERROR, "start a worker or a relay")
    assert finding.what.startswith("3 not routed or sent yet, the oldest for 5m")
    assert finding.what.endswith("no process claims them")


async def test_a_destination_that_does_not_answer_is_told_with_its_error_however_young_its_messages_are(
    outbox: Outbox,
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", range(3))
    await outbox.store.circuits.open(None, timedelta(minutes=1), "connection refused")
    silent = await found(outbox, "destinations")
    assert (silent.level, "mend the destination" in silent.advice) == (Level.WARNING, True)
    assert silent.what == "the destination does not answer, failure 1 in a row: connection refused"
    assert (await found(outbox, "due messages")).level is Level.OK
    await age(outbox, "due_at")
    finding = await found(outbox, "due messages")
    assert (finding.level, "start a worker" in finding.advice) == (Level.WARNING, False)
    assert finding.what.endswith("the destination does not answer")


async def test_messages_that_their_destination_refuses_again_and_again_are_an_error_although_none_is_due(
    make_outbox: MakeOutbox,
) -> None:
    async def publish(message: Message) -> None:
        raise ValueError("no queue is bound to it")

    refused = asyncio.Event()

    def hear(event: Event) -> None:
        if isinstance(event, Relayed):
            refused.set()

    outbox = make_outbox(transport=publish, relay_retry_delays=[3600], observers=[hear])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "ordr.created", range(3))
    async with outbox.running(relay=True):
        await asyncio.wait_for(refused.wait(), PATIENCE)
    backlog = await outbox.backlog()
    assert (backlog.waiting, backlog.due, backlog.refused) == (3, 0, 3)
    assert backlog.refused_for is not None
    assert backlog.refused_for < timedelta(minutes=1)
    assert "refused messages" not in {finding.subject for finding in await examine(outbox)}
    await age(outbox, "first_due_at")
    finding = await found(outbox, "refused messages")
    assert (finding.level, "show MESSAGE_ID" in finding.advice) == (Level.ERROR, True)
    assert finding.what.startswith("3 not routed or sent yet, the oldest for 5m")
    assert "'ordr.created'" in finding.what
    assert finding.what.endswith("ValueError: no queue is bound to it")


async def in_queue(outbox: Outbox, count: int) -> None:
    """Messages in the queue `billing`."""
    await outbox.store.queues.bind([Binding("billing", "order.#")])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", range(count))
    assert (await outbox.store.queues.route(100, {})).taken == count


async def test_a_queue_that_nobody_serves_is_an_error_and_one_that_is_behind_a_warning(outbox: Outbox) -> None:
    await in_queue(outbox, 3)
    await age(outbox, "due_at")
    nobody = await found(outbox, "due messages")
    assert (nobody.level, nobody.advice) == (Level.ERROR, "start a worker for the queue")
    assert nobody.what.startswith("3 in the queue 'billing', the oldest for 5m")
    async with outbox.store.feed.claim(Selection(limit=1, lease=timedelta(seconds=60), destination="billing")):
        behind = await found(outbox, "due messages")
        leases = await found(outbox, "leases")
    assert behind.level == Level.WARNING
    assert behind.what.startswith("2 in the queue 'billing'") and behind.what.endswith("while 1 are in work")
    assert leases.level == Level.OK
    assert leases.what.startswith("1 held, the first ends in ")


async def test_leases_that_ran_out_and_that_nobody_claimed_are_a_warning(outbox: Outbox) -> None:
    await in_queue(outbox, 2)
    async with outbox.store.feed.claim(Selection(limit=2, lease=timedelta(seconds=60), destination="billing")):
        await age(outbox, "lease_until")
        finding = await found(outbox, "leases")
    assert finding.level == Level.WARNING
    assert finding.what.startswith("2 ran out, the first 5m")
    assert finding.what.endswith("no process has claimed the messages since: in the queue 'billing'")


async def test_messages_that_no_queue_asks_for_are_a_warning_with_their_routing_keys(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("billing", "order.#")])
    async with outbox.transaction() as session:
        for key, count in (("a", 1), ("b", 4), ("c", 3), ("d", 2)):
            await outbox.emit_many(session, f"stock.{key}", range(count))
    assert (await outbox.store.queues.route(100, {})).taken == 10
    await age(outbox, "due_at")  # they are out of the way of claims, so nobody is late
    assert (await found(outbox, "due messages")).level == Level.OK
    finding = await found(outbox, "routing")
    assert finding.level == Level.WARNING
    assert finding.what == "10 unroutable, no queue is bound to them: 'stock.b', 'stock.c', 'stock.d' …"


async def test_a_queue_without_bindings_that_still_holds_messages_is_a_warning(outbox: Outbox) -> None:
    await in_queue(outbox, 2)
    assert (await found(outbox, "routing")).level == Level.OK
    await outbox.unbind("billing")
    finding = await found(outbox, "routing")
    assert finding.level == Level.WARNING
    assert finding.what == "2 in the queue 'billing', to which nothing is bound any more"


async def test_a_table_of_another_transport_is_an_error(outbox: Outbox) -> None:
    await outbox.store.maintenance.record_transport("rabbitmq")
    finding = await found(outbox, "transport")
    assert finding.level == Level.ERROR
    assert finding.what.startswith("the table belongs to rabbitmq, and database is configured")
    assert finding.advice.endswith("outbox tables switch-transport database")


async def died(outbox: Outbox, *reasons: Reason) -> None:
    """Dead letters in the queue `billing`."""
    await in_queue(outbox, len(reasons))
    async with outbox.store.feed.claim(
        Selection(limit=len(reasons), lease=timedelta(seconds=60), destination="billing")
    ) as claim:
        ends = zip(claim.attempts, reasons, strict=True)
        await claim.settle({attempt.id: Dead(reason, "why") for attempt, reason in ends})


async def test_fresh_dead_letters_are_an_error_by_queue_and_reason_until_they_are_old(
    command: Command, outbox: Outbox
) -> None:
    await outbox.create_tables()
    assert await found(outbox, "dead letters") == Finding(Level.OK, "dead letters", "none in the last 1h")
    await died(outbox, Reason.EXHAUSTED, Reason.EXHAUSTED, Reason.REJECTED)
    finding = await found(outbox, "dead letters")
    assert finding.level == Level.ERROR
    assert finding.what == "3 in the queue 'billing', in the last 1h: 2 exhausted, 1 rejected"
    assert finding.advice.endswith("outbox dead-letters list --queue billing")
    await outbox.close()
    assert (await command.run("doctor")).code == ExitCode.UNHEALTHY
    assert (await command.run("doctor", OUTBOX_FRESH_DEAD_LETTERS="0")).code == 0
    store = outbox.store
    assert isinstance(store, SqlStore)
    longer_ago = update(store.tables.dead_letters).values(
        died_at=store.dialect.later(store.dialect.clock(), literal(-3700.0))
    )
    await store.runner.transact(lambda connection: connection.execute(longer_ago))
    assert (await found(outbox, "dead letters")).level == Level.OK
    assert (await command.run("doctor", OUTBOX_FRESH_DEAD_LETTERS="2h")).code == ExitCode.UNHEALTHY


async def test_dead_letters_that_never_reached_a_queue_are_told_as_such(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", 1)
    async with outbox.store.feed.claim(Selection(limit=1, lease=timedelta(seconds=60))) as claim:
        await claim.settle({claim.attempts[0].id: Dead(Reason.REFUSED, "404")})
    finding = await found(outbox, "dead letters")
    assert finding.what == "1 before they reached a queue, in the last 1h: 1 refused"
    assert finding.advice.endswith("outbox dead-letters list --queue ''")


# Clocks.


async def test_clocks_that_differ_are_measured_against_the_databases_own(outbox: Outbox) -> None:
    store = outbox.store
    assert isinstance(store, SqlStore)
    hour, moment = timedelta(hours=1), timedelta(seconds=1)  # SQLite's clock counts milliseconds

    def measure(shift: timedelta) -> Callable[[Connection], timedelta]:
        return lambda connection: skew(store.dialect, connection, lambda: datetime.now(UTC) + shift)

    assert abs(await store.runner.look(measure(timedelta(0)))) < moment
    assert timedelta(minutes=59) < await store.runner.look(measure(-hour)) < hour + moment, "the database is ahead"
    assert -hour - moment < await store.runner.look(measure(hour)) < -timedelta(minutes=59), "the database is behind"


@pytest.mark.parametrize(("hours", "said"), [(1, "ahead of"), (-1, "behind")])
async def test_a_clock_that_is_wrong_is_a_warning(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, hours: int, said: str
) -> None:
    await outbox.create_tables()
    assert isinstance(outbox.store, SqlStore)
    dialect = type(outbox.store.dialect)
    now = dialect.now
    shift = literal(hours * 3600.0)
    monkeypatch.setattr(dialect, "now", lambda self: self.later(now(self), shift))
    finding = await found(outbox, "clocks")
    assert (finding.level, "NTP" in finding.advice) == (Level.WARNING, True)
    assert finding.what.startswith("the database is ") and finding.what.endswith(f"{said} this process")


# PostgreSQL.


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A PostgreSQL in which nobody else has transactions open."""
    with PostgreSQL(settings={"max_prepared_transactions": "4"}) as server:
        yield server


@pytest.fixture(params=["asyncpg", "psycopg"])
async def alone(request: pytest.FixtureRequest, server: PostgreSQL, table_name: str) -> AsyncIterator[Outbox]:
    url = server.url.replace("postgresql:", f"postgresql+{request.param}:")
    outbox = Outbox(db_engine_url=url, table_name=table_name)
    await outbox.create_tables()
    yield outbox
    await outbox.close()


@pytest.mark.parametrize(
    "statements",
    [["SELECT txid_current()"], ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT 1"]],
    ids=["it wrote", "it holds a snapshot"],
)
async def test_a_transaction_that_holds_back_vacuum_is_named(
    alone: Outbox, server: PostgreSQL, monkeypatch: pytest.MonkeyPatch, statements: list[str]
) -> None:
    assert await found(alone, "transactions") == Finding(
        Level.OK, "transactions", "none is open that holds back vacuum"
    )
    with psycopg.connect(server.url) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        young = await found(alone, "transactions")
        assert young.level == Level.OK and young.what.startswith("the oldest that holds back vacuum is open for ")
        monkeypatch.setattr(postgresql_examination, "LONG_OPEN", timedelta(0))
        finding = await found(alone, "transactions")
        assert finding.level == Level.WARNING
        assert finding.what.endswith("idle in transaction, role outbox")
        assert finding.advice.endswith(f"SELECT pg_catalog.pg_terminate_backend({connection.info.backend_pid})")


async def test_a_role_that_may_not_see_other_transactions_is_told_the_right_that_it_lacks(
    alone: Outbox, server: PostgreSQL, table_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_examination, "LONG_OPEN", timedelta(0))
    role = f"blind_{table_name}"
    with psycopg.connect(server.url, autocommit=True) as connection, psycopg.connect(server.url) as other:
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        other.execute("SELECT txid_current()")
        url = make_url(str(alone.settings.db_engine_url)).set(username=role)
        outbox = Outbox(db_engine_url=url, table_name=table_name)
        blind = await found(outbox, "transactions")
        assert blind.level == Level.OK
        assert blind.what == "none is open that holds back vacuum, as far as this role may see"
        grant = blind.advice.partition(": ")[2]
        assert grant == f"GRANT pg_read_all_stats TO {role}"
        refused = await found(outbox, "messages")
        assert (refused.level, refused.what) == (Level.WARNING, "this role may not read them")
        connection.execute(grant.encode())
        assert (await found(outbox, "transactions")).level == Level.WARNING
        await outbox.close()
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


async def test_a_prepared_transaction_is_named(
    alone: Outbox, server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await found(alone, "prepared transactions") == Finding(Level.OK, "prepared transactions", "none")
    with psycopg.connect(server.url) as connection:
        connection.execute("SELECT txid_current(); PREPARE TRANSACTION 'forgotten'")
    young = await found(alone, "prepared transactions")
    assert young.level == Level.OK and young.what.startswith("1, the oldest 'forgotten' of role outbox")
    monkeypatch.setattr(postgresql_examination, "LONG_OPEN", timedelta(0))
    finding = await found(alone, "prepared transactions")
    assert (finding.level, "ROLLBACK PREPARED" in finding.advice) == (Level.WARNING, True)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("ROLLBACK PREPARED 'forgotten'")


async def test_dead_rows_that_pile_up_are_a_warning(
    alone: Outbox, server: PostgreSQL, table_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_examination, "DEAD_ROWS", 50)
    async with alone.transaction() as session:
        await alone.emit_many(session, "a", range(100))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {table_name} SET (autovacuum_enabled = off)".encode())
        connection.execute(f"DELETE FROM {table_name}".encode())

    async def piled_up() -> Finding | None:  # statistics come late
        finding = await found(alone, "dead rows")
        return None if finding.level == Level.OK else finding

    finding: Finding = await until(piled_up)
    assert finding.level == Level.WARNING
    assert finding.what.startswith(f"100 in {table_name} beside ")  # how many live is told late as well
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"VACUUM {table_name}".encode())
    await until(lambda: no_dead_rows(alone))


async def no_dead_rows(outbox: Outbox) -> bool:
    return (await found(outbox, "dead rows")).level == Level.OK


# SQLite.


@pytest.fixture
async def plain_engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """An engine as an application might make it, without advice."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}", connect_args={"timeout": 0})
    yield engine
    await engine.dispose()


async def test_an_engine_that_does_not_wait_for_its_turn_is_a_warning(plain_engine: AsyncEngine) -> None:
    outbox = Outbox(db_engine=plain_engine)
    await outbox.create_tables()
    finding = await found(outbox, "busy timeout")
    assert (finding.level, finding.what) == (Level.WARNING, "0 s")
    assert "outbox.sqlite.prepare(engine)" in finding.advice
    await outbox.close()


async def test_a_journal_that_is_not_written_ahead_is_a_warning_and_stays_as_it_is(
    sqlite_command: Command, plain_engine: AsyncEngine
) -> None:
    made = (await sqlite_command.run("tables", "sql")).stdout
    async with plain_engine.begin() as connection:
        for statement in made.split(";\n"):
            await connection.execute(text(statement))
    await plain_engine.dispose()
    outbox = Outbox(db_engine_url=sqlite_command.settings["OUTBOX_DB_ENGINE_URL"])
    examination = await outbox.store.inspection.examine()
    [mode] = [finding for finding in examination.findings if finding.subject == "journal mode"]
    assert mode.level == Level.WARNING and mode.what.startswith("delete: ")
    assert (await outbox.store.inspection.examine()).findings == examination.findings
    async with outbox.running(relay=True):
        pass
    assert (await found(outbox, "journal mode")).what == "wal"
    await outbox.close()


async def test_a_write_ahead_log_that_grows_is_a_warning(
    sqlite_outbox: Outbox, plain_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sqlite_outbox.create_tables()
    assert (await found(sqlite_outbox, "write-ahead log")).level == Level.OK
    monkeypatch.setattr(sqlite_examination, "LARGEST_LOG", 1024 * 1024)
    async with plain_engine.connect() as reader:
        await reader.execute(text("BEGIN"))
        await reader.execute(text("SELECT count(*) FROM outbox_table"))
        async with sqlite_outbox.transaction() as session:
            await sqlite_outbox.emit_many(session, "a", ["x" * 1000] * 2000)
        finding = await found(sqlite_outbox, "write-ahead log")
    assert finding.level == Level.WARNING
    assert finding.what.endswith(" MiB")


async def test_a_database_in_memory_can_be_examined() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite://")
    await outbox.create_tables()
    assert {finding.level for finding in await examine(outbox)} == {Level.OK}
    await outbox.close()


@on_postgresql
async def test_a_silent_database_ends_with_the_code_of_one_that_is_away(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.stores.runner.WORK_WITHIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it lets callers in and never answers
        url = make_url(command.settings["OUTBOX_DB_ENGINE_URL"]).set(port=silent.getsockname()[1])
        ran = await command.run("doctor", OUTBOX_DB_ENGINE_URL=url.render_as_string(hide_password=False))
    assert (ran.code, ran.stdout, ran.stderr) == (
        ExitCode.UNREACHABLE,
        "",
        "error: the database did not answer within 0.5 s\n",
    )
