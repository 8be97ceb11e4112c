"""Logins: users of a PostgreSQL who have few rights, for the tests of what these suffice for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from sqlalchemy import make_url


@asynccontextmanager
async def login(url: str, name: str, *rights: str) -> AsyncIterator[str]:
    """The URL of a new user with these rights, such as "INSERT ON movies", on the database of the given URL."""
    grants = "".join(f"GRANT {right} TO {name};" for right in rights)
    await as_superuser(url, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'; {grants}")
    yield make_url(url).set(username=name, password=name).render_as_string(hide_password=False)
    await as_superuser(url, f"DROP OWNED BY {name}; DROP ROLE {name}")


async def as_superuser(url: str, statement: str) -> list[tuple[object, ...]]:
    """The rows of a statement, on a connection that is closed again."""
    return await asyncio.to_thread(_run, make_url(url).set(drivername="postgresql").render_as_string(False), statement)


def _run(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []
