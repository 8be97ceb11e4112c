"""What a message costs MariaDB: statements and round trips. None may grow unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

import asyncmy
import pymysql
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Outbox
from outbox.core.attempt import Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import Message
from outbox.core.store import Selection
from tests.support.mariadb import arguments, url_through

from .metering import LEASE, MANY, Cost, Meter
from .round_trips import MysqlRoundTrips, counting


@pytest.fixture
async def meter(mariadb_url: str, table_name: str) -> AsyncIterator[Meter]:
    """A meter after everything was done once: what a process does once is not counted."""
    async with AsyncExitStack() as stack:
        trips, url = await stack.enter_async_context(counting(mariadb_url, MysqlRoundTrips))
        engine = create_async_engine(url_through(url, "asyncmy"))
        outbox = Outbox(db_engine_url=url_through(url, "asyncmy"), table_name=table_name)
        producer = Outbox(db_engine_url=url_through(mariadb_url, "asyncmy"), table_name=table_name)
        meter = Meter(outbox, engine, producer, trips)
        for close in (engine.dispose, outbox.close, producer.close):
            stack.push_async_callback(close)
        await outbox.create_tables()
        await outbox.store.queues.bind([Binding("q", "#")])
        await meter.emit(1)
        await meter.routed()
        async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            await claim.settle({claim.attempts[0].id: Done()})
        for each in (engine, outbox.engines.asynchronous):
            async with each.connect() as connection:
                await outbox.emit(connection, "order.created", {"number": 0})
        event.listen(Engine, "before_cursor_execute", meter.count)
        stack.callback(event.remove, Engine, "before_cursor_execute", meter.count)
        yield meter


async def test_emitting_is_one_statement_in_the_callers_transaction(meter: Meter) -> None:
    async with meter.engine.connect() as connection:
        await connection.execute(text("SELECT 1"))
        cost = await meter.cost(lambda: meter.outbox.emit(connection, "order.created", {"number": 1}))
        assert cost == Cost(statements=1, round_trips=1)
        many = [{"number": n} for n in range(MANY)]
        cost = await meter.cost(lambda: meter.outbox.emit_many(connection, "order.created", many))
        assert cost == Cost(statements=1, round_trips=1)
        await connection.rollback()


async def test_a_batch_on_a_drivers_own_connection_is_one_statement_too(meter: Meter) -> None:
    many = [{"number": n} for n in range(MANY)]
    address = arguments(meter.engine.url.render_as_string(hide_password=False))
    connection = await asyncmy.connect(**address)
    cost = await meter.cost(lambda: meter.outbox.emit_many(connection, "order.created", many))
    assert cost.round_trips == 1
    await connection.ensure_closed()
    plain = await asyncio.to_thread(pymysql.connect, **address, ssl_disabled=True)  # in TLS nothing can be counted
    cost = await meter.cost(lambda: asyncio.to_thread(meter.outbox.emit_many_sync, plain, "order.created", many))
    assert cost.round_trips == 1
    await asyncio.to_thread(plain.close)


async def test_a_transaction_of_the_librarys_own_ends_with_its_commit(meter: Meter) -> None:
    async def work() -> None:
        async with meter.outbox.transaction() as session:
            await meter.outbox.emit(session, "order.created", {"number": 1})

    assert await meter.cost(work) == Cost(statements=1, round_trips=2)


async def test_a_batch_is_routed_in_three_round_trips(meter: Meter) -> None:
    await meter.emit()
    assert await meter.cost(meter.routed) == Cost(statements=2, round_trips=3)


async def test_a_look_that_finds_nothing_to_route_takes_two_round_trips(meter: Meter) -> None:
    assert await meter.cost(meter.routed) == Cost(statements=1, round_trips=2)


@pytest.mark.parametrize(
    ("outcome", "cost"),
    [
        (Done(), Cost(statements=1, round_trips=2)),
        (Released(), Cost(statements=1, round_trips=2)),
        (RetryIn(timedelta(hours=1), "boom"), Cost(statements=1, round_trips=2)),
        (Dead(Reason.REJECTED, "no"), Cost(statements=3, round_trips=4)),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_batch_is_claimed_in_three_round_trips_and_settled_in_two(
    meter: Meter, outcome: Outcome, cost: Cost
) -> None:
    await meter.emit()
    await meter.routed()
    claim = meter.outbox.store.feed.claim(Selection(limit=MANY, lease=LEASE, destination="q"))
    assert await meter.cost(claim.__aenter__) == Cost(statements=2, round_trips=3)
    outcomes = {attempt.id: outcome for attempt in claim.attempts}  # type: ignore[attr-defined]
    assert len(outcomes) == MANY
    assert await meter.cost(lambda: claim.settle(outcomes)) == cost  # type: ignore[attr-defined]
    assert await meter.cost(lambda: claim.__aexit__(None, None, None)) == Cost(0, 0)


async def test_a_list_is_entered_in_the_inbox_by_one_statement_unless_one_of_it_is_known(meter: Meter) -> None:
    new = [Message(routing_key="a", body=b"1").id for _ in range(MANY)]

    async def enter(ids: list[str]) -> None:
        async with meter.engine.begin() as connection:
            entered.append(await connection.run_sync(meter.outbox.store.inbox.remember_all, "q", ids))

    entered: list[set[str]] = []
    assert (await meter.cost(lambda: enter(new[1:]))).statements == 1
    assert (await meter.cost(lambda: enter(new))).statements == 1 + MANY
    assert entered == [set(new[1:]), {new[0]}]
