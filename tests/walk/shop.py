"""A small service that the process tests start, stop and kill: `python -m tests.walk.shop COMMAND`.

`DIE_AT` names the moment at which the process kills itself, once: the file named by `DIE_ONCE` keeps it from dying
again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, Outbox, listen

from .effects import effects_table

effects = effects_table(os.environ["OUTBOX_TABLE_NAME"])

outbox = Outbox(lease=float(os.environ.get("SHOP_LEASE", "2")), poll_interval=0.2, grace=5)


def die(moment: str) -> None:
    """The worst thing that can happen at this moment."""
    once = Path(os.environ.get("DIE_ONCE", os.devnull))
    if os.environ.get("DIE_AT") == moment and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@listen("order.*", queue="ledger")
async def ledger(body: int, session: AsyncSession) -> None:
    await session.execute(insert(effects).values(queue="ledger", body=body))
    if os.environ.get("SHOP_POISON", str(body)) == str(body):
        die("listener")


@listen("order.created", queue="journal", concurrency=50)
async def journal(body: int, message: Message) -> None:
    """An effect outside of the database: at least once, and exactly once as long as nothing dies."""
    os.write(journal_file(), f"{body}\n".encode())


@cache
def journal_file() -> int:
    return os.open(os.environ["SHOP_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def die_around(owner: Any, name: str, moment: str) -> None:
    """Die before the method's work is done, or right after it, as the moment's name says."""
    original = getattr(owner, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        die(f"before {moment}")
        result = original(self, *args, **kwargs)
        die(f"after {moment}")
        return result

    setattr(owner, name, replaced)


def arm() -> None:
    """Put the moments in place at which this process may die."""
    from outbox.inbound.http.request_storage import RequestStorage
    from outbox.inbound.store_first import DeliveryStorage
    from outbox.stores.claiming import SqlClaim
    from outbox.stores.receiving import SqlReceiving
    from outbox.stores.routing import SqlRouting
    from outbox.transports.database import DatabaseConsumer

    die_around(SqlClaim, "settle", "settle")
    die_around(SqlClaim, "_settle", "the settling statement")
    die_around(SqlClaim, "_take", "the claiming statement")
    die_around(SqlRouting, "_send_to", "routing")
    die_around(SqlReceiving, "_keep", "the storing statements")
    die_around(DeliveryStorage, "_conclude", "acknowledging")
    die_around(RequestStorage, "_conclude", "answering")
    if "SHOP_CLAIMS_NOTHING" in os.environ:
        DatabaseConsumer._claim = never  # type: ignore[assignment, method-assign]


async def never(*_: object) -> bool:
    return await asyncio.get_running_loop().create_future()


async def produce(first: int, count: int, batch: int) -> None:
    """Write messages in transactions of `batch`; every fifth transaction is rolled back, its bodies negative."""
    for number, start in enumerate(range(first, first + count, batch)):
        bodies = range(start, min(start + batch, first + count))
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", bodies)
        if number % 5 == 0:
            session = outbox.engines.session()
            await outbox.emit_many(session, "order.created", [-1 - body for body in bodies])
            await session.rollback()
            await session.close()
    await outbox.close()


async def serve() -> None:
    """Take orders over HTTP on some port, which the file named by SHOP_PORT tells."""
    import uvicorn

    app = outbox.http_app([ledger], secrets=None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told = Path(os.environ["SHOP_PORT"])
        unfinished = told.with_suffix(".new")
        unfinished.write_text(str(listening.getsockname()[1]))
        unfinished.rename(told)
        await uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="on")).serve([listening])


async def main(command: str, *arguments: str) -> None:
    arm()
    if command == "produce":
        await produce(*map(int, arguments))
    elif command == "worker":
        served = [listener for listener in (ledger, journal) if not arguments or listener.queue in arguments]
        await outbox.worker(served, store_first="SHOP_STORES_FIRST" in os.environ)
        await outbox.close()
    elif command == "serve":
        await serve()
    elif command == "relay":
        await outbox.message_relay()
        await outbox.close()
    else:
        raise SystemExit(f"no such command: {command}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
