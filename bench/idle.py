"""Idle: what a worker takes of a processor while nothing happens."""

from __future__ import annotations

import asyncio

from bench import contenders
from bench.database import Database
from bench.report import Report, at_most, spread
from bench.settings import Settings
from bench.turns import in_turns

LISTENERS = (1, 20)
CALM = 10.0  # seconds until a worker has come to rest
SECONDS = 30.0


async def measure(database: Database, settings: Settings) -> Report:
    shares = await in_turns(LISTENERS, settings.rounds, lambda count: idle(database, count))
    return Report(
        "Idle",
        f"Processor time of a worker process without messages, in percent of one core, over {SECONDS:.0f} seconds.",
        ("listeners", "% of a core"),
        [(name, spread(values)) for name, values in shares.items()],
        [
            at_most(f"idle: a worker with listeners: {count}", 1, shares[str(count)], unit=" %", aim=count > 1)
            for count in LISTENERS
        ],
    )


async def idle(database: Database, listeners: int) -> float:
    """Percent of one core."""
    contender = contenders.ours(database)
    async with contender.emitting() as emitter:
        await contender.clear(database)
        async with contender.working(tell_every=1, BENCH_LISTENERS=str(listeners)) as worker:
            await emitter.asked("emit 1")
            await worker.heard()
            await asyncio.sleep(CALM)
            before = worker.processor_time
            await asyncio.sleep(SECONDS)
            return (worker.processor_time - before) / SECONDS * 100
