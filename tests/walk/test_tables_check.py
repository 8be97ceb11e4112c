"""`tables check`: every difference is named, the SQL that it prints mends it, and what is right is left in peace."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent

import pytest
import sqlalchemy
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, text
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import outbox as outbox_package
from outbox import Difference, Outbox
from outbox.cli.exits import ExitCode
from tests.support.commands import Command
from tests.support.databases import on_postgresql, on_sqlite
from tests.support.outboxes import MakeOutbox

NAMES = ["shop", "Shop", "select", "order_2"]


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


async def run(engine: AsyncEngine, script: str) -> None:
    """Run statements one by one, each committed by itself, as a person at a prompt would."""
    bare = "\n".join(line for line in script.splitlines() if not line.startswith("--"))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in filter(str.strip, bare.split(";")):
            await connection.exec_driver_sql(statement)


async def mended(command: Command, engine: AsyncEngine) -> list[Difference]:
    """What the check finds after the SQL that it printed was run."""
    ran = await command.run("tables", "check")
    assert ran.code == ExitCode.UNHEALTHY
    await run(engine, ran.stdout)
    ran = await command.run("tables", "check")
    assert (ran.code, ran.said) == (0, "the tables are as this version needs them\n")
    outbox = Outbox(
        db_engine_url=command.settings["OUTBOX_DB_ENGINE_URL"], table_name=command.settings["OUTBOX_TABLE_NAME"]
    )
    found = await outbox.check_tables()
    await outbox.close()
    return found


# What is as it should be.


@pytest.mark.parametrize("name", NAMES)
async def test_fresh_tables_show_no_difference(make_outbox: MakeOutbox, table_name: str, name: str) -> None:
    outbox = make_outbox(table_name=f"{name}_{table_name}")
    assert len(await outbox.check_tables()) == 7
    assert not await outbox.store.maintenance.has_tables(), "looking makes nothing"
    await outbox.create_tables()
    assert await outbox.check_tables() == []


@pytest.mark.parametrize("table", ["select", "t" * 40])
@on_sqlite
async def test_words_of_sql_and_the_longest_name_show_no_difference(make_outbox: MakeOutbox, table: str) -> None:
    outbox = make_outbox(table_name=table)
    await outbox.create_tables()
    assert await outbox.check_tables() == []


@pytest.mark.parametrize("table", ["select", "t" * 40])
@on_postgresql
async def test_so_they_do_in_a_schema_whose_name_needs_quotes(
    make_outbox: MakeOutbox, engine: AsyncEngine, table_name: str, table: str
) -> None:
    outbox = make_outbox(table_name=table, schema=f"Order_{table_name}")
    missing = await outbox.check_tables()
    assert [difference.what for difference in missing] == ["the table is missing"] * 7
    await run(engine, "\n".join(difference.mend for difference in missing))  # the schema is made on the way
    assert await outbox.check_tables() == []
    await run(engine, f'DROP SCHEMA "Order_{table_name}" CASCADE')


async def test_the_sql_for_migrations_makes_tables_without_a_difference(command: Command, engine: AsyncEngine) -> None:
    made = await command.run("tables", "sql")
    await run(engine, made.stdout)
    ran = await command.run("tables", "check", "--json")
    assert (ran.code, ran.document) == (0, {"differences": []})


@pytest.mark.parametrize("name", ["shop", "Select"])
async def test_a_migration_that_alembic_writes_makes_tables_without_a_difference(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str, name: str
) -> None:
    outbox = make_outbox(table_name=f"{name}_{table_name}")

    def migrate(connection: Connection) -> None:
        others = {"include_name": lambda found, kind, _: kind != "table" or found in outbox.metadata.tables}
        context = MigrationContext.configure(connection, opts=others)
        migration = produce_migrations(context, outbox.metadata)
        written = render_python_code(migration.upgrade_ops, migration_context=context)  # type: ignore[arg-type]
        assert "/* each page has free space, so that leases are written in place (HOT)" in written
        script = dedent(f"    {written}")
        exec(script, {"op": Operations(context), "sa": sqlalchemy, "mysql": mysql, "outbox": outbox_package})  # noqa: S102 - Alembic's own words

    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    assert await outbox.check_tables() == []


async def test_what_others_added_is_fine(
    engine: AsyncEngine, outbox: Outbox, table_name: str, command: Command
) -> None:
    await outbox.create_tables()
    await run(
        engine,
        f"""
        ALTER TABLE {table_name} ADD COLUMN tenant VARCHAR(40);
        ALTER TABLE {table_name} ADD COLUMN shard INTEGER DEFAULT 7 NOT NULL;
        ALTER TABLE {table_name}_inbox ADD COLUMN note VARCHAR(10);
        CREATE INDEX {table_name}_mine ON {table_name} (tenant, message_id);
        CREATE UNIQUE INDEX {table_name}_ours ON {table_name}_inbox (message_id, queue)
        """,
    )
    assert await outbox.check_tables() == []
    assert (await command.run("tables", "check")).code == 0


# What is not, on PostgreSQL.

CHANGES = [
    ("DROP TABLE {t}_bindings", "_bindings: the table is missing", True),
    ("DROP TABLE {t}_circuits", "_circuits: the table is missing", True),
    ("DROP TABLE {t}_owners", "_owners: the table is missing", True),
    ("ALTER TABLE {t}_circuits DROP COLUMN error", "_circuits: the column error is missing", True),
    ("ALTER TABLE {t} DROP COLUMN routed_at", ": the column routed_at is missing", True),
    ("ALTER TABLE {t} DROP COLUMN starts", ": the column starts is missing", True),
    ("ALTER TABLE {t}_dead_letters DROP COLUMN body", "_dead_letters: the column body is missing", True),
    ("ALTER TABLE {t}_state DROP COLUMN asleep_until", "_state: the column asleep_until is missing", True),
    (
        "ALTER TABLE {t} ALTER COLUMN routing_key TYPE text",
        ": the column routing_key is text instead of character varying(255)",
        True,
    ),
    (
        "ALTER TABLE {t} ALTER COLUMN destination TYPE character varying(40)",
        ": the column destination is character varying(40) instead of character varying(255)",
        True,
    ),
    ("ALTER TABLE {t} ALTER COLUMN id TYPE integer", ": the column id is integer instead of bigint", True),
    (
        "ALTER TABLE {t} ALTER COLUMN due_at TYPE timestamp",
        ": the column due_at is timestamp without time zone instead of timestamp with time zone",
        True,
    ),
    (
        "ALTER TABLE {t} ALTER COLUMN attempts DROP DEFAULT, ALTER COLUMN attempts TYPE text",
        ": the column attempts is text instead of integer and has no default instead of the default 0",
        True,
    ),
    ("ALTER TABLE {t} ALTER COLUMN body DROP NOT NULL", ": the column body may be empty and must not", True),
    ("ALTER TABLE {t} ALTER COLUMN key SET NOT NULL", ": the column key must be filled and need not", True),
    (
        "ALTER TABLE {t} ALTER COLUMN destination DROP DEFAULT",
        ": the column destination has no default instead of the default ''",
        True,
    ),
    (
        "ALTER TABLE {t} ALTER COLUMN starts SET DEFAULT 1",
        ": the column starts has the default 1 instead of the default 0",
        True,
    ),
    (
        "ALTER TABLE {t} ALTER COLUMN unroutable SET DEFAULT true",
        ": the column unroutable has the default true instead of the default false",
        True,
    ),
    (
        "ALTER TABLE {t} ALTER COLUMN done_at SET DEFAULT now()",
        ": the column done_at has the default now() instead of no default",
        True,
    ),
    ("ALTER TABLE {t} ALTER COLUMN id DROP IDENTITY", ": the column id does not number the rows", True),
    (
        "ALTER TABLE {t} ADD COLUMN tenant text NOT NULL",
        ": the column tenant is not ours and must be filled, which we do not do",
        True,
    ),
    ("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", ": the primary key is missing", True),
    (
        "ALTER TABLE {t}_inbox DROP CONSTRAINT {t}_inbox_pkey, ADD PRIMARY KEY (message_id)",
        "_inbox: the primary key is on message_id instead of on queue, message_id",
        True,
    ),
    ("DROP INDEX {t}_claim", ": the index {t}_claim is missing", False),
    ("DROP INDEX {t}_timer", ": the index {t}_timer is missing", True),
    (
        "DROP INDEX {t}_claim; CREATE INDEX {t}_claim ON {t} (due_at, id) WHERE done_at IS NULL",
        ": the index {t}_claim is on due_at, id where done_at is null instead of "
        "on destination, due_at, id where done_at is null",
        False,
    ),
    (
        "DROP INDEX {t}_claim; CREATE INDEX {t}_claim ON {t} (destination, due_at DESC, id) WHERE done_at IS NULL",
        ": the index {t}_claim is on destination, due_at desc, id where done_at is null instead of "
        "on destination, due_at, id where done_at is null",
        False,
    ),
    (
        "DROP INDEX {t}_done; CREATE INDEX {t}_done ON {t} (done_at)",
        ": the index {t}_done is on done_at instead of on done_at where done_at is not null",
        False,
    ),
    (
        "DROP INDEX {t}_timer; CREATE INDEX {t}_timer ON {t} (timer_id) "
        "WHERE timer_id IS NOT NULL AND destination = '' AND done_at IS NULL",
        ": the index {t}_timer is on timer_id where timer_id is not null and destination = '' and done_at is null "
        "instead of unique on timer_id where timer_id is not null and destination = '' and done_at is null",
        True,
    ),
    (
        "DROP INDEX {t}_timer; CREATE UNIQUE INDEX {t}_timer ON {t} (timer_id) "
        "WHERE timer_id IS NOT NULL AND destination = 'A' AND done_at IS NULL",
        ": the index {t}_timer is unique on timer_id where timer_id is not null and destination = 'A' and done_at is "
        "null instead of unique on timer_id where timer_id is not null and destination = '' and done_at is null",
        True,
    ),
    (
        "DROP INDEX {t}_inbox_entered; CREATE INDEX {t}_inbox_entered ON {t}_inbox USING hash (entered_at)",
        "_inbox: the index {t}_inbox_entered is hash on entered_at instead of on entered_at",
        False,
    ),
    ("ALTER TABLE {t} RESET (fillfactor)", ": fillfactor is not set instead of 45", False),
    (
        "ALTER TABLE {t} SET (autovacuum_vacuum_threshold = 50, fillfactor = 70)",
        ": fillfactor is 70 instead of 45, autovacuum_vacuum_threshold is 50 instead of 1000",
        False,
    ),
    ("ALTER TABLE {t} SET (autovacuum_enabled = off)", ": autovacuum is switched off for the table", False),
    ("ALTER TABLE {t} SET UNLOGGED", ": the table is UNLOGGED: a crash of the server would empty it", True),
]


@pytest.mark.parametrize(("change", "what", "breaks"), CHANGES, ids=[change for change, _, _ in CHANGES])
@pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)
async def test_a_difference_is_named_and_mended_by_the_sql_that_is_printed(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str, change: str, what: str, breaks: bool
) -> None:
    await outbox.create_tables()
    await run(engine, change.format(t=table_name))
    [found] = await outbox.check_tables()
    assert f"{found.table}: {found.what}" == table_name + what.format(t=table_name)
    assert found.breaks is breaks
    assert await mended(command, engine) == []
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    assert (await outbox.backlog()).waiting == 1


@on_postgresql
async def test_rows_that_are_there_keep_their_numbers_when_a_column_learns_to_number(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "a", range(5))
    await run(engine, f"ALTER TABLE {table_name} ALTER COLUMN id DROP IDENTITY, ALTER COLUMN id SET DEFAULT 1")
    assert await mended(command, engine) == []
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 5)
    assert [stored.row_id for stored in await outbox.messages()] == [1, 2, 3, 4, 5, 6]


@on_postgresql
async def test_an_index_whose_building_broke_off_is_named_and_made_again(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str
) -> None:
    await outbox.create_tables()
    [timer] = [index for index in outbox.tables.messages.indexes if index.unique]
    await run(engine, f"DROP INDEX {timer.name}")
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "a", range(2))
    await run(engine, f"UPDATE {table_name} SET timer_id = 'the same'")
    [missing] = await outbox.check_tables()
    with pytest.raises(DBAPIError, match="could not create unique index"):
        await run(engine, missing.mend)
    await run(engine, f"UPDATE {table_name} SET timer_id = id")
    [found] = await outbox.check_tables()
    assert found.what.startswith(f"the index {timer.name} is invalid instead of unique on timer_id")
    assert await mended(command, engine) == []


@on_postgresql
async def test_serial_columns_number_rows_as_well(engine: AsyncEngine, command: Command) -> None:
    made = await command.run("tables", "sql")
    await run(engine, made.stdout.replace("BIGINT GENERATED BY DEFAULT AS IDENTITY", "BIGSERIAL"))
    assert (await command.run("tables", "check")).code == 0


@on_postgresql
async def test_a_role_without_any_right_may_check_and_a_check_writes_nothing(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    await make_outbox().create_tables()
    role = f"nobody_{table_name}"
    await run(engine, f"CREATE ROLE {role} LOGIN PASSWORD '{role}'; ALTER ROLE {role} SET transaction_read_only = on")
    url = engine.url.set(username=role, password=role)
    outbox = make_outbox(db_engine_url=url.render_as_string(hide_password=False))
    try:
        assert await outbox.check_tables() == []
        with pytest.raises(DBAPIError, match="permission denied"):
            await outbox.backlog()
    finally:
        await outbox.close()
        await run(engine, f"DROP ROLE {role}")


# What is not, on SQLite.

SCRIPTS = [
    ("BIGINT NOT NULL", "INTEGER NOT NULL", "_state: the column bindings_version is INTEGER instead of BIGINT"),
    ('"key" VARCHAR(255)', '"key" TEXT', ": the column key is TEXT instead of VARCHAR(255)"),
    ("body BLOB NOT NULL", "body BLOB", ": the column body may be empty and must not"),
    ('"key" VARCHAR(255)', '"key" VARCHAR(255) NOT NULL', ": the column key must be filled and need not"),
    (
        "attempts INTEGER DEFAULT '0' NOT NULL",
        "attempts INTEGER NOT NULL",
        ": the column attempts has no default instead of the default 0",
    ),
    (
        "destination VARCHAR(255) DEFAULT '' NOT NULL",
        "destination VARCHAR(255) DEFAULT 'x' NOT NULL",
        ": the column destination has the default x instead of the default ''",
    ),
    (
        "done_at DATETIME",
        "done_at DATETIME DEFAULT CURRENT_TIMESTAMP",
        ": the column done_at has the default current_timestamp instead of no default",
    ),
    (" AUTOINCREMENT", "", ": the column id does not number the rows"),
    (
        "PRIMARY KEY (queue, binding_key)",
        "PRIMARY KEY (binding_key, queue)",
        "_bindings: the primary key is on binding_key, queue instead of on queue, binding_key",
    ),
    (
        "PRIMARY KEY (queue, binding_key)",
        "UNIQUE (queue, binding_key)",
        "_bindings: the primary key is missing",
    ),
    (
        "body BLOB NOT NULL",
        "body BLOB NOT NULL, tenant TEXT NOT NULL",
        ": the column tenant is not ours and must be filled, which we do not do",
    ),
    ("    routed_at DATETIME,\n", "", ": the column routed_at is missing"),
    ("    starts INTEGER DEFAULT '0' NOT NULL,\n", "", ": the column starts is missing"),
    ("    routing_key VARCHAR(255) NOT NULL,\n", "", ": the column routing_key is missing"),
    (
        "(destination, due_at, id) WHERE done_at IS NULL",
        "(destination, id) WHERE done_at IS NULL",
        ": the index {t}_claim is on destination, id where done_at is null instead of "
        "on destination, due_at, id where done_at is null",
    ),
    (
        "CREATE UNIQUE INDEX",
        "CREATE INDEX",
        ": the index {t}_timer is on timer_id where timer_id is not null and destination = '' and done_at is null "
        "instead of unique on timer_id where timer_id is not null and destination = '' and done_at is null",
    ),
    (
        "WHERE unroutable",
        "where\n(unroutable or id > 5)",
        ": the index {t}_unroutable is on id where unroutable or id > 5 instead of on id where unroutable",
    ),
]


@pytest.mark.parametrize(("needed", "written", "what"), SCRIPTS, ids=[f"{old}: {new}" for old, new, _ in SCRIPTS])
@on_sqlite
async def test_a_difference_on_sqlite_is_named_and_mended_by_the_sql_that_is_printed(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str, needed: str, written: str, what: str
) -> None:
    made = (await command.run("tables", "sql")).stdout
    assert needed in made
    await run(engine, made.replace(needed, written, 1))
    [found] = await outbox.check_tables()
    assert f"{found.table}: {found.what}" == table_name + what.format(t=table_name)
    assert await mended(command, engine) == []
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    assert (await outbox.backlog()).waiting == 1


@on_sqlite
async def test_missing_tables_and_indexes_on_sqlite_are_made(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str
) -> None:
    await outbox.create_tables()
    await run(engine, f"DROP TABLE {table_name}_state; DROP INDEX {table_name}_claim; DROP INDEX {table_name}_timer")
    found = {(each.what, each.breaks) for each in await outbox.check_tables()}
    assert found == {
        ("the table is missing", True),
        (f"the index {table_name}_claim is missing", False),
        (f"the index {table_name}_timer is missing", True),
    }
    assert await mended(command, engine) == []


@on_sqlite
async def test_a_table_made_anew_on_sqlite_keeps_rows_numbers_and_what_others_added(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str
) -> None:
    made = (await command.run("tables", "sql")).stdout
    wrong = made.replace('"key" VARCHAR(255)', '"key" TEXT').replace("    routed_at DATETIME,\n", "", 1)
    await run(engine, wrong.replace("CREATE UNIQUE INDEX", "CREATE INDEX"))
    await run(
        engine,
        f"ALTER TABLE {table_name} ADD COLUMN tenant TEXT DEFAULT 'o''clock' NOT NULL;"
        f"ALTER TABLE {table_name} ADD COLUMN seen DATETIME",
    )
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "a", range(5))
    await run(engine, f"DELETE FROM {table_name} WHERE id IN (1, 5); UPDATE {table_name} SET seen = 'yesterday'")
    differences = await outbox.check_tables()
    assert len([each for each in differences if each.table == table_name]) == 3
    assert len({each.mend for each in differences if each.table == table_name}) == 1, "one script mends all three"
    assert await mended(command, engine) == []
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 5)
    stored = [(each.row_id, each.message.body) for each in await outbox.messages()]
    assert stored == [(2, b"1"), (3, b"2"), (4, b"3"), (6, b"5")]
    async with engine.connect() as connection:
        theirs = (await connection.execute(text(f"SELECT tenant, seen FROM {table_name} ORDER BY id"))).all()
    assert [tuple(row) for row in theirs] == [("o'clock", "yesterday")] * 3 + [("o'clock", None)]


@on_sqlite
async def test_rows_that_do_not_fit_are_not_lost_when_the_sql_runs_on_after_an_error(
    engine: AsyncEngine, outbox: Outbox, command: Command, table_name: str
) -> None:
    """As the sqlite3 program does with a script."""
    made = (await command.run("tables", "sql")).stdout
    await run(engine, made.replace("content_type VARCHAR(255) NOT NULL", "content_type VARCHAR(255)"))
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "a", range(3))
    await run(engine, f"UPDATE {table_name} SET content_type = NULL WHERE id = 2")
    script = (await command.run("tables", "check")).stdout
    await outbox.close()
    await engine.dispose()
    database = sqlite3.connect(engine.url.database or "", isolation_level=None)
    errors = []
    for statement in script.split(";\n"):
        try:
            database.execute(statement)
        except sqlite3.Error as error:
            errors.append(str(error))
    assert errors == [f"NOT NULL constraint failed: {table_name}.content_type"]
    assert database.execute(f"SELECT count(*) FROM {table_name}_before").fetchone() == (3,)
    database.close()


@on_sqlite
async def test_a_check_leaves_a_file_as_it_finds_it(
    engine: AsyncEngine, outbox: Outbox, command: Command, tmp_path: Path
) -> None:
    await run(engine, (await command.run("tables", "sql")).stdout)
    await engine.dispose()
    file = tmp_path / "outbox.db"

    def fingerprint() -> tuple[str, list[str]]:
        return hashlib.sha256(file.read_bytes()).hexdigest(), sorted(path.name for path in tmp_path.iterdir())

    before = await asyncio.to_thread(fingerprint)
    assert await outbox.check_tables() == []
    assert (await command.run("tables", "check")).code == 0
    assert await asyncio.to_thread(fingerprint) == before
    with sqlite3.connect(file) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    database.close()


async def test_a_database_in_memory_can_be_checked() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite://")
    assert len(await outbox.check_tables()) == 7
    await outbox.create_tables()
    assert await outbox.check_tables() == []
    await outbox.close()


# The command.


async def test_the_command_prints_what_differs_as_one_document(
    engine: AsyncEngine, command: Command, outbox: Outbox, table_name: str
) -> None:
    await outbox.create_tables()
    await run(engine, f"DROP TABLE {table_name}_state")
    ran = await command.run("tables", "check", "--json")
    assert ran.code == ExitCode.UNHEALTHY
    [found] = ran.document["differences"]
    assert (found["table"], found["what"], found["breaks"]) == (f"{table_name}_state", "the table is missing", True)
    assert found["mend"].startswith(f"CREATE TABLE {table_name}_state (")


async def test_a_file_that_is_not_there_is_said_and_not_made(sqlite_command: Command) -> None:
    ran = await sqlite_command.run("tables", "check")
    assert (ran.code, ran.stdout, ran.error_lines) == (ExitCode.UNREACHABLE, "", 1)
    assert not (sqlite_command.folder / "outbox.db").exists()
