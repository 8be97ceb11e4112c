"""Snapshot: how much of the throughput is left while another session holds an old snapshot open."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench import contenders
from bench.database import Database
from bench.processes import PATIENCE, Program
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

TELL_EVERY = 100
AT_ONCE = 500  # messages that the emitter is asked for
ON_THE_WAY = 2_000  # messages that may wait
WARM_UP = 5.0  # seconds
WINDOW = 20.0  # seconds: the end, when most is dead


@dataclass(frozen=True)
class Way:
    name: str
    seconds: float
    old_snapshot: bool


WITHOUT = Way("without", 30.0, old_snapshot=False)
WITH = Way("with an old snapshot", 120.0, old_snapshot=True)


@dataclass(frozen=True)
class Flow:
    """Messages a second: all the time, and at the end of it."""

    rate: float
    last_rate: float

    def __str__(self) -> str:
        return f"{number(self.rate)} messages/s, {number(self.last_rate)} at the end"


async def measure(database: Database, settings: Settings) -> Report:
    flows = await in_turns([WITHOUT, WITH], settings.rounds, lambda way: flow(database, way), lambda way: way.name)
    without = [one.rate for one in flows[WITHOUT.name]]
    rates = {name: ratios([one.rate for one in ones], without) for name, ones in flows.items()}
    last = {name: ratios([one.last_rate for one in ones], without) for name, ones in flows.items()}
    return Report(
        "Old snapshot",
        f"Messages a second from emit to the last settled row, one emitter and one worker, at most "
        f"{number(ON_THE_WAY)} on the way; for {WITHOUT.seconds:.0f} seconds without, and for {WITH.seconds:.0f} "
        "seconds with a session beside them that began a repeatable read and does nothing more.",
        ("", "messages/s", "to without", f"in the last {WINDOW:.0f} s", "to without"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(rates[name]),
                spread([one.last_rate for one in ones]),
                spread(last[name]),
            )
            for name, ones in flows.items()
        ],
        [at_least(f"old snapshot: throughput over {WITH.seconds:.0f} s, to without", 0.5, rates[WITH.name])],
    )


async def flow(database: Database, way: Way) -> Flow:
    contender = contenders.ours(database)
    async with AsyncExitStack() as stack:
        emitter = await stack.enter_async_context(contender.emitting())
        await contender.clear(database)
        worker = await stack.enter_async_context(contender.working(tell_every=TELL_EVERY))
        stream = Stream(emitter, worker)
        await stream.run(WARM_UP)
        if way.old_snapshot:
            await stack.enter_async_context(database.old_snapshot())
        first = await stream.run(way.seconds - WINDOW)
        last = await stream.run(WINDOW)
    return Flow((first + last) / way.seconds, last / WINDOW)


class Stream:
    """Messages from an emitter to a worker, never too many at once."""

    def __init__(self, emitter: Program, worker: Program) -> None:
        self._emitter = emitter
        self._worker = worker
        self._emitted = 0
        self._handled = 0
        self._more = asyncio.Event()

    async def run(self, seconds: float) -> int:
        """Flow for a time; how many messages were handled."""
        before, end = self._handled, time.monotonic() + seconds
        listening = asyncio.create_task(self._listen())
        while time.monotonic() < end:
            if self._emitted - self._handled < ON_THE_WAY:
                await self._emitter.asked(f"emit {AT_ONCE}")
                self._emitted += AT_ONCE
            else:
                self._more.clear()
                async with asyncio.timeout(PATIENCE):
                    await self._more.wait()
        listening.cancel()
        await asyncio.wait([listening])
        return self._handled - before

    async def _listen(self) -> None:
        while True:
            self._handled = int((await self._worker.heard()).split()[0])
            self._more.set()
