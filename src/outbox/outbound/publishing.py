"""Publisher: claims stored messages, hands them to a transport, and settles each by the transport's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.cancellation import cancelled_from_outside
from outbox.core.durations import NO_DELAY
from outbox.core.errors import TransportUnavailable
from outbox.core.events import LeaseWasLost, Observer, Relayed
from outbox.core.retry import RetryPolicy
from outbox.core.store import Store
from outbox.core.transport import Published, Transport

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
    ) -> None:
        self._store = store
        self._transport = transport
        self.batch_size = batch_size
        self._lease = lease
        self._retry_policy = retry_policy
        self._observe = observe

    async def round(self) -> int:
        """Publish one batch; how many messages it held."""
        async with self._store.claim(self.batch_size, lease=self._lease) as claim:
            if not claim.attempts:
                return 0
            published = await self._publish(claim.attempts)
            outcomes = {attempt.id: self._outcome(attempt, published) for attempt in claim.attempts}
            lost = await claim.settle(outcomes)
            self._tell(claim.attempts, outcomes, lost)
        if not published.confirmed and not published.refused:
            raise TransportUnavailable(f"{self._transport.name} confirmed nothing of {len(claim.attempts)} messages")
        return len(claim.attempts)

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

    def _outcome(self, attempt: Attempt, published: Published) -> Outcome:
        if attempt.message.id in published.confirmed:
            return _DONE
        refusal = published.refused.get(attempt.message.id)
        if refusal is None:
            return Released()  # in doubt: it is published again, and burns no attempt
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
                self._observe(LeaseWasLost("terminal", attempt.id, None, attempt.attempt_count + attempt.crash_count))
            elif not isinstance(outcomes[attempt.id], Released):
                self._observe(Relayed(attempt, outcomes[attempt.id]))


class RefusedError(Exception):
    """What a retry policy is asked about when a destination refused a message."""
