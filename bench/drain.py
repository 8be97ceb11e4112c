"""Drain: how fast one worker process empties a queue with a listener that does nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench import contenders
from bench.contenders import Contender
from bench.database import Database
from bench.processes import Program
from bench.report import Report, Target, at_least, at_most, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

MESSAGES = 20_000
TELL_EVERY = 100  # also how many messages warm a worker up


@dataclass(frozen=True)
class Drained:
    """Messages a second, and the worker's processor time for one, in microseconds."""

    rate: float
    processor_time: float

    def __str__(self) -> str:
        return f"{number(self.rate)} messages/s, {number(self.processor_time)} µs each"


async def measure(database: Database, settings: Settings) -> Report:
    everybody = [contenders.ours(database), contenders.delete_returning(database), *settings.peers(database)]
    drained = await in_turns(everybody, settings.rounds, lambda each: drain(each, database), lambda each: each.name)
    ours, limit, *peers = (drained[each.name] for each in everybody)
    to_limit = {name: ratios([one.rate for one in ones], [one.rate for one in limit]) for name, ones in drained.items()}
    targets = [at_least("drain: rate, to DELETE … RETURNING", 0.15, to_limit["outbox"])]
    if peers:
        better = [max(one.rate for one in ones) for ones in zip(*peers, strict=True)]
        targets.append(at_least("drain: rate, to the better peer", 2, ratios([one.rate for one in ours], better)))
    targets.append(_processor_time(ours))
    return Report(
        "Drain",
        f"{number(MESSAGES)} messages that were committed at once, routing included, until the last row is gone: one "
        "worker process, a listener that does nothing. The limit takes 500 rows of a table of the same shape with each "
        "`DELETE … RETURNING`. The peers have large batches and no logging.",
        ("", "messages/s", "to the limit", "processor time of the worker, µs per message"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(to_limit[name]),
                spread([one.processor_time for one in ones]),
            )
            for name, ones in drained.items()
        ],
        targets,
    )


async def drain(contender: Contender, database: Database) -> Drained:
    async with contender.emitting() as emitter:
        await contender.clear(database)
        async with contender.working(tell_every=TELL_EVERY) as worker:
            await emitter.asked(f"emit {TELL_EVERY}")
            await _handled(worker, TELL_EVERY)
            await contender.emptied(database)
            await emitter.asked(f"hold {MESSAGES}")
            begun, processor_time = time.monotonic(), worker.processor_time
            emitter.say("commit")
            await _handled(worker, TELL_EVERY + MESSAGES)
            await contender.emptied(database)
            took = time.monotonic() - begun
            return Drained(MESSAGES / took, (worker.processor_time - processor_time) * 1e6 / MESSAGES)


async def _handled(worker: Program, count: int) -> None:
    while int((await worker.heard()).split()[0]) < count:
        pass


def _processor_time(ours: list[Drained]) -> Target:
    return at_most(
        "drain: processor time of the worker per message", 25, [one.processor_time for one in ours], unit=" µs"
    )
