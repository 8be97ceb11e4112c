"""Databases: where a test of another project's behaviour runs.

Without a mark that is SQLite and PostgreSQL through psycopg, which connects in a third of asyncpg's time; and for edda
MariaDB as well.
"""

from __future__ import annotations

import pytest

SQLITE = "sqlite"
ASYNCPG = "postgresql+asyncpg"
PSYCOPG = "postgresql+psycopg"
ASYNCMY = "mysql+asyncmy"

on_every_driver = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG, PSYCOPG], indirect=True)
on_postgresql = pytest.mark.parametrize("database_url", [ASYNCPG, PSYCOPG], indirect=True)
on_both_stores = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG], indirect=True)
on_every_store = pytest.mark.parametrize("database_url", [SQLITE, ASYNCPG, ASYNCMY], indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", [SQLITE], indirect=True)
