"""Claims: messages that were claimed together, as deliveries whose outcomes are written together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Executable

from outbox.core.attempt import Attempt, Outcome
from outbox.core.backoff import Backoff
from outbox.core.settlement import Settlement
from outbox.core.store import Lease, QueueClaim, Rows, Suspected
from outbox.core.transport import Delivery

WRITE_TOGETHER_WITHIN = 0.02  # seconds that an outcome waits for others to be written with it
WRITE_AGAIN = 0.1, 5.0  # seconds between two tries to write outcomes, doubling: the lease decides how long it matters
OUTCOMES_WITHIN = 5.0  # seconds that closing waits for outcomes to be written
SHUTDOWN_TIMEOUT = 8.0  # seconds more for those that a silent database holds up


class DatabaseDelivery(Delivery):
    """It ends with the batch in which it was claimed, or in its listener's transaction."""

    __slots__ = ("_batch",)

    is_lost = False  # its lease tells, when its end is written

    def __init__(self, attempt: Attempt, batch: ClaimedBatch) -> None:
        self.attempt = attempt
        self._batch = batch

    def completion(self) -> tuple[Executable, Rows]:
        return self._batch.claim.completion(self.attempt)

    def conclude(self, connection: Connection, outcome: Outcome) -> bool:
        return self._batch.claim.conclude(connection, self.attempt, outcome)

    @property
    def lease(self) -> Lease:
        return self._batch.claim.lease_on(self.attempt)

    @property
    def claim(self) -> QueueClaim:
        return self._batch.claim

    async def start(self) -> DatabaseDelivery | None:
        return self if await self._batch.claim.start(self.attempt) else None

    async def settled(self) -> None:
        await self._batch.written.wait()

    def settle(self, outcome: Outcome) -> Settlement:
        return self._batch.settle(self.attempt.id, outcome)


class ClaimedBatch:
    """A claim, or the part of it that is suspected."""

    def __init__(
        self,
        claim: QueueClaim,
        attempts: Sequence[Attempt],
        settled: Callable[[int], None],
        cannot_write: Callable[[Exception, float], None],
    ) -> None:
        self.claim = claim
        self.attempts = attempts
        self._settled = settled
        self._cannot_write = cannot_write
        self._open = {attempt.id for attempt in attempts}
        self._outcomes: dict[int, Outcome] = {}
        self._settlements: dict[int, Settlement] = {}
        self.written = asyncio.Event()  # all of them, or they never will be
        self._some = asyncio.Event()
        self._all = asyncio.Event()
        self._closing = False

    def settle(self, id: int, outcome: Outcome) -> Settlement:
        """Note an outcome; the settlement tells whether it was written."""
        settlement = Settlement()
        if id not in self._open or id in self._settlements:
            settlement.cancel()
            return settlement
        self._outcomes[id] = outcome
        self._settlements[id] = settlement
        self._some.set()
        if len(self._outcomes) == len(self._open):
            self._all.set()
        return settlement

    async def write(self) -> None:
        """Write outcomes as they come, until there are none to come."""
        while self._open and not (self._closing and not self._outcomes):
            await self._some.wait()
            if not self._closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WRITE_TOGETHER_WITHIN):
                        await self._all.wait()
            self._some.clear()
            outcomes, self._outcomes = self._outcomes, {}
            if outcomes:
                self._written(outcomes, await self._try(outcomes))

    def close(self) -> None:
        """Expect no more outcomes."""
        self._closing = True
        self._some.set()
        self._all.set()

    def end(self) -> None:
        """Nothing is written any more: tasks that wait for an outcome to land go on."""
        self._open.clear()
        self.written.set()
        for settlement in self._settlements.values():
            settlement.cancel()

    async def _try(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        again = Backoff(WRITE_AGAIN[1], WRITE_AGAIN[0])
        while True:
            try:
                return await self.claim.settle(outcomes)
            except Exception as error:
                if self._closing:
                    raise
                # The database is away, or refuses. Every write is fenced, so trying again can do no harm.
                pause = again.pause()
                self._cannot_write(error, pause)
                await asyncio.sleep(pause)

    def _written(self, outcomes: Mapping[int, Outcome], lost: frozenset[int]) -> None:
        self._open -= outcomes.keys()
        self._settled(len(outcomes))
        for id in outcomes:
            self._settlements.pop(id).set_result(id not in lost)


class OpenClaims:
    """No more than one of their messages is a suspected poison message.

    Of two, the one that kills its worker again would count against the other.
    """

    def __init__(self, announce: Callable[..., None]) -> None:
        self._announce = announce
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: set[ClaimedBatch] = set()
        self._suspected: ClaimedBatch | None = None
        self._waiting: set[str] = set()  # queues that may have suspected messages, which cannot be taken yet

    def start(self, holding: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(holding, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def wanted(self, queue: str) -> Suspected:
        """Whether a suspected message may be claimed; if not, the queue is notified when one may."""
        if self._suspected is None:
            return Suspected.ONE
        self._waiting.add(queue)
        return Suspected.NONE

    def hold_suspected(self, batch: ClaimedBatch, queue: str) -> bool:
        """Whether this is the only one, until it is settled."""
        if self.wanted(queue) is Suspected.NONE:
            return False
        self._suspected = batch
        return True

    @contextmanager
    def batch(self, batch: ClaimedBatch) -> Iterator[None]:
        self._batches.add(batch)
        try:
            yield
        finally:
            self._batches.discard(batch)
            batch.end()
            if batch is self._suspected:
                self._suspected = None
                waiting, self._waiting = self._waiting, set()
                self._announce(*waiting)

    async def close(self) -> None:
        for batch in self._batches:
            batch.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=OUTCOMES_WITHIN)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUTDOWN_TIMEOUT)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a claim that could not be written runs out: later, not lost
