"""Worker: takes deliveries from the transport and runs their listeners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from outbox.core.attempt import Released
from outbox.core.backoff import DATABASE, ErrorBackoff, Outage, RestartDelay
from outbox.core.durations import NO_DELAY
from outbox.core.errors import ClosedForGood
from outbox.core.events import Observer, StillRunning, Troubled
from outbox.core.listener import Listener
from outbox.core.loops import ABANDONED, LOST, cut, give_up
from outbox.core.transport import Consumer, Delivery
from outbox.inbound.batches import Batches
from outbox.inbound.concurrency import Exclusive, Slots, Start, slots_for

SHORTEST_ERROR_BACKOFF, LONGEST_ERROR_BACKOFF = 0.2, 10.0  # seconds of pause after an error, doubling
WRITTEN_WITHIN = 5.0  # seconds in which the outcome of an isolated run is written before others go on
CANCELLED_ENDS_WITHIN = 2.0  # seconds that an abandoned listener has to clean up after itself
LONG_RUN = 15 * 60.0  # seconds after which a listener that still runs is worth a warning


class DeliverySource(Protocol):
    """Where deliveries come from."""

    def consume(self, listener: Listener, prefetch: int) -> Consumer: ...


Handle = Callable[[Delivery, Exception | None], Awaitable[None]]


class Handler(Protocol):
    """What is done with each of them."""

    @property
    def can_be_cut(self) -> bool:
        """Whether a run ends when it is cancelled."""
        ...

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """A listener at work."""

    queue: str
    delivery: Delivery
    slots: Slots
    began: float
    can_be_cut: bool
    task: asyncio.Task[None] | None = None  # the loop itself holds tasks only weakly
    told: bool = False
    started: Delivery | None = None  # what an isolated run got in place of its delivery
    has_begun: bool = False  # a task that is cancelled before would never give its slot back
    was_cut: bool = False

    @property
    def is_lost(self) -> bool:
        return (self.started or self.delivery).is_lost


class Worker:
    """Serves listeners until it is told to stop, then lets the running ones end."""

    def __init__(
        self,
        source: DeliverySource,
        handlings: Mapping[Listener, Handler],
        *,
        prefetch: int,
        grace: timedelta,
        observe: Observer,
        watches: bool = True,  # whether a listener that runs for very long is told
        restart_delay: RestartDelay | None = None,
    ) -> None:
        self._watches = watches
        self._source = source
        self._handlings = handlings
        self._prefetch = prefetch
        self._grace = grace
        self._observe = observe
        self._restart_delay = restart_delay
        self._running: set[_Run] = set()
        self._exclusive = Exclusive()

    async def run(self, stop: asyncio.Event, abandon: asyncio.Event) -> int:
        """Work until `stop`; how many listeners were abandoned: `abandon` or the end of the grace came first."""
        serving = [asyncio.create_task(self._serve(listener)) for listener in self._handlings]
        if self._watches:
            serving.append(asyncio.create_task(self._watch()))
        stopping = asyncio.create_task(stop.wait())
        try:
            try:
                await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end([stopping, *serving])
                self._exclusive.stop()
        except asyncio.CancelledError:
            abandon.set()  # a caller that cancels does not want to wait
            raise
        finally:
            abandoned = await self._let_end(abandon)
        for task in serving:
            if task.done() and not task.cancelled():
                task.result()  # raises what ended the worker: its transport is closed for good
        return abandoned

    async def _serve(self, listener: Listener) -> None:
        """Take deliveries for one listener; after an error, take them anew."""
        backoff = ErrorBackoff(LONGEST_ERROR_BACKOFF, SHORTEST_ERROR_BACKOFF, self._restart_delay)
        outage = Outage(f"worker of {listener.queue}", DATABASE, self._observe)
        slots = slots_for(listener, self._starting(listener))
        while True:
            try:
                await self._take(listener, slots, backoff, outage)
            except ClosedForGood:
                raise
            except Exception as error:  # noqa: BLE001 - a worker outlives whatever its transport throws
                pause = backoff.pause(error)
                outage.struck(error, timedelta(seconds=pause))
                await asyncio.sleep(pause)

    async def _take(self, listener: Listener, slots: Slots, backoff: ErrorBackoff, outage: Outage) -> None:
        deliveries = self._source.consume(listener, self._prefetch)
        deliveries.on_lost = self._cut
        if listener.batch is not None:
            deliveries = Batches(deliveries, listener.batch)
        try:
            if not slots.free:
                await slots.one_free()
            delivery = await anext(deliveries)
            backoff.reset()
            outage.over()
            while True:
                slots.take(delivery)
                if not slots.free:
                    await slots.one_free()
                delivery = await anext(deliveries)
        finally:
            slots.give_back()
            await deliveries.aclose()

    def _starting(self, listener: Listener) -> Start:
        queue, handling = listener.queue, self._handlings[listener]
        handle, can_be_cut = handling.handle, handling.can_be_cut
        create_task = asyncio.get_running_loop().create_task

        def start(slots: Slots, delivery: Delivery, refusal: Exception | None) -> None:
            run = _Run(queue, delivery, slots, time.monotonic(), can_be_cut)
            if delivery.attempt.isolated:
                running = self._run_alone(run, handle, delivery, refusal)
            elif self._exclusive.is_kept:
                self._exclusive.wait(partial(start, slots, delivery, refusal), partial(_give_back, slots, delivery))
                return
            else:
                self._exclusive.begin()
                running = self._run_beside(run, handle, refusal)
            self._running.add(run)
            run.task = create_task(running)

        return start

    async def _run_beside(self, run: _Run, handle: Handle, refusal: Exception | None) -> None:
        """A task of its own for each delivery: what a listener leaves in its context is gone with it."""
        run.has_begun = True
        try:
            if run.delivery.is_lost:  # while it waited for its lane, or for a run that had the process to itself
                run.delivery.settle(Released())
            else:
                await handle(run.delivery, refusal)
        except asyncio.CancelledError:
            if not run.was_cut:
                raise
            run.delivery.settle(Released())  # unless it has an end
        except Exception as error:  # noqa: BLE001 - a fault of ours, not the listener's
            run.delivery.settle(Released())  # without an end it would be held for ever
            self._observe(Troubled(f"handling of {run.delivery.attempt.message.id}", error, timedelta(0)))
        finally:
            self._exclusive.end()
            self._running.discard(run)
            run.slots.release(run.delivery)

    async def _run_alone(self, run: _Run, handle: Handle, delivery: Delivery, refusal: Exception | None) -> None:
        """The run that could end as `crashed` has the process to itself, until its outcome is written."""
        run.has_begun = True
        started: Delivery | None = None
        pause: timedelta | None = None
        try:
            async with self._exclusive.alone() as pause:
                if pause is None and (started := await delivery.start()) is not None:
                    run.started = started
                    await handle(started, refusal)
                    await _written(started)
        except Exception as error:  # noqa: BLE001 - the database is away, or a fault of ours
            self._observe(Troubled(f"isolated run of {run.delivery.attempt.message.id}", error, timedelta(0)))
        finally:
            (started or delivery).settle(Released(pause or NO_DELAY))  # unless it has an end
            self._running.discard(run)
            run.slots.release(run.delivery)

    def _cut(self) -> None:
        """Some deliveries are lost and come again. Runs of theirs make room, but for threads, which cannot be ended."""
        for run in self._running:
            if run.can_be_cut and run.has_begun and not run.was_cut and run.task is not None and run.is_lost:
                run.was_cut = True
                cut(run.task, LOST)

    async def _watch(self) -> None:
        """Say once of each listener that it runs for very long: the next thing it meets is a broker's own limit."""
        while True:
            await asyncio.sleep(LONG_RUN / 15)
            now = time.monotonic()
            for run in self._running:
                if not run.told and now - run.began > LONG_RUN:
                    run.told = True
                    self._observe(StillRunning(run.queue, run.delivery.attempt, timedelta(seconds=now - run.began)))

    async def _let_end(self, abandon: asyncio.Event) -> int:
        if not self._running:
            return 0
        abandoning = asyncio.create_task(abandon.wait())
        ending = asyncio.ensure_future(asyncio.wait(self._tasks()))
        try:
            await asyncio.wait(
                [abandoning, ending], timeout=self._grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await _end([abandoning, ending])
            left = self._tasks()
            for run in self._running:
                run.can_be_cut = False  # it is told once
            for task in left:
                give_up(task, ABANDONED)
            if left:
                await asyncio.wait(
                    left, timeout=CANCELLED_ENDS_WITHIN
                )  # one that does not heed its cancellation is left behind
        return len(left)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [run.task for run in self._running if run.task is not None]


def _give_back(slots: Slots, delivery: Delivery) -> None:
    delivery.settle(Released())
    slots.release(delivery)


async def _written(delivery: Delivery) -> None:
    """Wait until the outcome is written: a crash of another message before that would count against this one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITTEN_WITHIN):
            await delivery.settled()


async def _end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel, and wait for the end: but not for ever, because a database that is silent does not answer."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting, timeout=CANCELLED_ENDS_WITHIN)
