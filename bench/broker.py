"""Broker: the private RabbitMQ that everything is measured on, and who is measured there."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from bench.contenders import LOG_LEVEL, Contender
from bench.database import Database
from bench.processes import Program, program, ran
from outbox.testing.servers import RabbitMQ

ROUTING_KEY = "bench.order"
COMMAND = (sys.executable, "-m", "outbox")
LOGGED = "outbox, from the log"
OURS, HELD, ACKING, LIMIT = "outbox", "held transaction, gather", "aio-pika, ack each", "bare frames"


@dataclass(frozen=True)
class Broker:
    """Where it is; every contender has an exchange and a queue of its own."""

    url: str

    @asynccontextmanager
    async def filling(self, exchange: str) -> AsyncIterator[Program]:
        """A publisher of bare frames to an exchange."""
        environment = {
            "BENCH_RABBITMQ_URL": self.url,
            "BENCH_EXCHANGE": exchange,
            "BENCH_ROUTING_KEY": ROUTING_KEY,
        }
        async with program((sys.executable, "-m", "bench.programs.bare_frames"), environment) as publisher:
            await publisher.heard()
            yield publisher


@contextmanager
def broker() -> Iterator[Broker]:
    with RabbitMQ(management=False) as server:
        yield Broker(server.url)


@dataclass(frozen=True)
class OnBroker:
    """A relay and a worker over RabbitMQ."""

    name: str
    exchange: str
    worker: tuple[str, ...]
    relay: tuple[str, ...] = ()
    store: Contender | None = None  # whose table the relay empties
    environment: Mapping[str, str] = field(default_factory=dict)

    def working(self, *, tell_every: int) -> AbstractAsyncContextManager[Program]:
        return program(self.worker, {**self.environment, "BENCH_TELL_EVERY": str(tell_every)})

    def relaying(self) -> AbstractAsyncContextManager[Program]:
        store = self.store.environment if self.store else {}
        return program(self.relay, {**store, **self.environment})


def ours(broker: Broker, database: Database, table: str = "outbox_over_rabbitmq", exchange: str = "outbox") -> OnBroker:
    start = COMMAND
    quiet = ("--log-level", LOG_LEVEL)
    return OnBroker(
        OURS,
        exchange,
        (*start, "worker", "bench.programs.ours:listeners", *quiet),
        (*start, "relay", *quiet),
        _store(broker, database, table),
        {"OUTBOX_RABBITMQ_URL": broker.url, "OUTBOX_EXCHANGE_NAME": exchange},
    )


@dataclass(frozen=True)
class FromLog(OnBroker):
    """The same with a relay that reads the log: it has a slot as long as it runs."""

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[Program]:
        store = self.store.environment if self.store else {}
        environment = {**store, **self.environment}
        await ran((*COMMAND, "wal", "create"), environment)
        try:
            async with program(self.relay, environment) as relay:
                yield relay
        finally:
            await ran((*COMMAND, "wal", "drop"), environment)


def from_log(broker: Broker, database: Database) -> OnBroker:
    polls = ours(broker, database, "outbox_from_log", "logged")
    environment = {**polls.environment, "OUTBOX_RELAY_FROM": "wal", "OUTBOX_QUEUE_PREFIX": "logged."}
    return FromLog(LOGGED, polls.exchange, polls.worker, polls.relay, polls.store, environment)


def held_transaction(broker: Broker, database: Database) -> OnBroker:
    start = (sys.executable, "-m", "bench.programs.held_transaction")
    store = _store(broker, database, "held_table")
    return OnBroker(HELD, "held", (*start, "work"), (*start, "relay"), store, environment(broker, "held"))


def acking_each(broker: Broker) -> OnBroker:
    worker = (sys.executable, "-m", "bench.programs.held_transaction", "ack")
    return OnBroker(ACKING, "acking", worker, environment=environment(broker, "acking"))


def environment(broker: Broker, name: str) -> dict[str, str]:
    return {"BENCH_RABBITMQ_URL": broker.url, "BENCH_EXCHANGE": name, "BENCH_QUEUE": name}


def _store(broker: Broker, database: Database, table: str) -> Contender:
    """The same table for everybody, filled by the same emitter."""
    return Contender(
        table,
        (),
        (sys.executable, "-m", "bench.programs.ours"),
        table,
        {
            "OUTBOX_DB_ENGINE_URL": database.url_in_loop,
            "OUTBOX_TABLE_NAME": table,
            "OUTBOX_RABBITMQ_URL": broker.url,
        },
    )
