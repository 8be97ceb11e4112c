"""Database: the private PostgreSQL that everything is measured on, durable and with room for its data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from bench.processes import parent_of, time_of_all
from outbox.testing.servers import PostgreSQL

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",  # no checkpoint forced by volume in the middle of a round
    "checkpoint_timeout": "30min",
}

PREPARED = "?prepared_statement_cache_size=100"


@dataclass(frozen=True)
class Database:
    """Where it is; statements of ours go over connections of their own."""

    url: str

    def url_for(self, driver: str) -> str:
        return self.url.replace("postgresql:", f"postgresql+{driver}:")

    @property
    def url_in_loop(self) -> str:
        """Where a program with an event loop connects: no pooler stands between, so statements may stay prepared."""
        return self.url_for("asyncpg") + PREPARED

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()

    async def version(self) -> str:
        async with self.connection() as connection:
            return str(await connection.fetchval("SHOW server_version"))

    async def processor_time(self) -> float:
        """Seconds that all processes of the server took so far."""
        async with self.connection() as connection:
            backend = await connection.fetchval("SELECT pg_backend_pid()")
            return time_of_all(parent_of(backend))

    @asynccontextmanager
    async def old_snapshot(self) -> AsyncIterator[None]:
        """A session that sees the database as it is now, so that nothing that dies later can be removed."""
        async with self.connection() as connection, connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("SELECT count(*) FROM pg_class")
            yield


@contextmanager
def database() -> Iterator[Database]:
    with PostgreSQL(fsync=True, settings=SETTINGS) as server:
        yield Database(server.url)
