"""edda-framework: its relayer with large batches and hardly a pause between them, and an emitter."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import uvloop
from edda.outbox.relayer import OutboxRelayer
from edda.storage.sqlalchemy_storage import SQLAlchemyStorage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from bench.programs.emitting import obey

BATCH = 500
PAUSE = 0.001  # seconds after each batch, whether it was full or not

TABLE = "outbox_events"

storage = SQLAlchemyStorage(create_async_engine(os.environ["BENCH_URL"].replace("postgresql:", "postgresql+asyncpg:")))


class Edda:
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await storage.begin_transaction()
        yield
        await storage.commit_transaction()

    async def emit(self, session: None, bodies: Sequence[dict[str, int | str]]) -> None:
        for body in bodies:
            await storage.add_outbox_event(str(uuid4()), "bench.order", "/bench", body)

    async def analyze(self, session: None) -> None:
        async with storage.engine.begin() as connection:
            await connection.execute(text(f"ANALYZE {TABLE}"))


async def emit() -> None:
    await storage.initialize()
    await obey(Edda())


async def relay() -> None:
    relayer = OutboxRelayer(storage, os.environ["BENCH_SINK"], poll_interval=PAUSE, batch_size=BATCH)
    await relayer.start()
    await asyncio.Future()


if __name__ == "__main__":
    logging.disable()
    if sys.argv[1] == "emit":
        asyncio.run(emit())
    else:
        uvloop.run(relay())
