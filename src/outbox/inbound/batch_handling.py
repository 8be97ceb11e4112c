"""BatchHandling: a list of deliveries, from decoding to settling each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from outbox.core.attempt import Dead, Done, Outcome, Reason, Released
from outbox.core.errors import Undecodable
from outbox.core.events import Troubled
from outbox.core.loops import ABANDONED, LOST
from outbox.core.transport import Delivery
from outbox.inbound import inbox
from outbox.inbound.batch_arguments import BatchArguments
from outbox.inbound.batch_inbox import Apart
from outbox.inbound.batches import Batch, Part, Together
from outbox.inbound.handling import Handling
from outbox.inbound.threads import ThreadTimeout
from outbox.inbound.transaction_guard import TransactionEnded

# These say nothing about any message.
_OF_NO_MESSAGE = (inbox.AlreadyHandled, inbox.NotStarted, inbox.CommitUnknown)


class BatchHandling(Handling):
    """Runs a listener that takes lists, and says of each message how its attempt ended."""

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None:
        """Every delivery ends in exactly one outcome, whatever happens to the others. Runs as a task."""
        assert isinstance(delivery, Batch)  # noqa: S101 - a worker takes nothing else for this listener
        try:
            left = [part for each in delivery.deliveries if (part := self._part(each)) is not None]
            while left:
                together, left = _without_copies(left)
                await self._together(together)
        except BaseException:
            delivery.settle(Released())  # whatever has no end yet
            raise

    def _part(self, delivery: Delivery) -> Part | None:
        """What the listener can be called with; otherwise it is dead alone."""
        crashes = delivery.attempt.crash_count
        arguments = self._call.arguments
        assert isinstance(arguments, BatchArguments)  # noqa: S101 - the listener takes lists
        if crashes >= self._listener.max_crashes:
            self._end(delivery, Dead(Reason.CRASHED, f"its worker died or lost its lease {crashes} times"))
            return None
        try:
            return arguments.part(delivery)
        except Undecodable as error:
            self._end(delivery, Dead(Reason.UNDECODABLE, self._text(error)), error)
            return None

    async def _together(self, parts: Sequence[Part]) -> None:
        """One call for all of them. If it raises, the message at fault is not known, and each is called alone."""
        began = time.monotonic()
        together = Together(parts)
        if together.is_lost:
            await self._end_all(together, asyncio.CancelledError(LOST), began)  # while another part ran
            return
        error = await self._raised_by(together)
        if error is None:
            self._sessions.over()
            await self._end_well(together, began)
        elif isinstance(error, Apart):
            for part, its_own in error.errors.items():
                await self._end_by(part.delivery, its_own, began)
            rest = [part for part in parts if part not in error.errors]
            if rest:
                await self._together(rest)
        elif len(parts) > 1 and _may_be_one_messages(error) and not together.is_lost:
            self._tell(together, error)
            for part in parts:
                await self._together([part])
        else:
            await self._end_all(together, error, began)

    async def _raised_by(self, together: Together) -> BaseException | None:
        try:
            await self._call(together)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a listener may raise anything
            return error
        return None

    async def _end_well(self, together: Together, began: float) -> None:
        done = Done(in_transaction=self._call.in_transaction and together.is_under_leases)
        failed = {together.parts[position].delivery: error for position, error in together.failures.items()}
        for delivery in together.deliveries:
            if delivery not in failed:
                self._end(delivery, done, None, began)
        for delivery, error in failed.items():
            await self._end_by(delivery, error, began)

    async def _end_by(self, delivery: Delivery, error: BaseException, began: float) -> None:
        outcome = await self._outcome_of(error, delivery)
        self._end(delivery, outcome, _told(error), began)

    async def _end_all(self, together: Together, error: BaseException, began: float) -> None:
        if together.is_lost and isinstance(error, ThreadTimeout):
            await error.end()  # their messages wait for that
        if isinstance(error, _OF_NO_MESSAGE):
            outcome = await self._outcome_of(error, together)
            for delivery in together.deliveries:
                self._end(delivery, outcome, _told(error), began)
        else:
            for delivery in together.deliveries:
                await self._end_by(delivery, error, began)
        if isinstance(error, ThreadTimeout):
            await error.end()  # the slot is free when the thread is

    def _tell(self, together: Together, error: BaseException) -> None:
        where = f"{len(together.deliveries)} messages of {self._listener.queue} together"
        self._observe(Troubled(where, error, timedelta(0)))

    def _end(
        self, delivery: Delivery, outcome: Outcome, error: BaseException | None = None, began: float | None = None
    ) -> None:
        seconds = 0.0 if began is None else time.monotonic() - began
        delivery.settle(outcome).then(partial(self._landed, delivery, outcome, error, seconds))


def _may_be_one_messages(error: BaseException) -> bool:
    """Whether trying each message alone may tell whose fault it was.

    The thread of a plain function that ran out of time goes on, with all of them: no listener is called beside it. And
    what a listener has committed by itself, a further call would repeat.
    """
    if isinstance(error, asyncio.CancelledError) and ABANDONED in error.args:
        return False
    return not isinstance(error, (ThreadTimeout, TransactionEnded, *_OF_NO_MESSAGE))


def _told(error: BaseException) -> BaseException | None:
    return None if isinstance(error, inbox.AlreadyHandled) else error


def _without_copies(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Each message once, and its further copies: what becomes of those is known when the first has its end."""
    first: dict[str, Part] = {}
    copies = [part for part in parts if first.setdefault(part.delivery.attempt.message.id, part) is not part]
    return list(first.values()), copies
