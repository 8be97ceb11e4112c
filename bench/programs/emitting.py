"""Emitting: a program that writes messages as it is told to on stdin, through whatever library it is given.

hold N          write N messages in one transaction, and say so
commit          commit it
emit N          write N messages, a hundred in each transaction
each N          write N messages, one transaction after the other, and say how many seconds that took
pace RATE N     write N messages, each in a transaction of its own, so many a second; say when each was committed
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from bench.programs.payload import body

IN_ONE_TRANSACTION = 100


class Emitter(Protocol):
    """How a library writes messages."""

    def transaction(self) -> AbstractAsyncContextManager[Any]: ...

    async def emit(self, session: Any, bodies: Sequence[dict[str, int | str]]) -> None: ...

    async def analyze(self, session: Any) -> None: ...


async def obey(emitter: Emitter) -> None:
    """Do what stdin says, until it ends."""
    numbers = itertools.count()
    say("ready")
    while words := (await told()).split():
        match words:
            case ["hold", count]:
                await hold(emitter, take(numbers, int(count)))
            case ["emit", count]:
                await emit(emitter, take(numbers, int(count)))
            case ["each", count]:
                await each(emitter, take(numbers, int(count)))
            case ["pace", rate, count]:
                await pace(emitter, float(rate), take(numbers, int(count)))
            case _:
                raise SystemExit(f"not understood: {' '.join(words)}")


async def hold(emitter: Emitter, bodies: Sequence[dict[str, int | str]]) -> None:
    async with emitter.transaction() as session:
        await emitter.emit(session, bodies)
        # Otherwise the planner believes in an empty table until autovacuum happens to come by.
        await emitter.analyze(session)
        say("held")
        await told()
    say("committed")


async def emit(emitter: Emitter, bodies: Sequence[dict[str, int | str]]) -> None:
    for start in range(0, len(bodies), IN_ONE_TRANSACTION):
        async with emitter.transaction() as session:
            await emitter.emit(session, bodies[start : start + IN_ONE_TRANSACTION])
    say("emitted")


async def each(emitter: Emitter, bodies: Sequence[dict[str, int | str]]) -> None:
    begun = time.monotonic()
    for one in bodies:
        async with emitter.transaction() as session:
            await emitter.emit(session, [one])
    say(str(time.monotonic() - begun))


async def pace(emitter: Emitter, rate: float, bodies: Sequence[dict[str, int | str]]) -> None:
    moments: dict[int | str, int] = {}

    async def one(body: dict[str, int | str]) -> None:
        async with emitter.transaction() as session:
            await emitter.emit(session, [body])
            moments[body["number"]] = time.monotonic_ns()

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index, each in enumerate(bodies):
            await asyncio.sleep(max(0.0, begun + index / rate - time.monotonic()))
            group.create_task(one(each))
    say(json.dumps(moments))


def take(numbers: itertools.count[int], count: int) -> list[dict[str, int | str]]:
    return [body(number) for number in itertools.islice(numbers, count)]


async def told() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def say(text: str) -> None:
    print(text, flush=True)
