"""Publisher: claims stored messages, hands them to a transport, and settles each by the transport's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.cancellation import cancelled_from_outside
from outbox.core.durations import NO_DELAY
from outbox.core.errors import TransportUnavailable
from outbox.core.events import LeaseWasLost, Observer, Relayed
from outbox.core.retry import RetryPolicy
from outbox.core.store import Claim, Store
from outbox.core.transport import Published, Transport
from outbox.outbound.circuit import Breaker, Passage

DEADLINE = 30.0  # seconds after which a publish that has not answered is in doubt
SIDE_BY_SIDE = 4  # batches under way while there is more than one: two are sent, one comes, one is written

LONGEST_RETRY_AFTER = timedelta(hours=1)  # whatever a destination asks for

_DONE = Done()


class Publisher:
    """Claim, commit, publish, settle: no transaction is open while the transport is spoken to."""

    def __init__(
        self,
        store: Store,
        transport: Transport,
        *,
        batch_size: int,
        lease: timedelta,
        retry_policy: RetryPolicy,
        observe: Observer,
        destination: str | None = None,  # whose messages it takes; none: those that were not routed
        breaker: Breaker | None = None,  # what relays share about the destination, if they do
    ) -> None:
        self._store = store
        self._transport = transport
        self._largest = batch_size
        self.batch_size = batch_size  # of the last round
        self._lease = lease
        self._retry_policy = retry_policy
        self._observe = observe
        self._destination = destination
        self._breaker = breaker

    async def round(self) -> int:
        """Publish one batch; how many messages it held."""
        if self._breaker is None:
            return await self._openly()
        async with self._breaker.passage() as passage:
            return await self._guarded(self._breaker, passage)

    async def wait(self, longest: float) -> None:
        """Sleep until there may be something to publish, and somebody to take it."""
        held = 0.0 if self._breaker is None else self._breaker.held()
        if held:
            await asyncio.sleep(held)
        else:
            longest = longest if self._breaker is None else self._breaker.patience(longest)
            await self._store.wait(longest, destination=self._destination)

    async def _openly(self) -> int:
        async with self._claim(self._largest) as claim:
            if not claim.attempts:
                return 0
            published = await self._publish(claim.attempts)
            await self._settle(claim, published)
        if not published.answered:
            raise self._nothing(claim.attempts, published)
        return len(claim.attempts)

    async def _guarded(self, breaker: Breaker, passage: Passage) -> int:
        """The same where relays tell each other that no answer comes. A round without one counts as empty."""
        self.batch_size = max(1, min(self._largest, passage.room))
        if not passage.room:
            return 0
        async with self._claim(self.batch_size) as claim:
            if not claim.attempts or not await breaker.passes(passage):
                return 0  # what was claimed is given back
            try:
                published = await self._publish(claim.attempts)
                error = self._nothing(claim.attempts, published)
            except TransportUnavailable as unavailable:
                published, error = Published(), unavailable
            if published.answered:
                await self._settle(claim, published)
            elif not published.asked and not passage.probing:
                return 0  # what was claimed is given back
            else:
                # Another message goes first next time: this one may be what its destination cannot bear.
                await self._settle(claim, published, await breaker.failed(passage, str(error)))
                return 0
        await breaker.answered(passage)
        return len(claim.attempts)

    def _claim(self, limit: int) -> AbstractAsyncContextManager[Claim]:
        return self._store.claim(limit, lease=self._lease, destination=self._destination)

    def _nothing(self, attempts: Sequence[Attempt], published: Published) -> TransportUnavailable:
        why = f": {published.silence}" if published.silence else ""
        return TransportUnavailable(f"{self._transport.name} confirmed nothing of {len(attempts)} messages{why}")

    async def _settle(self, claim: Claim, published: Published, pause: timedelta = NO_DELAY) -> None:
        outcomes = {attempt.id: self._outcome(attempt, published, pause) for attempt in claim.attempts}
        lost = await claim.settle(outcomes)
        self._tell(claim.attempts, outcomes, lost)

    async def _publish(self, attempts: Sequence[Attempt]) -> Published:
        """What the transport says within the deadline. It sees each message id once, whatever the claim held."""
        messages = list({attempt.message.id: attempt.message for attempt in attempts}.values())
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._transport.publish(messages)
        except TimeoutError:
            return Published()
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return Published()  # the client library's own end, not ours: everything is in doubt

    def _outcome(self, attempt: Attempt, published: Published, pause: timedelta) -> Outcome:
        if attempt.message.id in published.confirmed:
            return _DONE
        refusal = published.refused.get(attempt.message.id)
        if refusal is None:
            return Released(pause)  # in doubt: it is published again, and burns no attempt
        if refusal.permanent:
            return Dead(Reason.REFUSED, refusal.error)
        delay = self._retry_policy.delay(attempt.attempt_count, RefusedError(refusal.error))
        if delay is None:
            return Dead(Reason.EXHAUSTED, refusal.error)
        asked = min(refusal.retry_after or NO_DELAY, LONGEST_RETRY_AFTER)
        return RetryIn(max(delay, asked), refusal.error)

    def _tell(self, attempts: Sequence[Attempt], outcomes: Mapping[int, Outcome], lost: frozenset[int]) -> None:
        for attempt in attempts:
            if attempt.id in lost:
                count = attempt.attempt_count + attempt.crash_count
                self._observe(LeaseWasLost("terminal", attempt.id, self._destination, count))
            elif not isinstance(outcomes[attempt.id], Released):
                self._observe(Relayed(attempt, outcomes[attempt.id], self._destination))


class RefusedError(Exception):
    """What a retry policy is asked about when a destination refused a message."""
