"""Latency: from the commit to the listener's first line, at a rate that nobody finds hard."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from bench import contenders
from bench.contenders import Contender
from bench.database import Database
from bench.report import Report, at_most, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

RATE = 200  # messages a second
MESSAGES = 2_000
WARM_UP = 100


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    p50: float
    p99: float

    def __str__(self) -> str:
        return f"p50 {number(self.p50)} ms, p99 {number(self.p99)} ms"


async def measure(database: Database, settings: Settings) -> Report:
    everybody = [contenders.ours(database), *settings.peers(database)]
    found = await in_turns(everybody, settings.rounds, lambda each: latency(each, database), lambda each: each.name)
    ours = [one.p50 for one in found["outbox"]]
    targets = []
    if "faststream-outbox" in found:
        to_peer = ratios(ours, [one.p50 for one in found["faststream-outbox"]])
        targets.append(at_most("latency: p50, to that of faststream-outbox", 0.8, to_peer))
    return Report(
        "Latency",
        f"Milliseconds from asking for the commit to the start of the listener, for {number(MESSAGES)} messages at "
        f"{RATE} a second, each in a transaction of its own, with emitter and worker in two processes.",
        ("", "p50", "p99"),
        [(name, spread([one.p50 for one in ones]), spread([one.p99 for one in ones])) for name, ones in found.items()],
        targets,
    )


async def latency(contender: Contender, database: Database, rate: int = RATE, messages: int = MESSAGES) -> Latency:
    async with contender.emitting() as emitter:
        await contender.clear(database)
        async with contender.working(tell_every=1) as worker:
            emitter.say(f"emit {WARM_UP}")
            for _ in range(WARM_UP):
                await worker.heard()
            await emitter.heard()
            emitter.say(f"pace {rate} {messages}")
            started = dict([(await worker.heard()).split()[1:] for _ in range(messages)])
            committed = json.loads(await emitter.heard())
    taken = [(int(started[number]) - moment) / 1e6 for number, moment in committed.items()]
    percentiles = statistics.quantiles(taken, n=100)
    return Latency(percentiles[49], percentiles[98])
