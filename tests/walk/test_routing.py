"""Routers beside workers, and beside those who change the bindings."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Table, delete, insert, select, text, update

from outbox import Outbox, listen
from outbox.core.binding import Binding
from outbox.core.store import Wanted
from outbox.outbound.relay import Router
from outbox.stores import bindings
from outbox.testing.sql import sql_store
from outbox.transports.database import DatabaseTransport
from tests.support.databases import on_postgresql
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit


async def test_what_a_router_leases_is_in_the_consumers_hands_at_once(outbox: Outbox) -> None:
    """Otherwise it would wait until its lease runs out, and then be taken for a crash."""

    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    store = outbox.store
    transport = DatabaseTransport(store, lease=timedelta(minutes=10), poll_interval=0.2, observe=lambda event: None)
    router = Router(store, transport, batch_size=10, patience=0, unroutable={}, observe=lambda event: None)
    await transport.declare([listener])
    await emit(outbox, 1)
    deliveries = transport.consume(listener, 10)
    delivery = asyncio.ensure_future(anext(deliveries))
    async with asyncio.timeout(PATIENCE):
        while not wanted(transport):
            await asyncio.sleep(0.01)
    assert await router.round() == 1
    await asyncio.wait([delivery], timeout=PATIENCE / 4)
    assert delivery.done()
    assert delivery.result().attempt.message.body == b"1"
    await deliveries.aclose()
    await transport.close()


def wanted(transport: DatabaseTransport) -> bool:
    """Whether some consumer would take something at this moment."""
    with transport.offer() as offer:
        return bool(offer.wanted)


@on_postgresql
async def test_a_binding_is_not_added_while_a_router_works_without_it(make_outbox: MakeOutbox, table_name: str) -> None:
    """Whoever has bound a queue gets what is routed from then on: no router may still decide by the old bindings."""
    router, binder, watcher = make_outbox(), make_outbox(), make_outbox()
    await router.store.maintenance.record_transport("database")  # as every run does first
    await emit(router, 1)
    async with watcher.engines.asynchronous.connect() as connection:
        # Nobody can write messages, but they can be looked at and locked: the router halts between the two.
        await connection.execute(text(f"LOCK TABLE {table_name} IN SHARE MODE"))
        routed = asyncio.create_task(router.store.queues.route(10, {"#": "discard"}))
        await waiting(watcher, table_name, 1)
        binding = asyncio.create_task(binder.store.queues.bind([Binding("q", "#")]))
        await waiting(watcher, table_name, 2)
        meanwhile = await watcher.bindings()
    await asyncio.wait_for(asyncio.gather(routed, binding), PATIENCE)
    assert meanwhile == []
    assert await watcher.bindings() == [Binding("q", "#")]
    assert await watcher.messages() == []


async def waiting(outbox: Outbox, table_name: str, count: int) -> None:
    """Until so many statements on this test's tables wait for a lock."""
    held_up = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE :ours")
    async with asyncio.timeout(PATIENCE):
        while True:
            async with outbox.engines.asynchronous.connect() as connection:
                if await connection.scalar(held_up, {"ours": f"%{table_name}%"}) == count:
                    return
            await asyncio.sleep(0.02)


async def test_a_restored_database_is_routed_by_its_own_bindings(make_outbox: MakeOutbox) -> None:
    """Counted on from the restored number, the version would be one that the router knows with other bindings."""
    router, other = make_outbox(), make_outbox()
    await other.store.queues.bind([Binding("before", "#")])
    backup = await rows_of(other)
    await other.unbind("before")
    await other.store.queues.bind([Binding("lost", "#")])
    await emit(router, 1)
    assert (await router.store.queues.route(10, {})).routed == {"lost": 1}
    await restore(other, backup)
    await other.unbind("before")
    await other.store.queues.bind([Binding("after", "#")])
    await emit(router, 2)
    assert (await router.store.queues.route(10, {}, WANTED)).routed == {"after": 1}


async def test_bindings_that_were_changed_without_their_version_are_noticed_after_a_while(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, other = make_outbox(), make_outbox()
    await other.store.queues.bind([Binding("before", "#")])
    await emit(router, 1)
    assert (await router.store.queues.route(10, {}, WANTED)).routed == {"before": 1}
    by_hand = update(other.tables.bindings).values(queue="after")
    await sql_store(other.store).runner.transact(lambda connection: connection.execute(by_hand))
    monkeypatch.setattr(bindings, "KNOWN_FOR", 0.0)
    await emit(router, 2)
    assert (await router.store.queues.route(10, {}, WANTED)).routed == {"after": 1}


WANTED = {queue: Wanted(10, timedelta(seconds=30)) for queue in ("before", "lost", "after")}


async def rows_of(outbox: Outbox) -> dict[Table, list[dict[str, Any]]]:
    """The bindings and their version, as a dump has them."""

    def read(connection: Connection) -> dict[Table, list[dict[str, Any]]]:
        tables = (outbox.tables.bindings, outbox.tables.state)
        return {each: [dict(row) for row in connection.execute(select(each)).mappings()] for each in tables}

    return await sql_store(outbox.store).runner.look(read)


async def restore(outbox: Outbox, backup: dict[Table, list[dict[str, Any]]]) -> None:
    def write(connection: Connection) -> None:
        for table, rows in backup.items():
            connection.execute(delete(table))
            connection.execute(insert(table), rows)

    await sql_store(outbox.store).runner.transact(write)
