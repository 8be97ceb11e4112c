"""Relay: runs rounds until it is told to stop, several at once for a publisher; the router's round gives queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from outbox.core.backoff import DATABASE, TRANSPORT, Backoff, ErrorBackoff, Outage, RestartDelay
from outbox.core.errors import ClosedForGood, TransportUnavailable
from outbox.core.events import Observer, Routed, Troubled, Unroutable
from outbox.core.store import Leased, Routing, Store, Wanted
from outbox.core.transport import Offer, Takers

SIDE_BY_SIDE = 4  # rounds that are open at once
STUCK = 0.1  # seconds that a batch which is not full may wait for its answers before the next round begins

Sending = Callable[[int], None]  # called once when a round has claimed so much and hands it over


class RoundOfBatches(Protocol):
    """A round that spends most of its time waiting for answers."""

    @property
    def batch_size(self) -> int: ...

    async def round(self, sending: Sending) -> int:
        """How much of a batch there was."""
        ...


class Rounds:
    """At most so many rounds at once, each in a task of its own, which gives back or settles what it claimed.

    The next round begins when the last one has ended, has claimed a whole batch, or has waited long for answers. After
    a whole batch all of them claim at once, until one finds less. An error of a round that goes on beside others is
    raised with the next round; one that began before an error that was raised already is no news.
    """

    def __init__(self, work: RoundOfBatches, most: int = SIDE_BY_SIDE) -> None:
        self._work = work
        self._most = most
        self._open: dict[asyncio.Task[int], int] = {}  # with the number of errors that were raised before it began
        self._errors = 0
        self.answered = False  # whether the destination answered the last round that is known to have ended
        self._whole = False  # whether the last claim was a whole batch
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """What has begun is finished, unless the relay is cancelled."""
        if kind is not None and not issubclass(kind, Exception):
            self._cancel()
        try:
            await self._until_all_ended()
        except asyncio.CancelledError:
            self._cancel()
            await self._until_all_ended()
            raise

    @property
    def full(self) -> bool:
        return len(self._open) >= self._most

    @property
    def ending(self) -> tuple[asyncio.Event, ...]:
        """What is set when a round ends that went on in the background: it may have given messages back."""
        return (self._ended,) if self._open else ()

    async def one_ended(self) -> None:
        """Wait for a place."""
        await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)

    async def next(self) -> int:
        """Run a round until the next one may begin; how much it claimed."""
        self._ended.clear()
        for ended in [each for each in self._open if each.done()]:
            self._end(ended)
        loop = asyncio.get_running_loop()
        passed: asyncio.Future[int] = loop.create_future()
        claimed = 0

        def sending(count: int) -> None:
            nonlocal claimed
            claimed = count
            self._whole = count >= self._work.batch_size
            if self._whole:
                _pass(passed, count)
            else:
                loop.call_later(STUCK, _pass, passed, count)

        def ended_now(round: asyncio.Task[int]) -> None:
            self._whole = self._whole and bool(claimed)
            if passed.done():
                self._ended.set()
            _pass(passed, 0)

        round = loop.create_task(self._work.round(sending), name="outbox round")
        self._open[round] = self._errors
        round.add_done_callback(ended_now)
        if self._whole:
            passed.set_result(self._work.batch_size)
        count = await passed
        return self._end(round) if round.done() else count

    def errors(self) -> list[Exception]:
        """Of rounds that ended after the last one began."""
        found = [round.exception() for round in self._open if not round.cancelled()]
        return [error for error in found if isinstance(error, Exception)]

    def _end(self, round: asyncio.Task[int]) -> int:
        errors = self._open.pop(round)
        try:
            count = round.result()
            self.answered = count > 0
            return count
        except Exception as error:
            self.answered = False
            self._whole = False  # the next round shows whether claiming works, before others begin beside it
            if errors < self._errors and not isinstance(error, ClosedForGood):
                return 0
            self._errors += 1
            raise

    def _cancel(self) -> None:
        for round in self._open:
            round.cancel()

    async def _until_all_ended(self) -> None:
        if self._open:
            await asyncio.wait(self._open)
        self.errors()  # retrieved, so that the event loop does not log them


def _pass(passed: asyncio.Future[int], count: int) -> None:
    if not passed.done():
        passed.set_result(count)


SHORTEST_TROUBLE, LONGEST_TROUBLE = 0.2, 30.0  # seconds of pause after an error, doubling
LONGEST_AWAY = 2.0  # seconds of pause while the destination is away: nothing was asked of it, so asking costs nothing


class Round(Protocol):
    """One batch of a relay's work: a router's or a publisher's."""

    @property
    def batch_size(self) -> int: ...

    @property
    def asked(self) -> bool:
        """Whether the last round asked the store for anything: if not, it has shown nothing about the database."""
        ...

    async def round(self) -> int:
        """How much of a batch there was."""
        ...


class Relay:
    """Runs rounds: at once while batches are full, then at a growing pace, sooner when it is woken."""

    def __init__(
        self,
        work: Round,
        *,
        wait: Callable[[float], Awaitable[None]],
        poll_interval: float,
        observe: Observer,
        name: str,
        destination: str | None = None,  # the route, where there are several
        back: Callable[[], Awaitable[None]] | None = None,  # waits for a destination that is away
        restart_delay: RestartDelay | None = None,
        rounds: Rounds | None = None,  # of the same work, where one may begin while others wait for answers
    ) -> None:
        self._work = work
        self._rounds = rounds
        self._wait = wait
        self._back = back
        self._pace = Backoff(poll_interval)
        self._trouble = ErrorBackoff(LONGEST_TROUBLE, SHORTEST_TROUBLE, restart_delay)
        self._observe = observe
        self._name = name
        self._database = Outage(name, DATABASE, observe)
        self._destination = Outage(name, destination or TRANSPORT, observe)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. A round that has begun is finished."""
        async with nullcontext() if self._rounds is None else self._rounds:
            await self._rounds_until(stop)
        for error in () if self._rounds is None else self._rounds.errors():
            self._observe(Troubled(self._name, error, timedelta(0)))

    async def _rounds_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                taken = await self._next(stop)
                if taken:
                    self._pace.reset()
                if self._rounds is not None and self._rounds.answered:
                    self._destination.over()
                if not self._is_busy(taken):
                    ending = () if self._rounds is None else self._rounds.ending
                    await unless(stop, self._wait(self._pace.pause()), *ending)
                if self._work.asked:
                    self._trouble.reset()
                    self._database.over()
            except ClosedForGood:
                raise
            except Exception as error:  # noqa: BLE001 - a relay outlives whatever its database or broker throws
                away = isinstance(error, TransportUnavailable)
                pause = self._trouble.pause(error, LONGEST_AWAY if away else None)
                (self._destination if away else self._database).struck(error, timedelta(seconds=pause))
                await unless(stop, asyncio.sleep(pause))
                if away and self._back is not None:
                    await unless(stop, self._back())

    def _is_busy(self, taken: int) -> bool:
        """Whether the next round begins at once.

        A batch that was not full left nothing behind. But while a publisher waits for answers more is committed, and
        notifications are spaced: the next claim finds it sooner. A router's rounds are short.
        """
        return taken >= self._work.batch_size or (taken > 0 and self._rounds is not None)

    async def _next(self, stop: asyncio.Event) -> int:
        if self._rounds is None:
            return await self._work.round()
        if self._rounds.full:
            await unless(stop, self._rounds.one_ended())
            if stop.is_set():
                return 0
        return await self._rounds.next()


async def unless(stop: asyncio.Event, sleep: Awaitable[None], *events: asyncio.Event) -> None:
    """Sleep, but not past a stop, nor past other events."""
    sleeping = asyncio.timeout(None)

    async def wake(event: asyncio.Event) -> None:
        await event.wait()
        if not sleeping.expired():
            sleeping.reschedule(0)

    waking = [asyncio.ensure_future(wake(event)) for event in (stop, *events)]
    try:
        async with sleeping:
            await sleep
    except TimeoutError:
        if not sleeping.expired():
            raise
    finally:
        for each in waking:
            each.cancel()


class Router:
    """Moves messages from the outbox to the queues whose bindings match, a batch at a time.

    Beside a worker it routes no more than the worker's queues want, and those take it at once. While they want nothing
    it holds back, because it would only write rows that no worker reads: but not for long, others may wait for them.
    """

    def __init__(
        self,
        store: Store,
        takers: Takers,
        *,
        batch_size: int,
        patience: float,
        unroutable: Mapping[str, str],
        observe: Observer,
    ) -> None:
        self._store = store
        self._takers = takers
        self._largest = batch_size
        self.batch_size = batch_size  # of the last round
        self.asked = True  # whether the last round asked the store for anything
        self._patience = patience
        self._unroutable = unroutable
        self._observe = observe
        self._holding_back_since: float | None = None

    async def round(self) -> int:
        """Route one batch; how many messages it held."""
        with self._takers.offer() as offer:
            self.asked = not (self._takers.consuming and not offer.wanted and self._holds_back())
            if not self.asked:
                return 0
            self._holding_back_since = None
            wanted = sum(each.limit for each in offer.wanted.values()) or self._largest
            self.batch_size = min(self._largest, wanted)
            routing = await self._store.queues.route(self.batch_size, self._unroutable, offer.wanted)
            taken: dict[str, int] = {}
            for queue, claim in routing.claims.items():
                taken[queue] = offer.take(queue, claim)
        waiting = [queue for queue, count in routing.routed.items() if count > taken.get(queue, 0)]
        if waiting:
            self._store.queues.announce(*waiting)
        self._tell(routing)
        return routing.taken

    async def wait(self, longest: float) -> None:
        """Sleep until there may be something to route, or a queue to route it for."""
        if self._holding_back_since is None:
            await self._store.feed.wait(longest)
        else:
            await self._takers.room(longest)

    def _holds_back(self) -> bool:
        now = time.monotonic()
        if self._holding_back_since is None:
            self._holding_back_since = now
        return now - self._holding_back_since < self._patience

    def _tell(self, routing: Routing) -> None:
        for queue, count in routing.routed.items():
            self._observe(Routed(queue, count))
        for routing_key, count in routing.unroutable.items():
            self._observe(Unroutable(routing_key, count))


class _NoTakers:
    """A process without consumers: everything is routed to the table, and nothing handed over."""

    consuming = False
    wanted: Mapping[str, Wanted] = MappingProxyType({})

    def offer(self) -> AbstractContextManager[Offer]:
        return nullcontext(self)

    def take(self, queue: str, claim: Leased) -> int:
        raise AssertionError(f"no queue here is called {queue}")

    async def room(self, longest: float) -> None:
        await asyncio.sleep(longest)


NO_TAKERS = _NoTakers()
