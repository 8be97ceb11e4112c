"""Inbox: listeners that write one business row for each message, and a consumer by hand that does the same.

`work` consumes through aio-pika: BEGIN, INSERT, COMMIT, then the acknowledgement, ten messages at a time. It does not
know a message that comes twice.
"""

from __future__ import annotations

import asyncio
import json
import os

from aio_pika.abc import AbstractIncomingMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from bench.programs.held_transaction import work
from bench.programs.telling import Telling
from outbox import listen

CONCURRENCY = 10
QUEUE = os.environ.get("INBOX_QUEUE", "inbox")

Body = dict[str, int | str]

ROW = text("INSERT INTO inbox_effects (number, padding) VALUES (:number, :padding)")

tell = Telling()


@listen("bench.order", queue=QUEUE, concurrency=CONCURRENCY)
async def each(body: Body, session: AsyncSession) -> None:
    await session.execute(ROW, body)
    tell(body)


@listen("bench.order", queue=QUEUE, concurrency=CONCURRENCY, batch=100)
async def lists(bodies: list[Body], session: AsyncSession) -> None:
    await session.execute(ROW, bodies)
    for body in bodies:
        tell(body)


async def by_hand() -> None:
    engine = create_async_engine(os.environ["OUTBOX_DB_ENGINE_URL"], pool_size=CONCURRENCY)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    turns = asyncio.Semaphore(CONCURRENCY)

    async def handle(message: AbstractIncomingMessage) -> None:
        async with turns:
            body = json.loads(message.body)
            async with sessions() as session, session.begin():
                await session.execute(ROW, body)
                tell(body)
            await message.ack()

    await work(handle)


if __name__ == "__main__":
    asyncio.run(by_hand())
