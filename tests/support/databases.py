"""Databases: where a test runs, by the name of SQLAlchemy's dialect and driver."""

from __future__ import annotations

from pathlib import Path

import pytest

SQLITE = "sqlite"
ASYNCPG = "postgresql+asyncpg"
PSYCOPG = "postgresql+psycopg"
ASYNCMY = "mysql+asyncmy"  # as MySQL's users write it; the tests of all databases say MariaDB
DATABASES = (SQLITE, ASYNCPG, PSYCOPG, "mariadb+asyncmy")
WAL = "wal"  # beside them: PostgreSQL, whose log is the relays' feed

on_every_driver = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG, PSYCOPG], indirect=True)
on_postgresql = pytest.mark.parametrize("database_url", [ASYNCPG, PSYCOPG], indirect=True)
on_both_stores = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG], indirect=True)
on_every_store = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG, ASYNCMY], indirect=True)
on_asyncpg = pytest.mark.parametrize("database_url", [ASYNCPG], indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", [SQLITE], indirect=True)
either_feed = pytest.mark.parametrize("database_url", [*DATABASES, WAL], indirect=True)
on_sqlite_and_from_the_log = pytest.mark.parametrize("database_url", [SQLITE, WAL], indirect=True)

_FIXTURES = {"postgresql": "postgresql_url", "mysql": "mariadb_url", "mariadb": "mariadb_url"}


def url_on(request: pytest.FixtureRequest, name: str, folder: Path) -> str:
    """The URL of a database: a file in the folder, or the server of the run through this driver."""
    if name == WAL:
        name = "postgresql+asyncpg"
    if name == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'outbox.db'}"
    url: str = request.getfixturevalue(_FIXTURES[name.partition("+")[0]])
    server, _, address = url.partition("://")
    return f"{name.replace('mariadb', server)}://{address}"
