"""faststream-outbox: a worker with large batches, and an emitter."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvloop
from faststream import FastStream
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from bench.programs.emitting import obey
from bench.programs.telling import Telling

TABLE = "faststream_outbox"

metadata = MetaData()
engine = create_async_engine(os.environ["BENCH_URL"].replace("postgresql:", "postgresql+asyncpg:"), pool_size=10)
broker = OutboxBroker(engine, outbox_table=make_outbox_table(metadata, TABLE), logger=None)
tell = Telling()


@broker.subscriber("bench", max_workers=2, fetch_batch_size=1000, terminal_flush_batch_size=500)
async def handle(body: dict[str, int | str]) -> None:
    tell(body)


class FastStreamOutbox:
    def __init__(self) -> None:
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        async with self._sessions() as session, session.begin():
            yield session

    async def emit(self, session: AsyncSession, bodies: Sequence[dict[str, int | str]]) -> None:
        for start in range(0, len(bodies), 1000):
            await broker.publish_batch(*bodies[start : start + 1000], queue="bench", session=session)

    async def analyze(self, session: AsyncSession) -> None:
        await session.execute(text(f"ANALYZE {TABLE}"))


async def emit() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl(TABLE)))
    await obey(FastStreamOutbox())


async def work() -> None:
    await FastStream(broker, logger=None).run()


if __name__ == "__main__":
    if sys.argv[1] == "emit":
        asyncio.run(emit())
    else:
        uvloop.run(work())
