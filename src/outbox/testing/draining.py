"""Draining: relays and runs listeners, one message after another, until nothing is left. Delays pass at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta

from outbox.core.dead_letter import DeadLetter, DeadLetters
from outbox.core.durations import NO_DELAY, Seconds, as_delay
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener, check_listeners
from outbox.core.loops import ABANDONED, give_up
from outbox.core.transport import Delivery, Transport
from outbox.inbound.threads import Threads
from outbox.inbound.worker import CANCELLED_ENDS_WITHIN
from outbox.instance import Outbox
from outbox.lifecycle import open_store
from outbox.outbound.relay import Round
from outbox.testing.clock import advance
from outbox.testing.report import Drained, NotDrained, Tally
from outbox.testing.sources import DueSource, MemorySource, Rest, StoredSource, StoreSource
from outbox.testing.sql import may_write, sql_store

AT_MOST = 1000  # attempts
WITHIN = 60.0  # seconds of real time
MOMENT = timedelta(milliseconds=1)  # added to the next delay, because databases round
PAGE = 500  # dead letters


async def drain(
    outbox: Outbox,
    listeners: Sequence[Listener] = (),
    *,
    raise_errors: bool = False,  # raise the first exception of a listener instead of going on
    ahead: Seconds | None = None,  # how far the clock may be moved; none: as far as it takes
    at_most: int = AT_MOST,  # attempts, after which there seems to be no end
    within: float = WITHIN,  # seconds of real time, likewise
) -> Drained:
    """Do what relays and workers would do, until no message is left; the clock is moved instead of waiting."""
    transport = outbox.transport
    _check(transport, listeners)
    tally = Tally()
    async with AsyncExitStack() as stack:
        stack.enter_context(outbox._parts.observe.joined_by(tally))
        await stack.enter_async_context(outbox._lifecycle.at_work(outbox._parts))
        if outbox.engines.configured:
            await may_write(outbox.store)
            await open_store(outbox._parts, transport)
        stack.push_async_callback(transport.close)
        await transport.open()
        if transport.routes:
            await outbox._parts.relays.bind(transport)
        if listeners:
            await transport.declare(listeners)
        if stored := [listener for listener in listeners if listener.store_first]:
            await outbox.store.queues.bind([listener.binding for listener in stored])
        threads = Threads(max(1, len(listeners)))
        stack.callback(threads.shutdown)
        draining = Draining(outbox, listeners, threads, tally, at_most=at_most, within=within)
        return await draining.run(raise_errors, None if ahead is None else as_delay(ahead, what="ahead"))


class Draining:
    """One call of `drain`."""

    def __init__(
        self,
        outbox: Outbox,
        listeners: Sequence[Listener],
        threads: Threads,
        tally: Tally,
        *,
        at_most: int,
        within: float,
    ) -> None:
        transport = outbox.transport
        self._outbox = outbox
        self._handlings = {listener: outbox._parts.workers.handling(listener, threads) for listener in listeners}
        self._queues = [listener.queue for listener in listeners]
        self._tally = tally
        self._at_most = at_most
        self._within = within
        self._until = time.monotonic() + within
        self._taken = 0
        self._passed = NO_DELAY
        self._buried: dict[DeadLetters, int] = {}
        self._memory = transport if transport.features.consumes and not transport.features.in_store else None
        self._rest: Rest | None = None
        self._rounds: list[Round] = []
        if outbox.engines.configured:
            routes = [route.name for route in transport.routes]
            self._rest = Rest(sql_store(outbox.store), [*self._queues, *routes])
            self._rounds = outbox._parts.relays.rounds(transport)

    async def run(self, raise_errors: bool, ahead: timedelta | None) -> Drained:
        """Do everything that is due, then move the clock to what is due next, until there is no next."""
        self._buried = {dead_letters: await _last_id(dead_letters) for dead_letters in self._dead_letters()}
        while True:
            await self._everything_due(raise_errors)
            pause = await self._until_next_due()
            if pause is None or (ahead is not None and self._passed + pause > ahead):
                return await self._drained()
            self._check_limits()
            if pause:
                await advance(self._outbox, pause + MOMENT)
                self._passed += pause + MOMENT

    async def _everything_due(self, raise_errors: bool) -> None:
        busy = True
        while busy:
            busy = False
            for forward in self._rounds:
                while await forward.round():
                    busy = True
                    self._check_limits()
            for listener in self._handlings:
                while await self._one(listener, raise_errors):
                    busy = True

    async def _one(self, listener: Listener, raise_errors: bool) -> bool:
        """Handle one delivery, if there is one."""
        failures = len(self._tally.errors)
        async with self._source(listener).taken(listener) as delivery:
            if delivery is None:
                return False
            self._check_limits()
            await self._handle(listener, delivery)
        if raise_errors and len(self._tally.errors) > failures:
            raise self._tally.errors[failures]
        return True

    def _source(self, listener: Listener) -> DueSource:
        if self._memory is None:
            return StoreSource(sql_store(self._outbox.store))
        return (
            StoredSource(self._memory, sql_store(self._outbox.store))
            if listener.store_first
            else MemorySource(self._memory)
        )

    async def _handle(self, listener: Listener, delivery: Delivery) -> None:
        """Run the listener in a task of its own, as a worker does."""
        self._taken += 1
        handling = asyncio.create_task(self._handlings[listener].handle(delivery))
        try:
            await asyncio.wait([handling], timeout=self._seconds_left())
        finally:
            if not handling.done():
                give_up(handling, ABANDONED)
                await asyncio.wait([handling], timeout=CANCELLED_ENDS_WITHIN)
        if handling.cancelled() or not handling.done():
            raise self._not_drained(f"the listener of {listener.queue!r} did not end within {self._within:g} s")
        handling.result()

    async def _until_next_due(self) -> timedelta | None:
        pauses: list[timedelta | None] = []
        if self._rest is not None:
            pauses.append(await self._rest.until_next_due(self._unroutable()))
        if self._memory is not None:
            pauses.append(self._memory.until_next_due(self._queues))
        return min((pause for pause in pauses if pause is not None), default=None)

    def _unroutable(self) -> Collection[str]:
        """Messages that no binding matches, where the store does not know it."""
        return self._tally.refused if self._memory is not None else ()

    def _check_limits(self) -> None:
        attempts = self._taken + (0 if self._memory is not None else self._tally.refusals)
        if attempts >= self._at_most:
            raise self._not_drained(f"{attempts} attempts were made and there is more to do")
        if not self._seconds_left():
            raise self._not_drained(f"there is more to do after {self._within:g} s")

    def _seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _not_drained(self, what: str) -> NotDrained:
        tally = self._tally
        error = NotDrained(
            f"{what}; {tally.most_tried()}. Give listeners retry_delays that end, or let drain() go on for longer with "
            "at_most= or within=",
            Drained(
                handled=tally.handled,
                retried=tally.retried,
                dead=tally.dead,
                passed=self._passed,
                errors=tuple(tally.errors),
                attempts=tuple(tally.attempts),
            ),
        )
        error.__cause__ = tally.trouble
        return error

    async def _drained(self) -> Drained:
        tally, transport = self._tally, self._outbox.transport
        unroutable = left = 0
        if self._rest is not None:
            unroutable, left = await self._rest.count(self._unroutable())
        if self._memory is not None:
            left += self._memory.waiting()
        dead = [letter for each, last in self._buried.items() async for letter in _behind(each, last)]
        return Drained(
            handled=tally.handled,
            retried=tally.retried,
            dead=len(dead),
            unroutable=unroutable,
            sent=0 if transport.features.consumes else tally.sent,
            left=left,
            passed=self._passed,
            errors=tuple(tally.errors),
            attempts=tuple(tally.attempts),
            dead_letters=tuple(dead),
        )

    def _dead_letters(self) -> list[DeadLetters]:
        """Those of the relay, and those of queues."""
        found: list[DeadLetters] = [] if self._rest is None else [self._outbox.store.dead_letters]
        of_queues = self._outbox.transport.dead_letters
        return found if of_queues is None or of_queues in found else [*found, of_queues]


def _check(transport: Transport, listeners: Sequence[Listener]) -> None:
    if listeners:
        check_listeners(listeners)
    if transport.features.consumes and not transport.features.movable_clock:
        raise ConfigurationError(
            f"the transport {transport.name!r} has its own clock, which cannot be moved: drain an outbox without "
            'a transport, or with transport="memory://"'
        )


async def _last_id(dead_letters: DeadLetters) -> int:
    last = 0
    async for letter in _behind(dead_letters, last):
        last = letter.id
    return last


async def _behind(dead_letters: DeadLetters, last: int) -> AsyncIterator[DeadLetter]:
    """The dead letters with a greater id."""
    while page := await dead_letters.list(limit=PAGE, after=last):
        for letter in page:
            yield letter
        last = page[-1].id
