"""A message that kills every worker, in a list with others: it is tried alone, and dies alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from outbox import Listener, Message, Outbox
from tests.support.observing import PATIENCE, let_leases_run_out

ROOT = Path(__file__).parents[2]
POISON = "poison"
ORDERS = (*map(str, range(8)), POISON, *map(str, range(8, 16)))

WORKER = """
import asyncio, json, os, sys
from outbox import Listener, Outbox

async def on_orders(orders: list) -> None:
    print(*orders, flush=True)
    if "poison" in orders:
        os._exit(1)

listener = Listener("#", on_orders, queue="orders", batch=100, concurrency=1)
asyncio.run(Outbox(**json.loads(sys.argv[1])).worker([listener]))
"""


async def fill(outbox: Outbox) -> None:
    transport = outbox.transport
    await transport.open()
    await transport.declare([Listener("#", print, queue="orders", batch=100)])
    await transport.publish([Message(routing_key="order.created", body=json.dumps(order).encode()) for order in ORDERS])
    await transport.close()


async def live(options: dict[str, Any], calls: list[list[str]], all_done: Callable[[], Awaitable[bool]]) -> None:
    """A worker until it dies, or until nothing is left to do for it."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, json.dumps(options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert worker.stdout is not None
    reading = asyncio.ensure_future(_read(worker.stdout, calls))
    try:
        async with asyncio.timeout(PATIENCE):
            while not reading.done() and not await all_done():
                await asyncio.sleep(0.05)
    finally:
        if worker.returncode is None:
            worker.terminate()
        await worker.wait()
        await reading


async def _read(output: asyncio.StreamReader, calls: list[list[str]]) -> None:
    while line := await output.readline():
        calls.append(line.decode().split())


def check(calls: list[list[str]]) -> None:
    kills = [call for call in calls if POISON in call]
    assert len(kills) == 3
    assert kills[-1] == [POISON], "the crash that condemns it is its own"
    assert {order for call in calls for order in call} == set(ORDERS)


async def test_on_the_database(database_url: str, table_name: str) -> None:
    options: dict[str, Any] = {"db_engine_url": database_url, "table_name": table_name, "poll_interval": 0.2}
    outbox, calls = Outbox(**options), list[list[str]]()
    await outbox.create_tables()
    await fill(outbox)

    async def all_done() -> bool:
        backlog = await outbox.backlog()
        return not any(queue.open for queue in backlog.queues)

    while not await all_done():
        await let_leases_run_out(outbox)
        await live(options, calls, all_done)
    [letter] = await outbox.dead_letters.list()
    assert (json.loads(letter.message.body), letter.reason, letter.crash_count) == (POISON, "crashed", 3)
    assert calls[0] == list(ORDERS), "they came together"
    check(calls)
    await outbox.close()


async def test_on_rabbitmq(rabbitmq_url: str) -> None:
    options: dict[str, Any] = {"rabbitmq_url": rabbitmq_url}
    outbox, calls = Outbox(**options), list[list[str]]()
    await fill(outbox)

    async def all_done() -> bool:
        # The first list may hold those that came first, without the one that kills: they are handled, and not again.
        handled = {order for call in calls if POISON not in call for order in call}
        return handled == {*ORDERS} - {POISON} and bool(await outbox.dead_letters.list(queue="orders"))

    while not await all_done():
        await live(options, calls, all_done)
    [letter] = await outbox.dead_letters.list(queue="orders")
    assert (json.loads(letter.message.body), letter.reason) == (POISON, "crashed")
    check(calls)
    await outbox.close()
