"""Held transaction: how a relay is often written, and a worker beside it.

The relay locks rows, publishes them by `gather` over aio-pika's `publish` with the transaction open, deletes them and
commits. The worker looks at its listener's signature and acknowledges every message by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
from aio_pika.abc import AbstractExchange, AbstractIncomingMessage
from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bench.programs.telling import Telling

BATCH = 500
PREFETCH = 500
PAUSE = 0.01  # seconds between two looks at an empty table

QUORUM = {"x-queue-type": "quorum"}


async def relay() -> None:
    engine = create_async_engine(os.environ["OUTBOX_DB_ENGINE_URL"])
    connection = await aio_pika.connect_robust(os.environ["BENCH_RABBITMQ_URL"])
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.declare_exchange(os.environ["BENCH_EXCHANGE"], "topic", durable=True)
    while True:
        if not await relay_batch(engine, exchange, os.environ["OUTBOX_TABLE_NAME"]):
            await asyncio.sleep(PAUSE)


async def relay_batch(engine: AsyncEngine, exchange: AbstractExchange, table: str) -> int:
    look = text(f"SELECT id, routing_key, body FROM {table} ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED")
    async with engine.begin() as connection:
        rows = (await connection.execute(look)).all()
        await asyncio.gather(*(_publish(exchange, row.routing_key, row.body) for row in rows))
        if rows:
            delete = text(f"DELETE FROM {table} WHERE id IN :ids").bindparams(bindparam("ids", expanding=True))
            await connection.execute(delete, {"ids": [row.id for row in rows]})
        return len(rows)


async def _publish(exchange: AbstractExchange, routing_key: str, body: bytes) -> None:
    message = aio_pika.Message(body, content_type="application/json", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await exchange.publish(message, routing_key, mandatory=True)


async def work(listener: Callable[[AbstractIncomingMessage], Awaitable[None]]) -> None:
    connection = await aio_pika.connect_robust(os.environ["BENCH_RABBITMQ_URL"])
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=PREFETCH)
    exchange = await channel.declare_exchange(os.environ["BENCH_EXCHANGE"], "topic", durable=True)
    queue = await channel.declare_queue(os.environ["BENCH_QUEUE"], durable=True, arguments=QUORUM)
    await queue.bind(exchange, "bench.order")
    await queue.consume(listener)
    await asyncio.Future()


def injecting(callback: Callable[..., Awaitable[None]]) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
    """Give the callback what its parameters name, looked up for every message."""

    async def handle(message: AbstractIncomingMessage) -> None:
        offered = {"body": json.loads(message.body), "routing_key": message.routing_key, "message": message}
        arguments: dict[str, Any] = {name: offered[name] for name in inspect.signature(callback).parameters}
        await callback(**arguments)
        await message.ack()

    return handle


def acking_each(tell: Telling) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
    """Nothing but the acknowledgement."""

    async def handle(message: AbstractIncomingMessage) -> None:
        tell(message.body)
        await message.ack()

    return handle


def main() -> None:
    match sys.argv[1]:
        case "relay":
            asyncio.run(relay())
        case "work":
            tell = Telling()

            async def listener(body: dict[str, int | str]) -> None:
                tell(body)

            asyncio.run(work(injecting(listener)))
        case "ack":
            asyncio.run(work(acking_each(Telling())))


if __name__ == "__main__":
    main()
