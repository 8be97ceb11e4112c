"""Inbox: what it costs that effects happen once, one transaction for each message or for a list of them."""

from __future__ import annotations

import sys

from bench import broker as brokers
from bench.broker import Broker, OnBroker
from bench.contenders import LOG_LEVEL
from bench.database import Database
from bench.rabbitmq import Carried, consume, to
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns

MESSAGES = 4_000
BY_HAND, EACH, FIRST, LISTS = "by hand", "outbox", "outbox, stored first", "outbox, batch=100"


async def measure(database: Database, settings: Settings) -> Report:
    await make_effects(database)
    with brokers.broker() as broker:
        everybody = [
            _by_hand(broker, database),
            ours(EACH, "each", broker, database),
            ours(FIRST, "each", broker, database, "--store-first"),
            ours(LISTS, "lists", broker, database),
        ]
        found = await in_turns(
            everybody, settings.rounds, lambda each: consume(each, broker, MESSAGES), lambda each: each.name
        )
    return Report(
        "Inbox",
        f"{number(MESSAGES)} messages that wait in a quorum queue: one worker process whose listener writes a row for "
        "each, ten at a time. By hand it is BEGIN, INSERT, COMMIT, then the acknowledgement, through aio-pika, and a "
        "message that comes twice is written twice. Ours enters each message in the inbox by the same transaction.",
        ("", "messages/s", "to by hand", "processor time of the worker, µs per message"),
        [
            (name, spread([one.rate for one in ones]), spread(to(ones, found[BY_HAND])), _times(ones))
            for name, ones in found.items()
        ],
        [
            at_least("inbox: rate, to the same transaction by hand", 0.7, to(found[EACH], found[BY_HAND])),
            at_least("inbox: rate of batch=100, to one transaction for each", 4, to(found[LISTS], found[EACH])),
        ],
    )


async def make_effects(database: Database) -> None:
    """Make the table that the listener writes to."""
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE inbox_effects (number bigint, padding text)")


def ours(name: str, listener: str, broker: Broker, database: Database, *options: str) -> OnBroker:
    exchange = "".join(letter if letter.isalnum() else "-" for letter in name)
    command = (sys.executable, "-m", "outbox", "worker", f"bench.programs.inbox:{listener}", *options)
    settings = {
        "OUTBOX_RABBITMQ_URL": broker.url,
        "OUTBOX_EXCHANGE_NAME": exchange,
        "INBOX_QUEUE": f"{exchange}.inbox",
        **_database(database),
    }
    return OnBroker(name, exchange, (*command, "--log-level", LOG_LEVEL), environment=settings)


def _by_hand(broker: Broker, database: Database) -> OnBroker:
    environment = {**brokers.environment(broker, "by-hand"), **_database(database)}
    return OnBroker(BY_HAND, "by-hand", (sys.executable, "-m", "bench.programs.inbox"), environment=environment)


def _database(database: Database) -> dict[str, str]:
    return {"OUTBOX_DB_ENGINE_URL": database.url_in_loop}


def _times(ones: list[Carried]) -> str:
    return spread([one.processor_time for one in ones])
