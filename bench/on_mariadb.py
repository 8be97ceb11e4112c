"""On MariaDB: drain, emit, claim and the relay to RabbitMQ, as they are measured on PostgreSQL."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from sqlalchemy.ext.asyncio import create_async_engine

from bench import broker as brokers
from bench import contenders, drain, emit, rabbitmq
from bench.business import orders
from bench.claim import FEW_WAIT, LIMIT, MANY_WAIT, QUEUE, TURNS, Prepared, State
from bench.database import Database
from bench.mariadb import BY_HAND, OURS, MariadbDatabase, by_hand, mariadb, ours_on
from bench.programs.payload import body
from bench.report import Report, at_least, at_most, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios
from outbox import Outbox


async def measure_drain(postgresql: Database, settings: Settings) -> Report:
    with mariadb() as database:
        version = await database.version()
        beside = replace(contenders.ours(postgresql), name="outbox on PostgreSQL")
        everybody = [ours_on(database), by_hand(database), beside]
        drained = await in_turns(
            everybody,
            settings.rounds,
            lambda each: drain.drain(each, postgresql if each is beside else database),
            lambda each: each.name,
        )
    to_limit = {
        name: ratios([one.rate for one in ones], [one.rate for one in drained[BY_HAND]])
        for name, ones in drained.items()
    }
    return Report(
        "MariaDB: drain",
        f"As in Drain, on MariaDB {version} with fsync. By hand, 500 rows of a table of the same shape are selected, "
        "deleted and committed over asyncmy.",
        ("", "messages/s", "to by hand", "processor time of the worker, µs per message"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(to_limit[name]),
                spread([one.processor_time for one in ones]),
            )
            for name, ones in drained.items()
        ],
        [at_least("MariaDB drain: rate, to a claim by hand", 0.2, to_limit[OURS])],
    )


async def measure_emit(_: Database, settings: Settings) -> Report:
    with mariadb() as database:
        version = await database.version()
        engine = create_async_engine(database.url_in_loop)
        async with engine.begin() as connection:
            await connection.run_sync(orders.metadata.create_all)
        await engine.dispose()
        rates = await emit.in_turns_through("asyncmy", database, settings)
    to_hand = ratios(rates["emit"], rates["by hand"])
    return Report(
        "MariaDB: emit",
        f"As in Emit, through asyncmy on MariaDB {version} with fsync.",
        ("", "commits/s"),
        [*((name, spread(values)) for name, values in rates.items()), ("ratio", spread(to_hand))],
        [at_least("MariaDB emit: commits a second, to an insert by hand", 0.9, to_hand)],
    )


@dataclass(frozen=True)
class PreparedOnMariadb(Prepared):
    """A table in a state, in a database of its own."""

    async def execute(self, statement: str) -> None:
        async with self.database.connection() as connection:
            await connection.execute(statement)

    async def fill(self, count: int) -> None:
        messages = self.outbox.tables.messages
        given = {
            "destination": f"'{QUEUE}'",
            "message_id": "UUID()",
            "due_at": "UTC_TIMESTAMP(6)",
            "routed_at": "UTC_TIMESTAMP(6)",
        }
        names = [column.name for column in messages.c if column.name != "id" and column.computed is None]
        columns = [f"`{name}`" for name in names]
        values = ", ".join(given.get(name, f"`{name}`") for name in names)
        await self.execute(
            f"INSERT INTO {messages.name} ({', '.join(columns)}) "
            f"SELECT {values} FROM {messages.name}, seq_1_to_{count} WHERE destination = ''"
        )


async def measure_claim(_: Database, settings: Settings) -> Report:
    states = [FEW_WAIT, MANY_WAIT]
    with mariadb() as database:
        version = await database.version()
        async with AsyncExitStack() as stack:
            ready = {state.name: await stack.enter_async_context(_prepared(database, state)) for state in states}
            taken = await in_turns(
                states, settings.rounds * TURNS, lambda state: ready[state.name].claim(), lambda state: state.name
            )
    to_few = ratios(taken[MANY_WAIT.name], taken[FEW_WAIT.name])
    return Report(
        "MariaDB: claim",
        f"As in Claim, {LIMIT} messages in {settings.rounds * TURNS} turns, on MariaDB {version} with fsync.",
        ("", "median", "the first", "the longest"),
        [
            (name, number(statistics.median(times)), number(times[0]), number(max(times)))
            for name, times in taken.items()
        ],
        [at_most(f"MariaDB claim: {MANY_WAIT.name}, to {FEW_WAIT.name}", 3, to_few)],
    )


@asynccontextmanager
async def _prepared(server: MariadbDatabase, state: State) -> AsyncIterator[PreparedOnMariadb]:
    name = f"claim_{state.waiting}"
    async with server.connection() as connection:
        await connection.execute(f"CREATE DATABASE {name}")
    database = MariadbDatabase(server.url.rsplit("/", 1)[0] + f"/{name}")
    outbox = Outbox(db_engine_url=database.url_in_loop)
    ready = PreparedOnMariadb(outbox, database)
    try:
        async with outbox.transaction() as session:
            await outbox.emit(session, "bench.order", body(0), eta=timedelta(days=1))
        await ready.fill(state.waiting)
        await ready.execute(f"ANALYZE TABLE {outbox.tables.messages.name}")
        yield ready
    finally:
        await outbox.close()


async def measure_relay(_: Database, settings: Settings) -> Report:
    with mariadb() as database, brokers.broker() as broker:
        version = await database.version()
        ours = brokers.ours(broker, database)
        relayed = await in_turns(
            [None, ours],
            settings.rounds,
            lambda each: rabbitmq.relay(each, broker, database) if each else rabbitmq.limit(broker),
            lambda each: OURS if each else brokers.LIMIT,
        )
    to_limit = rabbitmq.to(relayed[OURS], relayed[brokers.LIMIT])
    return Report(
        "MariaDB: relay to RabbitMQ",
        f"As in RabbitMQ: relay, from MariaDB {version} with fsync.",
        ("", "messages/s", "to the limit", "processor time of the relay, µs per message"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(rabbitmq.to(ones, relayed[brokers.LIMIT])),
                spread([one.processor_time for one in ones]),
            )
            for name, ones in relayed.items()
        ],
        [at_least("MariaDB relay: rate, to bare frames", 0.4, to_limit)],
    )
