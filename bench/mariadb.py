"""MariaDB: a private server, as durable as the PostgreSQL of the other parts, and who is measured there."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import asyncmy

from bench.contenders import Contender, ours
from bench.database import Database
from outbox.testing.servers import MariaDB

SETTINGS = {"innodb-buffer-pool-size": "1G", "innodb-log-file-size": "4G"}
OURS, BY_HAND = "outbox on MariaDB", "SELECT … SKIP LOCKED, DELETE … IN"


@dataclass(frozen=True)
class Asking:
    """A connection that commits each statement, asked as asyncpg's is."""

    driver: Any

    async def execute(self, statement: str) -> None:
        async with self.driver.cursor() as cursor:
            await cursor.execute(statement)

    async def fetchval(self, statement: str) -> Any:
        async with self.driver.cursor() as cursor:
            await cursor.execute(statement)
            row = await cursor.fetchone()
        return row[0] if row else None


class MariadbDatabase(Database):
    """Where it is."""

    def url_for(self, driver: str) -> str:
        return self.url.replace("mariadb:", f"mysql+{driver}:")

    @property
    def url_in_loop(self) -> str:
        return self.url_for("asyncmy")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        address = urlsplit(self.url)
        driver = await asyncmy.connect(
            host=address.hostname,
            port=address.port,
            user=address.username,
            database=address.path.lstrip("/"),
            autocommit=True,
        )
        try:
            yield Asking(driver)
        finally:
            await driver.ensure_closed()

    async def version(self) -> str:
        async with self.connection() as connection:
            return str(await connection.fetchval("SELECT VERSION()")).partition("-")[0]


@contextmanager
def mariadb() -> Iterator[MariadbDatabase]:
    with MariaDB(fsync=True, settings=SETTINGS) as server:
        yield MariadbDatabase(server.url)


def ours_on(database: MariadbDatabase) -> Contender:
    return replace(ours(database), name=OURS)


def by_hand(database: MariadbDatabase) -> Contender:
    same_shape = ours(database, "limit_table")
    return replace(
        same_shape,
        name=BY_HAND,
        worker=(sys.executable, "-m", "bench.programs.skip_locked"),
        environment={**same_shape.environment, "BENCH_URL": database.url},
    )
