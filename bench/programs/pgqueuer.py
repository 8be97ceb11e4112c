"""pgqueuer: a worker with large batches, and an emitter."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.programs.emitting import obey
from bench.programs.telling import Telling

TABLE = "pgqueuer"


class PgQueuerEmitter:
    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection]:
        async with self._pool.acquire() as connection, connection.transaction():
            yield connection

    async def emit(self, session: asyncpg.Connection, bodies: Sequence[dict[str, int | str]]) -> None:
        payloads: list[bytes | None] = [json.dumps(body).encode() for body in bodies]
        queries = Queries.from_asyncpg_connection(session)
        await queries.enqueue(["bench"] * len(payloads), payloads, [0] * len(payloads))

    async def analyze(self, session: asyncpg.Connection) -> None:
        await session.execute(f"ANALYZE {TABLE}")


async def emit() -> None:
    async with asyncpg.create_pool(os.environ["BENCH_URL"]) as pool:
        async with pool.acquire() as connection:
            queries = Queries.from_asyncpg_connection(connection)
            if not await queries.schema_is_installed():
                await queries.install()
                await queries.optimize_autovacuum()
        await obey(PgQueuerEmitter(pool))


async def work() -> None:
    queuer = PgQueuer.from_asyncpg_connection(await asyncpg.connect(os.environ["BENCH_URL"]))
    tell = Telling()

    @queuer.entrypoint("bench")
    async def handle(job: Job) -> None:
        tell(job.payload)

    await queuer.run(batch_size=500)


if __name__ == "__main__":
    if sys.argv[1] == "emit":
        asyncio.run(emit())
    else:
        uvloop.run(work())
