"""Search path: functions that another role put into `public` do not run as ours."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from outbox import Outbox, Reject, listen
from tests.walk.commands import Command, until

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


PLANTED_OPERATOR = """
    CREATE SEQUENCE public.calls_of_operator;
    CREATE FUNCTION public.field(jsonb, varchar) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_catalog.nextval('public.calls_of_operator');
             RETURN $1 OPERATOR(pg_catalog.->>) $2::text; END $$;
    CREATE OPERATOR public.->> (LEFTARG = jsonb, RIGHTARG = varchar, FUNCTION = public.field);
"""


@pytest.fixture
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
        connection.execute(PLANTED_OPERATOR)
        connection.execute("RESET ROLE")
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY stranger_of_search_path CASCADE")
        connection.execute("DROP ROLE stranger_of_search_path")
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=["asyncpg", "psycopg"])
async def outbox(request: pytest.FixtureRequest, open_database: str) -> AsyncIterator[Outbox]:
    url = open_database.replace("postgresql:", f"postgresql+{request.param}:")
    outbox = Outbox(db_engine_url=url, poll_interval=0.2, inbox_retention="NEVER")
    yield outbox
    await outbox.close()


def calls(url: str) -> dict[str, object]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT sequencename, last_value FROM pg_catalog.pg_sequences "
            "WHERE sequencename LIKE 'calls_of_%' AND last_value IS NOT NULL"
        ).fetchall()
    return dict(rows)


async def test_functions_that_fit_better_than_postgresqls_own_are_not_called(
    outbox: Outbox, open_database: str
) -> None:
    handled: list[object] = []

    @listen("order.*", queue="billing", retry_delays=(0,))
    async def billing(order: dict[str, int]) -> None:
        if order["id"] % 2:
            raise Reject("odd")
        handled.append(order["id"])

    async with outbox.running(listeners=[billing]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", [{"id": number} for number in range(10)])
        await until(lambda: len(handled) == 5)
        letters = await until(lambda: outbox.dead_letters.list())
        await outbox.dead_letters.replay([letters[0].id])
    await outbox.backlog()
    assert await outbox.check_tables() == []
    assert calls(open_database) == {}


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
