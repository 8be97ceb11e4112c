"""Batches: deliveries in lists, of as many as are there at a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outbox.core.attempt import Outcome, Released
from outbox.core.body import Decoder
from outbox.core.settlement import Settlement
from outbox.core.store import Lease
from outbox.core.transport import Consumer, Delivery


class Batch(Delivery):
    """Deliveries that a listener gets as a list. To their holder they are like one."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries = deliveries
        self.attempt = deliveries[0].attempt  # it stands for all

    @property
    def raw(self) -> object:
        return [delivery.raw for delivery in self.deliveries]

    @property
    def is_lost(self) -> bool:
        return all(delivery.is_lost for delivery in self.deliveries)

    async def start(self) -> Batch | None:
        """One that is isolated comes alone."""
        [delivery] = self.deliveries
        started = await delivery.start()
        return None if started is None else Batch([started])

    async def settled(self) -> None:
        for delivery in self.deliveries:
            await delivery.settled()

    def settle(self, outcome: Outcome) -> Settlement:
        """The same end for all that have none yet."""
        return [delivery.settle(outcome) for delivery in self.deliveries][-1]


class Batches(Consumer):
    """What a transport delivers, in lists. A list is not waited for until it is full.

    What failed before comes alone, and so does what may have killed its worker: it would take others with it.
    """

    def __init__(self, deliveries: Consumer, most: int) -> None:
        self._deliveries = deliveries
        self._most = most
        self._kept: Delivery | None = None  # to come alone, after those that were taken before it

    async def __anext__(self) -> Batch:
        return self.take() or self._with_others(await anext(self._deliveries))

    def take(self) -> Batch | None:
        """What is there, if anything is."""
        first, self._kept = self._kept, None
        if first is None:
            first = self._deliveries.take()
        return None if first is None else self._with_others(first)

    def _with_others(self, first: Delivery) -> Batch:
        batch = [first]
        while not _comes_alone(first) and len(batch) < self._most and (delivery := self._deliveries.take()) is not None:
            if _comes_alone(delivery):
                self._kept = delivery
                break
            batch.append(delivery)
        return Batch(batch)

    async def aclose(self) -> None:
        """Give back what was not taken."""
        if self._kept is not None:
            self._kept.settle(Released())
        await self._deliveries.aclose()


class Part:
    """A delivery with its body as the listener wants it; raises Undecodable."""

    def __init__(self, delivery: Delivery, decode: Decoder) -> None:
        self.delivery = delivery
        self._decode = decode
        self._unused = [self._decoded()]

    def body(self) -> Any:
        """Another one for each call: a listener may have changed the last."""
        return self._unused.pop() if self._unused else self._decoded()

    def _decoded(self) -> Any:
        return self._decode(self.delivery.attempt.message.body)


class Together(Batch):
    """What one call of a listener is about."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__([part.delivery for part in parts])
        self.parts = parts  # what the listener gets: those that were handled before are taken out
        self.failures: Mapping[int, Exception] = {}  # by their positions among the parts

    @property
    def message_ids(self) -> list[str]:
        return [part.delivery.attempt.message.id for part in self.parts]

    @property
    def is_under_leases(self) -> bool:
        """Whether it is the database that delivers them."""
        return self.deliveries[0].lease is not None

    @property
    def leases(self) -> list[Lease]:
        """What the database holds them by."""
        return [lease for part in self.parts if (lease := part.delivery.lease) is not None]

    def report(self, returned: object) -> None:
        """Take what the listener returned: nothing, or the errors of single messages by their positions."""
        self.failures = {}  # it may have been called before, in a transaction that was undone
        if returned is None:
            return
        if not isinstance(returned, Mapping):
            raise TypeError(f"the listener returned a {type(returned).__name__}: {_EXPECTED}")
        for position, error in returned.items():
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(self.parts):
                raise TypeError(f"the listener returned a failure at {position!r} of {len(self.parts)}: {_EXPECTED}")
            if not isinstance(error, Exception):
                raise TypeError(f"the listener returned {type(error).__name__} as a failure: {_EXPECTED}")
        self.failures = returned


_EXPECTED = "nothing, or a dict of positions in its list with the exception of each, is expected"


def _comes_alone(delivery: Delivery) -> bool:
    attempt = delivery.attempt
    return attempt.attempt_count > 1 or attempt.crash_count > 0 or attempt.isolated
