"""Made what lies beside it, with the code of commit 63c9fbb: `python make.py`. Later code is tested with its files.

Two outboxes, `old_queues` with queues in the database and `old_relay` of a relay, hold messages in every state that a
process leaves behind. All times are years ago, so that leases have ended and delays are over whenever this is read.
RabbitMQ's file holds a topology, and messages on their way in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from outbox import NEVER, Binding, Listener, Message, Outbox, Reject
from outbox.core.attempt import Dead, Done, Outcome, Reason, RetryIn
from outbox.core.store import Claim
from outbox.testing import advance
from outbox.testing.servers import PostgreSQL, RabbitMQ
from tests.support.broker import VirtualHost

FOLDER = Path(__file__).parent
HOUR = timedelta(hours=1)
YEARS = timedelta(days=900)
HTTP = "http://127.0.0.1:9/"  # nothing is sent there


async def fill(url: str) -> None:
    await fill_queues(Outbox(db_engine_url=url, table_name="old_queues", clean_up_after=NEVER))
    await fill_relay(Outbox(db_engine_url=url, table_name="old_relay", clean_up_after=NEVER, transport=HTTP))
    os._exit(0)  # a process that is killed closes nothing


async def emit(outbox: Outbox, routing_key: str, *bodies: str, **options: Any) -> None:
    async with outbox.transaction() as session:
        for body in bodies:
            await outbox.emit(session, routing_key, body, **options)


async def fill_queues(outbox: Outbox) -> None:
    store = outbox.store
    await outbox.create_tables()
    await store.record_transport("database")
    await store.record_owners({"billing": "shop", "audit": "shop"})
    await store.bind([Binding("billing", "order.created"), Binding("audit", "order.#")])
    await emit(outbox, "order.created", "leased", "routed", "retrying", "done", "dead", key="customer 7")
    await emit(outbox, "parcel.lost", "unroutable")
    routing = await store.route(100, {})
    assert routing.routed == {"billing": 5, "audit": 5} and routing.unroutable == {"parcel.lost": 1}
    await settle(outbox, "billing", {"retrying": RetryIn(HOUR, "OSError: away"), "done": Done()})
    await settle(outbox, "billing", {"dead": Dead(Reason.REJECTED, "Reject: no such order")})
    await settle(outbox, "audit", {name: Done() for name in ("routed", "leased", "retrying", "done")})
    await outbox.receive(
        "billing", Message(tracking_ids=("received-1",), routing_key="order.created", body=b'"received"')
    )
    await settle(outbox, "billing", {"received": Done()})
    await emit(outbox, "order.created", "waiting", headers={"tenant": "acme"})
    await emit(outbox, "order.created", "timer", eta=HOUR, timer_id="a timer")
    await emit(outbox, "order.created", "expired", expiration=HOUR)
    await leave_leased(outbox, "billing", "leased")


async def fill_relay(outbox: Outbox) -> None:
    store = outbox.store
    await outbox.create_tables()
    await store.record_transport("http")
    await emit(outbox, "order.created", "leased", "retrying", "done", "dead")
    outcomes = {"retrying": RetryIn(HOUR, "503"), "done": Done(), "dead": Dead(Reason.REFUSED, "400 no such order")}
    await settle(outbox, None, outcomes)
    await emit(outbox, "order.created", "waiting", key="customer 7")
    assert await store.open_circuit(None, HOUR, "ConnectionRefusedError: nothing listens there")
    await leave_leased(outbox, None, "leased")


async def settle(outbox: Outbox, destination: str | None, outcomes: dict[str, Outcome]) -> None:
    async with outbox.store.claim(100, lease=HOUR, destination=destination) as claim:
        ids = ids_of(claim)
        assert not await claim.settle({ids[body]: outcome for body, outcome in outcomes.items()})


async def leave_leased(outbox: Outbox, destination: str | None, *bodies: str) -> None:
    """As a process that was killed with a claim in its hands; then years pass."""
    claim = outbox.store.claim(len(bodies), lease=HOUR, destination=destination)
    ids = ids_of(await claim.__aenter__())
    assert {*bodies} == {*ids}, ids
    await advance(outbox, YEARS)


def ids_of(claim: Claim) -> dict[str, int]:
    return {json.loads(attempt.message.body): attempt.id for attempt in claim.attempts}


# Databases.


def make_sqlite(folder: Path) -> None:
    file = folder / "old.db"
    run_and_abandon(f"sqlite+aiosqlite:///{file}")
    connection = sqlite3.connect(file)
    write("sqlite.sql", connection.iterdump())
    connection.close()


def make_postgresql() -> None:
    with PostgreSQL() as server:
        run_and_abandon(server.url.replace("postgresql://", "postgresql+asyncpg://", 1))
        program = server.programs.folder / "pg_dump"
        options = ["--inserts", "--no-owner", "--no-privileges", "--no-comments", "--table=old_*", server.url]
        dumped = subprocess.run([program, *options], capture_output=True, text=True, check=True).stdout
    left_out = re.compile(r"^(--|SET |SELECT pg_catalog.set_config|\\|$)")  # what differs between versions of a server
    write("postgresql.sql", (line for line in dumped.splitlines() if not left_out.match(line)))


def run_and_abandon(url: str) -> None:
    """Fill the outboxes in a process that ends like one that is killed."""
    subprocess.run([sys.executable, __file__, url], check=True, timeout=120)


def write(name: str, lines: Iterable[str]) -> None:
    (FOLDER / name).write_text("\n".join(lines) + "\n")


# RabbitMQ.


def make_rabbitmq(folder: Path) -> None:
    with RabbitMQ() as server:
        host = VirtualHost(server, "old")
        host.create()
        asyncio.run(send(host, f"sqlite+aiosqlite:///{folder / 'broker.db'}"))
        management = host.management
        definitions = management.ask("GET", "definitions", host.name)
        waiting = []
        for queue in sorted(host.queues()):
            options = {"count": 100, "ackmode": "ack_requeue_false", "encoding": "auto"}
            for found in management.ask("POST", "queues", host.name, queue, "get", **options):
                kept = ("exchange", "routing_key", "properties", "payload", "payload_encoding")
                waiting.append({"queue": queue, **{name: found[name] for name in kept}})
    text = json.dumps({"definitions": definitions, "messages": waiting}, indent=1, sort_keys=True)
    write("rabbitmq.json", [text])


async def send(host: VirtualHost, url: str) -> None:
    """Leave a message in its queue, one in the queue of a delay and a dead letter, and two entries in an inbox."""
    outbox = Outbox(db_engine_url=url, transport=host.url, redact_error=lambda text: text.splitlines()[0])
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def bill(body: str, session: AsyncSession) -> None:
        ended.put_nowait(body)
        if body == "retrying":
            raise OSError("away")
        if body == "dead":
            raise Reject("no such order")

    listener = Listener("order.created", bill, queue="billing", retry_delays=(HOUR,))
    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, "order.created", "retrying", "dead", "done", key="customer 7", headers={"tenant": "acme"})
        async with asyncio.timeout(60):
            assert {await ended.get() for _ in range(3)} == {"retrying", "dead", "done"}
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", "waiting", headers={"tenant": "acme"})
        async with asyncio.timeout(60):
            while (await outbox.backlog()).waiting:
                await asyncio.sleep(0.1)
    await outbox.close()


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(fill(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_sqlite(Path(folder))
        make_rabbitmq(Path(folder))
    make_postgresql()


if __name__ == "__main__":
    main()
