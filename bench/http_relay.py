"""HTTP relay: how fast one relay process posts what waits, beside posts without a database."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from bench import contenders
from bench.contenders import LOG_LEVEL, Contender
from bench.database import Database
from bench.processes import Program, program
from bench.programs.posting import CONCURRENCY, SECRET
from bench.rabbitmq import Carried, to
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns

MESSAGES = 20_000
MESSAGES_OF_PEERS = 1_000  # which take as long for these
WARM_UP = 500
OURS, LIMIT, PEER = "outbox", "bare aiohttp", "edda-framework"


async def measure(database: Database, settings: Settings) -> Report:
    async with program((sys.executable, "-m", "bench.programs.sink"), {}) as sink:
        port = await sink.heard()
        everybody = [None, ours(database, port)]
        if settings.peers_python is not None:
            everybody.append(contenders.edda(database, settings.peers_python, _url(port)))
        relayed = await in_turns(
            everybody,
            settings.rounds,
            lambda each: relay(each, database) if each else _posted(port),
            lambda each: each.name if each else LIMIT,
        )
    targets = [at_least("HTTP relay: rate, to bare posts", 0.6, to(relayed[OURS], relayed[LIMIT]))]
    if PEER in relayed:
        targets.append(at_least(f"HTTP relay: rate, to {PEER}", 10, to(relayed[OURS], relayed[PEER])))
    return Report(
        "HTTP: relay",
        f"{number(MESSAGES)} messages of 256 bytes that were committed at once, until every one is answered by a "
        "server that does nothing but say 204, and its row is gone: one relay process, signed and structured "
        f"CloudEvents, {CONCURRENCY} requests under way at a time. The limit has no database: requests that were made "
        "and signed before, posted by bare aiohttp, as many at a time. edda-framework's relayer takes 500 events at a "
        f"time without a pause, does not sign, posts one after the other, and has {number(MESSAGES_OF_PEERS)} of them.",
        ("", "messages/s", "to bare posts", "processor time of the process, µs per message"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(to(ones, relayed[LIMIT])),
                spread([one.processor_time for one in ones]),
            )
            for name, ones in relayed.items()
        ],
        targets,
    )


async def _posted(port: str) -> Carried:
    async with program((sys.executable, "-m", "bench.programs.posting"), {}) as sender:
        await sender.asked(f"{port} 0 {WARM_UP}")
        took, processor_time = map(float, (await sender.asked(f"{port} {WARM_UP} {MESSAGES}")).split())
        return Carried(MESSAGES / took, processor_time * 1e6 / MESSAGES)


async def relay(contender: Contender, database: Database) -> Carried:
    messages = MESSAGES if contender.name == OURS else MESSAGES_OF_PEERS
    async with contender.emitting() as emitter:
        await contender.clear(database)
        async with contender.working(tell_every=1) as relay:
            await emitter.asked(f"emit {WARM_UP}")
            await contender.emptied(database)
            await emitter.asked(f"hold {messages}")
            return await _emptied(contender, database, emitter, relay, messages)


async def _emptied(
    contender: Contender, database: Database, emitter: Program, relay: Program, messages: int
) -> Carried:
    began, processor_time = time.monotonic(), relay.processor_time
    emitter.say("commit")
    await emitter.heard()
    await contender.emptied(database)
    took = time.monotonic() - began
    return Carried(messages / took, (relay.processor_time - processor_time) * 1e6 / messages)


def ours(database: Database, port: str, table: str = "outbox_over_http") -> Contender:
    contender = contenders.ours(database, table)
    return replace(
        contender,
        worker=(sys.executable, "-m", "outbox", "relay", "--log-level", LOG_LEVEL),
        environment={**contender.environment, "OUTBOX_TRANSPORT": _url(port), "OUTBOX_WEBHOOK_SECRETS": SECRET},
    )


def _url(port: str) -> str:
    return f"http://127.0.0.1:{port}/"
