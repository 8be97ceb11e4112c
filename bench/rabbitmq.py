"""RabbitMQ: how fast one relay and one worker process carry messages over quorum queues."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench import broker as brokers
from bench.broker import ACKING, HELD, LIMIT, OURS, Broker, OnBroker
from bench.contenders import Contender
from bench.database import Database
from bench.latency import Latency
from bench.processes import Program
from bench.report import Report, Target, at_least, at_most, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

MESSAGES = 60_000
TELL_EVERY = 100
WARM_UP = 1_000
RATE = 500  # messages a second, for latency
PACED = 3_000
LONG_RUN, CHUNK = 1_000_000, 20_000  # messages, for memory


@dataclass(frozen=True)
class Carried:
    """Messages a second, and processor time for one, in microseconds."""

    rate: float
    processor_time: float

    def __str__(self) -> str:
        return f"{number(self.rate)} messages/s, {number(self.processor_time)} µs each"


async def measure_relay(database: Database, settings: Settings) -> Report:
    with brokers.broker() as broker:
        everybody = [brokers.ours(broker, database), brokers.held_transaction(broker, database)]
        relayed = await in_turns(
            [None, *everybody],
            settings.rounds,
            lambda each: relay(each, broker, database) if each else limit(broker),
            lambda each: each.name if each else LIMIT,
        )
    return Report(
        "RabbitMQ: relay",
        f"{number(MESSAGES)} messages of 256 bytes that were committed at once, until every one is confirmed by a "
        "quorum queue and its row is gone: one relay process. The limit has no database: frames written by hand, one "
        "write and one wait for a batch of 500, two batches on their way. The other relay holds its transaction open "
        "while it publishes 500 messages by `gather` over aio-pika.",
        ("", "messages/s", "to the limit", "processor time of the relay, µs per message"),
        [
            (name, _rates(ones), spread(to(ones, relayed[LIMIT])), spread([one.processor_time for one in ones]))
            for name, ones in relayed.items()
        ],
        [
            at_least("RabbitMQ relay: rate, to bare frames", 0.65, to(relayed[OURS], relayed[LIMIT])),
            at_least("RabbitMQ relay: rate, to a held transaction", 3, to(relayed[OURS], relayed[HELD])),
            _processor_time("relay", 10, relayed[OURS]),
        ],
    )


async def measure_consume(database: Database, settings: Settings) -> Report:
    with brokers.broker() as broker:
        everybody = [
            brokers.ours(broker, database),
            brokers.acking_each(broker),
            brokers.held_transaction(broker, database),
        ]
        consumed = await in_turns(
            everybody, settings.rounds, lambda each: consume(each, broker), lambda each: each.name
        )
    return Report(
        "RabbitMQ: consume",
        f"{number(MESSAGES)} messages that wait in a quorum queue: one worker process, a listener that does nothing, "
        f"from its {number(WARM_UP)}th message to its last. One of the others only acknowledges each message through "
        "aio-pika; the other looks at its listener's signature, too. Both have a prefetch of 500.",
        ("", "messages/s", "to ack each", "processor time of the worker, µs per message"),
        [
            (name, _rates(ones), spread(to(ones, consumed[ACKING])), spread([one.processor_time for one in ones]))
            for name, ones in consumed.items()
        ],
        [
            at_least("RabbitMQ worker: rate, to ack each", 2, to(consumed[OURS], consumed[ACKING])),
            _processor_time("worker", 25, consumed[OURS]),
        ],
    )


async def measure_end_to_end(database: Database, settings: Settings) -> Report:
    with brokers.broker() as broker:
        everybody = [brokers.ours(broker, database), brokers.held_transaction(broker, database)]
        carried = await in_turns(
            everybody, settings.rounds, lambda each: _carry(each, broker, database), lambda each: each.name
        )
    return Report(
        "RabbitMQ: end to end",
        f"{number(MESSAGES)} messages that were committed at once, until the listener has seen the last: one relay and "
        "one worker process.",
        ("", "messages/s", "processor time of both, µs per message"),
        [(name, _rates(ones), spread([one.processor_time for one in ones])) for name, ones in carried.items()],
        [at_least("RabbitMQ end to end: rate, to a held transaction", 3, to(carried[OURS], carried[HELD]))],
    )


async def measure_latency(database: Database, settings: Settings) -> Report:
    with brokers.broker() as broker:
        everybody = [brokers.ours(broker, database), brokers.held_transaction(broker, database)]
        found = await in_turns(
            everybody, settings.rounds, lambda each: latency_of(each, broker, database), lambda each: each.name
        )
    to_held = ratios([one.p50 for one in found[OURS]], [one.p50 for one in found[HELD]])
    return Report(
        "RabbitMQ: latency",
        f"Milliseconds from asking for the commit to the start of the listener, for {number(PACED)} messages at {RATE} "
        "a second, each in a transaction of its own: emitter, relay and worker in three processes.",
        ("", "p50", "p99"),
        [(name, spread([one.p50 for one in ones]), spread([one.p99 for one in ones])) for name, ones in found.items()],
        [
            at_most(f"RabbitMQ latency: p50 at {RATE} a second, to that of a held transaction", 1, to_held),
            at_most(f"RabbitMQ latency: p50 at {RATE} a second, to that of a held transaction", 0.6, to_held, aim=True),
        ],
    )


async def measure_memory(database: Database, settings: Settings) -> Report:
    with brokers.broker() as broker:
        contender = brokers.ours(broker, database)
        megabytes = await _memory(contender, broker, database)
    early, late = megabytes[len(megabytes) // 10], max(megabytes[-len(megabytes) // 10 :])
    return Report(
        "RabbitMQ: memory",
        f"Megabytes that the relay process holds while {number(LONG_RUN)} messages go through it.",
        ("", "after a tenth", "in the last tenth", "most"),
        [(OURS, number(early), number(late), number(max(megabytes)))],
        [at_most("RabbitMQ relay: memory in the last tenth, to that after the first", 1.1, [late / early])],
    )


async def limit(broker: Broker, messages: int = MESSAGES) -> Carried:
    async with declared(brokers.acking_each(broker), broker) as publisher:
        took, processor_time = map(float, (await publisher.asked(f"publish {messages}")).split())
    await emptied(brokers.acking_each(broker), messages)
    return Carried(messages / took, processor_time * 1e6 / messages)


async def relay(contender: OnBroker, broker: Broker, database: Database, messages: int = MESSAGES) -> Carried:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(declared(contender, broker))
        store, emitter = await emitter_of(stack, contender, database)
        relaying = await stack.enter_async_context(contender.relaying())
        await emitter.asked(f"emit {TELL_EVERY}")
        await store.emptied(database)
        await emitter.asked(f"hold {messages}")
        begun, processor_time = time.monotonic(), relaying.processor_time
        emitter.say("commit")
        await emitter.heard()
        await store.emptied(database)
        took = time.monotonic() - begun
        carried = Carried(messages / took, (relaying.processor_time - processor_time) * 1e6 / messages)
    await emptied(contender, messages)
    return carried


async def consume(contender: OnBroker, broker: Broker, messages: int = MESSAGES) -> Carried:
    """How fast a worker takes so many messages that wait for it."""
    async with declared(contender, broker) as publisher:
        await publisher.asked(f"publish {messages}")
    async with contender.working(tell_every=TELL_EVERY) as worker:
        begun = await _handled(worker, WARM_UP)
        processor_time = worker.processor_time
        ended = await _handled(worker, messages)
        used = worker.processor_time - processor_time
    count = messages - WARM_UP
    return Carried(count / (ended - begun), used * 1e6 / count)


async def _carry(contender: OnBroker, broker: Broker, database: Database) -> Carried:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(declared(contender, broker))
        store, emitter = await emitter_of(stack, contender, database)
        relay = await stack.enter_async_context(contender.relaying())
        worker = await stack.enter_async_context(contender.working(tell_every=TELL_EVERY))
        await emitter.asked(f"emit {TELL_EVERY}")
        await _handled(worker, TELL_EVERY)
        await store.emptied(database)
        await emitter.asked(f"hold {MESSAGES}")
        begun, processor_time = time.monotonic(), relay.processor_time + worker.processor_time
        emitter.say("commit")
        ended = await _handled(worker, TELL_EVERY + MESSAGES)
        used = relay.processor_time + worker.processor_time - processor_time
        return Carried(MESSAGES / (ended - begun), used * 1e6 / MESSAGES)


async def latency_of(contender: OnBroker, broker: Broker, database: Database, messages: int = PACED) -> Latency:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(declared(contender, broker))
        _, emitter = await emitter_of(stack, contender, database)
        await stack.enter_async_context(contender.relaying())
        worker = await stack.enter_async_context(contender.working(tell_every=1))
        emitter.say(f"emit {TELL_EVERY}")
        for _ in range(TELL_EVERY):
            await worker.heard()
        await emitter.heard()
        emitter.say(f"pace {RATE} {messages}")
        started = dict([(await worker.heard()).split()[1:] for _ in range(messages)])
        committed = json.loads(await emitter.heard())
    percentiles = statistics.quantiles(
        [(int(started[number]) - moment) / 1e6 for number, moment in committed.items()], n=100
    )
    return Latency(percentiles[49], percentiles[98])


async def _memory(contender: OnBroker, broker: Broker, database: Database) -> list[float]:
    """Megabytes after each chunk."""
    megabytes = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(declared(contender, broker))
        store, emitter = await emitter_of(stack, contender, database)
        relay = await stack.enter_async_context(contender.relaying())
        worker = await stack.enter_async_context(contender.working(tell_every=CHUNK))
        worker.ignore()
        for _ in range(LONG_RUN // CHUNK):
            await emitter.asked(f"emit {CHUNK}")
            await store.emptied(database)
            megabytes.append(relay.memory / 2**20)
    return megabytes


@asynccontextmanager
async def declared(contender: OnBroker, broker: Broker) -> AsyncIterator[Program]:
    """With an empty queue that the contender's worker made, a publisher to it."""
    async with contender.working(tell_every=1) as worker:
        while not await _routed(contender, broker):
            await asyncio.sleep(0.2)
        await worker.heard()
    async with broker.filling(contender.exchange) as publisher:
        yield publisher


async def _routed(contender: OnBroker, broker: Broker) -> bool:
    """Whether the contender's exchange and queue are there by now, and took a message."""
    async with broker.filling(contender.exchange) as publisher:
        return not (await publisher.asked("publish 1")).startswith("refused")


async def emptied(contender: OnBroker, messages: int = MESSAGES) -> None:
    """Let the contender's worker take what waits in its queue."""
    async with contender.working(tell_every=TELL_EVERY) as worker:
        await _handled(worker, messages)


async def emitter_of(stack: AsyncExitStack, contender: OnBroker, database: Database) -> tuple[Contender, Program]:
    if contender.store is None:
        raise AssertionError(f"{contender.name} has no store")
    emitter = await stack.enter_async_context(contender.store.emitting())
    await contender.store.clear(database)
    return contender.store, emitter


async def _handled(worker: Program, count: int) -> float:
    """When the listener saw so many messages, in seconds."""
    while True:
        seen, _, moment = (await worker.heard()).split()
        if int(seen) >= count:
            return int(moment) / 1e9


def _rates(ones: list[Carried]) -> str:
    return spread([one.rate for one in ones])


def to(these: list[Carried], those: list[Carried]) -> list[float]:
    return ratios([one.rate for one in these], [one.rate for one in those])


def _processor_time(who: str, wanted: float, ones: list[Carried]) -> Target:
    times = [one.processor_time for one in ones]
    return at_most(f"RabbitMQ {who}: processor time per message", wanted, times, unit=" µs", aim=True)
