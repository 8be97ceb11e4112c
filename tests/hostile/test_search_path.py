"""Search path: functions and operators that another role put into `public` do not run as ours."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, event, make_url
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Reject, listen
from outbox.core.attempt import Reason, Released, RetryIn
from outbox.core.binding import Binding
from outbox.core.diagnosis import Level
from outbox.core.store import Seal, Selection, Suspected, Wanted
from tests.support.commands import Command, until

# Each fits the arguments of one of our calls better than PostgreSQL's own function does.
FUNCTIONS = {
    "pg_notify": "(varchar, varchar) RETURNS void",
    "decode": "(text, varchar) RETURNS bytea",
    "pg_get_serial_sequence": "(varchar, varchar) RETURNS text",
    "pg_stat_get_dead_tuples": "(regclass) RETURNS bigint",
    "pg_advisory_xact_lock": "(integer) RETURNS void",
    "date_part": "(varchar, timestamptz) RETURNS double precision",
    "concat": "(name, varchar, bigint) RETURNS text",
    "pg_has_role": "(name, name, name) RETURNS boolean",
    "format": "(text, name) RETURNS text",
    "setval": "(text, bigint, boolean) RETURNS bigint",
}


def planted(name: str, signature: str) -> str:
    """A function that counts its calls, in a way that no rollback undoes."""
    return f"""
        CREATE SEQUENCE public.calls_of_{name};
        CREATE FUNCTION public.{name}{signature} LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_catalog.nextval('public.calls_of_{name}'); RETURN{_nothing(signature)}; END $$;
    """


def _nothing(signature: str) -> str:
    return "" if signature.endswith("void") else " NULL"


# Of each two types, among them all that our columns and parameters have. For some PostgreSQL has an operator of exactly
# these two, and takes it; for all others the stranger's fits better than any of its own.
TYPES = (
    *("varchar", "text", "name", '"char"', "bytea", "bigint", "integer", "smallint", "numeric", "double precision"),
    *("oid", "regclass", "boolean", "uuid", "interval", "timestamptz"),
    *("json", "jsonb", "varchar[]", "text[]", "bigint[]"),
)
PAIRS = list(itertools.product(TYPES, TYPES))


def planted_operators() -> Iterator[str]:
    """Operators that tell by a sequence for which types one was called."""
    yield "CREATE SEQUENCE public.calls_of_operators MINVALUE 0"
    for number, (left, right) in enumerate(PAIRS):
        comparing, joining, counting = ("=", "<>", "<", "<=", ">", ">=", "~~", "!~~", "~~*"), ("||", "->>"), "+-*"
        for kind, (names, returned) in enumerate([(comparing, "boolean"), (joining, "text"), (counting, left)]):
            function = f"public.strange_{number}_{kind}"
            yield (
                f"CREATE FUNCTION {function}({left}, {right}) RETURNS {returned} IMMUTABLE LANGUAGE plpgsql AS "
                f"$$ BEGIN PERFORM pg_catalog.setval('public.calls_of_operators', {number}); RETURN NULL; END $$"
            )
            for name in names:
                yield f"CREATE OPERATOR public.{name} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {function})"


@pytest.fixture(scope="module")
def open_database(postgresql_url: str) -> Iterator[str]:
    """A database in which every role may create, as they were before PostgreSQL 15, and another role has."""
    name = f"open_{os.getpid()}"
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    url = make_url(postgresql_url).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON SCHEMA public TO PUBLIC")
        connection.execute("CREATE ROLE stranger_of_search_path")
        connection.execute("SET ROLE stranger_of_search_path")
        for function, signature in FUNCTIONS.items():
            connection.execute(planted(function, signature).encode())
        connection.execute("; ".join(planted_operators()).encode())
        connection.execute("RESET ROLE")
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY stranger_of_search_path CASCADE")
        connection.execute("DROP ROLE stranger_of_search_path")
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=["asyncpg", "psycopg"])
async def outbox(request: pytest.FixtureRequest, open_database: str, table_name: str) -> AsyncIterator[Outbox]:
    url = open_database.replace("postgresql:", f"postgresql+{request.param}:")
    outbox = Outbox(db_engine_url=url, table_name=table_name, poll_interval=0.2, clean_up_after=timedelta(minutes=1))
    yield outbox
    await outbox.close()


def calls(url: str) -> dict[str, object]:
    with psycopg.connect(url, autocommit=True) as connection:
        # Without a condition, which would call the stranger's operators itself.
        rows = connection.execute("SELECT sequencename, last_value FROM pg_catalog.pg_sequences").fetchall()
    called = {name: value for name, value in rows if name.startswith("calls_of_") and value is not None}
    return {name: PAIRS[value] if name == "calls_of_operators" else value for name, value in called.items()}


def test_a_stranger_is_caught(open_database: str) -> None:
    with psycopg.connect(open_database, autocommit=True) as connection:
        connection.execute("SELECT 'a'::varchar = 'b'::varchar")
        assert calls(open_database) == {"calls_of_operators": ("varchar", "varchar")}
        connection.execute("ALTER SEQUENCE public.calls_of_operators RESTART")


async def test_functions_and_operators_that_fit_better_than_postgresqls_own_are_not_called(
    outbox: Outbox, open_database: str
) -> None:
    """Emitting, routing, claiming, settling, receiving and cleaning up, as a worker does them."""
    handled: list[object] = []

    @listen("order.*", queue="billing", retry_delays=(0,))
    async def billing(order: dict[str, int], attempt_count: int) -> None:
        if attempt_count == 1:
            raise ConnectionError("once")
        if order["id"] % 2:
            raise Reject("odd")
        handled.append(order["id"])

    async with outbox.running(listeners=[billing]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", [{"id": number} for number in range(10)])
            await outbox.emit(session, "order.late", {"id": 0}, timer_id="timer", eta=3600)
            await outbox.emit(session, "lonely", {"id": 0})
        await until(lambda: len(handled) == 5)
        letters = await until(lambda: outbox.dead_letters.list(error="odd", reason=Reason.REJECTED, queue="billing"))
        await outbox.dead_letters.replay([letters[0].id])
        async with outbox.transaction() as session:
            assert await outbox.cancel_timer(session, "timer")
        again = Message(routing_key="order.created", body=b'{"id": 2}')
        for _ in range(2):
            await outbox.receive("billing", again)
        await until(lambda: len(handled) == 6)
    plain = create_engine(open_database.replace("postgresql:", "postgresql+psycopg:"))
    with Session(plain) as plain_session, plain_session.begin():
        outbox.emit_sync(plain_session, "order.created", {"id": 12}, timer_id="timer", eta=3600)
        assert outbox.cancel_timer_sync(plain_session, "timer")
    plain.dispose()
    assert calls(open_database) == {}


async def test_operators_that_fit_better_are_not_called_by_an_operators_questions(
    outbox: Outbox, open_database: str
) -> None:
    """What relays ask each other, and what commands ask."""
    store, soon = outbox.store, timedelta(seconds=1)
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", [{"id": number} for number in range(3)])
        await outbox.emit(session, "order.brief", {}, expiration=0.001)
    await store.maintenance.record_transport("database")
    await store.maintenance.record_transport("database", switch=True)
    assert await store.owners.record({"billing": "shop", "": "here"})
    assert await store.owners.all() and await store.owners.release("billing") == "shop"
    assert await store.maintenance.recorded_transport() == "database"
    for destination in (None, "billing"):
        assert await store.circuits.open(destination, timedelta(0), "away", refusing=True)
        probe = await until(lambda: store.circuits.probe(destination, soon))  # noqa: B023
        assert await store.circuits.open(destination, timedelta(0), "away", probe=probe)
        assert await store.circuits.all() and await store.circuits.close(destination)
    await store.queues.bind([Binding("billing", "order.*"), Binding("audit", "order.*")])
    for _ in range(2):
        await store.queues.route(10, {}, {"billing": Wanted(2, soon)})
    await until(lambda: store.maintenance.expire(10))
    for suspected in Suspected:
        async with store.feed.claim(
            Selection(limit=10, lease=soon, destination="audit", suspected=suspected, isolated_at=1)
        ) as claim:
            for attempt in claim.attempts:
                await claim.settle({attempt.id: Released(soon) if attempt.isolated else RetryIn(soon, "later")})
    messages = await outbox.messages(queue="billing", state="queued")
    for state in ("waiting", "unroutable", "retrying", "sent", "handled"):
        await outbox.messages(state=state)
    assert await outbox.find(messages[0].message.id)
    assert (await outbox.backlog()).queues and await store.inspection.claimable()
    assert [found.level for found in (await store.inspection.examine()).findings if found.subject == "producers"] == [
        Level.OK
    ]
    await outbox_entries(outbox)
    await store.maintenance.purge(timedelta(0), 10)
    await store.inbox.purge(timedelta(0), 10)
    assert await outbox.check_tables() == []
    assert await outbox.unbind("audit") == 1
    assert await outbox.dead_letters.discard([letter.id for letter in await outbox.dead_letters.list()])
    assert calls(open_database) == {}


async def test_what_is_printed_for_a_superuser_to_run_calls_nothing_of_a_strangers(
    open_database: str, table_name: str, tmp_path: Path
) -> None:
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": open_database, "OUTBOX_TABLE_NAME": table_name})
    assert (await command.run("tables", "create")).code == 0
    roles = (await command.run("tables", "sql", "--roles", "--role-prefix", table_name)).stdout
    with psycopg.connect(open_database, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {table_name} ALTER id DROP IDENTITY".encode())
        checked = await command.run("tables", "check", "--json")
        for difference in checked.document["differences"]:
            connection.execute(difference["mend"].encode())
        assert (await command.run("tables", "check")).code == 0
        try:
            connection.execute(roles.replace("REVOKE CREATE ON SCHEMA public FROM PUBLIC;", "").encode())
        finally:
            for kind in ("producer", "relay", "worker", "operator"):
                connection.execute(f"DROP OWNED BY {table_name}_{kind}; DROP ROLE {table_name}_{kind}".encode())
    assert calls(open_database) == {}


async def test_an_index_serves_what_is_compared_as_text(postgresql_url: str, table_name: str) -> None:
    url = postgresql_url.replace("postgresql:", "postgresql+psycopg:")
    outbox = Outbox(db_engine_url=url, table_name=table_name)
    await outbox.create_tables()
    store: Any = outbox.store
    tables, plans = outbox.tables, list[str]()
    many = "FROM generate_series(1, 5000) AS n"
    filled = "'', 'key', 'id' || n, 'text', '', now(), now()"
    columns = "destination, routing_key, message_id, content_type, body, created_at, due_at"
    with psycopg.connect(postgresql_url) as connection:
        for statement in (
            f"INSERT INTO {tables.messages.name} ({columns}, timer_id) SELECT {filled}, 'timer' || n {many}",
            f"INSERT INTO {tables.dead_letters.name} ({columns}, died_at, reason, error) "
            f"SELECT 'q' || n, {filled.removeprefix(repr('') + ', ')}, now(), 'failed', '' {many}",
            f"INSERT INTO {tables.inbox.name} SELECT 'q' || n % 10, n, now() {many}",
            "ANALYZE",
        ):
            connection.execute(statement.encode())

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if table_name in statement and "pg_catalog.pg_" not in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))

    def recall(connection: Connection) -> None:
        store.inbox.forget(connection, "q1", ["1"])

    engines = [(await store.runner.own()).statements.sync_engine, outbox.engines.asynchronous.sync_engine]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", explain)
    try:
        async with outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=1))):
            await outbox.dead_letters.list(queue="q1")
        async with outbox.transaction() as session:
            assert await outbox.cancel_timer(session, "timer5000")
            await (await session.connection()).run_sync(recall)
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", explain)
    assert len(plans) >= 5
    for index in (f"{tables.messages.name}_claim", f"{tables.messages.name}_timer", f"{tables.inbox.name}_pkey"):
        assert any(index in plan for plan in plans), plans
    assert any(f"{tables.dead_letters.name}_queue" in plan for plan in plans), plans
    assert not any("Seq Scan" in plan for plan in plans), plans
    await outbox.close()


async def outbox_entries(outbox: Outbox) -> None:
    """Entries of the inbox: of one message and of many, under the queue's old name too, and of signed requests."""
    store = outbox.store

    def enter(session: Session) -> None:
        connection = session.connection()
        for also in (None, "before"):
            store.writing.write(connection, *store.inbox.remember("billing", f"one {also}", also=also))
            assert store.inbox.remember_all(connection, "billing", ["many"], also=also) == (
                {"many"} if also is None else set()
            )
        store.inbox.forget(connection, "billing", ["many"])

    async with outbox.transaction() as session:
        await session.run_sync(enter)
    message = Message(routing_key="order.created", body=b"{}")
    seal = Seal(marks=("mark",), reading="binary")
    assert (await store.queues.receive("billing", [message], also="before")).stored
    assert (await store.queues.receive("audit", [message], seals=[seal])).stored


async def test_doctor_says_that_every_role_may_create_there(open_database: str, tmp_path: Path) -> None:
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": open_database})
    assert (await command.run("tables", "create")).code == 0
    said = (await command.run("doctor")).stdout
    assert "search path: every role may create functions and operators in public" in said
    assert "-> REVOKE CREATE ON SCHEMA public FROM PUBLIC;" in said
    assert calls(open_database) == {}
    roles = (await command.run("tables", "sql", "--roles")).stdout
    assert "\nREVOKE CREATE ON SCHEMA public FROM PUBLIC;\n" in roles
    with psycopg.connect(open_database, autocommit=True) as connection:
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert "ok       search path: " in (await command.run("doctor")).stdout


@pytest.mark.parametrize(("path", "warned"), [("public,pg_catalog", True), ("public", False)])
async def test_doctor_says_that_pg_catalog_is_not_the_first(
    postgresql_url: str, table_name: str, path: str, warned: bool
) -> None:
    options = quote(f"-c search_path={path}")
    url = f"{postgresql_url.replace('postgresql:', 'postgresql+psycopg:')}?options={options}"
    command = Command(Path(), {"OUTBOX_DB_ENGINE_URL": url, "OUTBOX_TABLE_NAME": table_name})
    assert (await command.run("tables", "create")).code == 0
    said = (await command.run("doctor")).stdout
    assert ("search path: public, pg_catalog: pg_catalog is not the first" in said) is warned
