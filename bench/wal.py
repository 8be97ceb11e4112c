"""Log: a relay that reads PostgreSQL's write-ahead log beside one that polls, and a peer's listener that reads it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import broker as brokers
from bench import node_peers
from bench.broker import HELD, LIMIT, LOGGED, OURS, ROUTING_KEY, Broker, OnBroker
from bench.database import Database
from bench.latency import Latency
from bench.processes import Program, ran
from bench.programs.payload import body
from bench.rabbitmq import MESSAGES, PACED, RATE, Carried, declared, emitter_of, emptied, latency_of, limit, relay, to
from bench.report import Report, Target, at_least, at_most, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

PEER = "pg-transactional-outbox"
AT_ONCE = 20  # messages of the peer, and connections
SCRIPT = str(Path(__file__).parent / "node/pg_transactional_outbox.cjs")
LOOK_EVERY = 0.25  # seconds: each look reads the whole table of the peer, which keeps its messages

INSERT = """
    INSERT INTO peer_outbox (id, aggregate_type, aggregate_id, message_type, payload)
    SELECT gen_random_uuid(), 'order', '1', $1, body::jsonb FROM unnest($2::text[]) body
"""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    messages: int = MESSAGES
    paced: int = PACED
    transactions: int = 1_500  # of the producer, in a turn
    turns: int = 4  # of the producer, in a round
    calm: float = 10.0  # seconds until everything has come to rest
    idle: float = 30.0  # seconds


SMOKE = Size(messages=3_000, paced=500, transactions=200, turns=2, calm=1.0, idle=3.0)


@dataclass(frozen=True)
class Idle:
    """Percent of one core."""

    relay: float
    server: float

    def __str__(self) -> str:
        return f"relay {number(self.relay)} %, PostgreSQL {number(self.server)} %"


async def measure(database: Database, settings: Settings) -> Report:
    size = SMOKE if settings.smoke else Size()
    with brokers.broker() as broker:
        feeds = [brokers.ours(broker, database), brokers.from_log(broker, database)]
        held = brokers.held_transaction(broker, database)
        peer, missing = _peer(broker, database)
        # Latency first, because a measure of rates leaves some messages in its queue.
        late = await in_turns(
            [*feeds, held], settings.rounds, lambda each: latency_of(each, broker, database, size.paced), _name
        )
        idle = await in_turns(feeds, settings.rounds, lambda each: _idle(each, broker, database, size), _name)
        rounds = settings.rounds * size.turns
        produced = await in_turns(feeds, rounds, lambda each: _produced(each, broker, database, size), _name)
        ways: list[OnBroker | None] = [None, *feeds, held, *([peer] if peer else [])]
        rates = await in_turns(ways, settings.rounds, lambda each: _rate(each, broker, database, size), _name)
    rows = [
        (
            name,
            _cell(rates, name, lambda one: one.rate),
            "" if name == LIMIT or name not in rates else spread(to(rates[name], rates[LIMIT])),
            _cell(rates, name, lambda one: one.processor_time),
            _cell(late, name, lambda one: one.p50),
            _cell(late, name, lambda one: one.p99),
            _cell(idle, name, lambda one: one.relay),
            _cell(idle, name, lambda one: one.server),
            _cell(produced, name, lambda one: one),
        )
        for name in rates
    ]
    return Report(
        "Write-ahead log",
        _about(size, settings, missing),
        (
            "",
            "messages/s",
            "to the limit",
            "processor time of the relay, µs per message",
            f"p50 at {RATE}/s, ms",
            f"p99 at {RATE}/s, ms",
            "relay while idle, % of a core",
            "PostgreSQL while idle, % of a core",
            "producer, transactions/s",
        ),
        rows,
        _targets(rates, late, produced),
    )


def _about(size: Size, settings: Settings, missing: str) -> str:
    text = (
        f"Relays to RabbitMQ: one polls the table, one reads the log of the same server. {number(size.messages)} "
        "messages of 256 bytes that were committed at once, until every one is confirmed by a quorum queue and its row "
        "is gone or marked; the limit has no database. Latency is from asking for the commit to the start of the "
        f"listener, for {number(size.paced)} messages at {RATE} a second. Idle is over {size.idle:.0f} seconds. The "
        "producer writes one message in each transaction, one after the other, while a relay sends them: "
        f"{settings.rounds * size.turns} turns of {number(size.transactions)} transactions. "
    )
    if missing:
        return f"{text}{PEER} was not run: {missing}."
    return (
        f"{text}Ours has its defaults: a batch of 500. {PEER} 0.5.7 is the replication listener on Node, with "
        f"{AT_ONCE} messages at once and as many connections, read committed, without protection against poisonous "
        "messages and without clean-up; it publishes by amqplib on one channel with confirms, the same bodies to the "
        "same broker, and marks each message."
    )


def _targets(
    rates: dict[str, list[Carried]], late: dict[str, list[Latency]], produced: dict[str, list[float]]
) -> list[Target]:
    p50 = ratios([one.p50 for one in late[LOGGED]], [one.p50 for one in late[HELD]])
    p99 = [one.p99 for one in late[LOGGED]]
    targets = [
        at_least("log: rate, to polling", 0.9, to(rates[LOGGED], rates[OURS])),
        at_least("log: rate, to bare frames", 0.65, to(rates[LOGGED], rates[LIMIT])),
        at_most(f"log: p50 at {RATE} a second, to that of a held transaction", 0.8, p50),
        at_most(f"log: p50 at {RATE} a second, to that of a held transaction", 0.6, p50, aim=True),
        at_most(f"log: p99 at {RATE} a second", 60, p99, unit=" ms"),
        at_most(f"log: p99 at {RATE} a second", 30, p99, unit=" ms", aim=True),
        at_least(
            "log: the producer's transactions, to those beside polling", 0.97, ratios(produced[LOGGED], produced[OURS])
        ),
    ]
    if PEER in rates:
        targets.append(at_least(f"log: rate, to {PEER}", 5, to(rates[LOGGED], rates[PEER])))
    return targets


# --- what is measured


async def _rate(way: OnBroker | None, broker: Broker, database: Database, size: Size) -> Carried:
    if way is None:
        return await limit(broker, size.messages)
    if way.name == PEER:
        return await _rate_of_peer(way, broker, database, size.messages)
    return await relay(way, broker, database, size.messages)


async def _idle(way: OnBroker, broker: Broker, database: Database, size: Size) -> Idle:
    async with _relaying(way, broker, database) as (relaying, _):
        await asyncio.sleep(size.calm)
        before = relaying.processor_time, await database.processor_time()
        await asyncio.sleep(size.idle)
        after = relaying.processor_time, await database.processor_time()
    relay_time, server_time = (late - early for early, late in zip(before, after, strict=True))
    return Idle(relay_time / size.idle * 100, server_time / size.idle * 100)


async def _produced(way: OnBroker, broker: Broker, database: Database, size: Size) -> float:
    """Transactions a second."""
    async with _relaying(way, broker, database) as (_, emitter):
        took = float(await emitter.asked(f"each {size.transactions}"))
    await emptied(way, size.transactions)
    return size.transactions / took


@asynccontextmanager
async def _relaying(way: OnBroker, broker: Broker, database: Database) -> AsyncIterator[tuple[Program, Program]]:
    """A relay at work, and an emitter."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(declared(way, broker))
        store, emitter = await emitter_of(stack, way, database)
        relaying = await stack.enter_async_context(way.relaying())
        await emitter.asked("emit 1")
        await store.emptied(database)
        yield relaying, emitter


# --- the peer


def _peer(broker: Broker, database: Database) -> tuple[OnBroker | None, str]:
    """It, or why it cannot be run."""
    try:
        found = node_peers.installed()
    except node_peers.NodeMissing as reason:
        return None, str(reason)
    environment = {
        **brokers.environment(broker, "peer"),
        **found,
        "BENCH_URL": database.url,
        "BENCH_ROUTING_KEY": ROUTING_KEY,
        "BENCH_AT_ONCE": str(AT_ONCE),
    }
    worker = (sys.executable, "-m", "bench.programs.held_transaction", "ack")
    return OnBroker(PEER, "peer", worker, ("node", SCRIPT, "relay"), environment=environment), ""


async def _rate_of_peer(peer: OnBroker, broker: Broker, database: Database, messages: int) -> Carried:
    async with declared(peer, broker), database.connection() as connection:
        await ran(("node", SCRIPT, "setup"), peer.environment)
        async with peer.relaying() as relaying:
            await connection.execute(INSERT, ROUTING_KEY, [json.dumps(body(0))] * 100)
            await _handled(connection)
            bodies = [json.dumps(body(number)) for number in range(messages)]
            async with connection.transaction():
                await connection.execute(INSERT, ROUTING_KEY, bodies)
                await connection.execute("ANALYZE peer_outbox")
                begun, processor_time = time.monotonic(), relaying.processor_time
            await _handled(connection)
            took = time.monotonic() - begun
            used = relaying.processor_time - processor_time
    await emptied(peer, messages)
    return Carried(messages / took, used * 1e6 / messages)


async def _handled(connection: Any) -> None:
    while await connection.fetchval("SELECT EXISTS (SELECT 1 FROM peer_outbox WHERE processed_at IS NULL)"):
        await asyncio.sleep(LOOK_EVERY)


def _name(way: OnBroker | None) -> str:
    return way.name if way else LIMIT


def _cell(found: Mapping[str, Sequence[Any]], name: str, value: Callable[[Any], float]) -> str:
    return spread([value(one) for one in found[name]]) if name in found else ""
