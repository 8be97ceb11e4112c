"""Publishing: batches on their way to the transport, and the answers to them, which are settled as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.durations import NO_DELAY
from outbox.core.errors import TransportUnavailable
from outbox.core.events import LeaseWasLost, Observer, Relayed
from outbox.core.loops import cancelled_from_outside
from outbox.core.retry import RetryPolicy
from outbox.core.store import Claim, Feed, Selection
from outbox.core.transport import Published, Refusal, Transport
from outbox.outbound.circuit import Breaker, Passage
from outbox.outbound.relay import Sending

SETTLE_WITHIN = 0.1  # seconds that an answer waits for others before it is written

Judge = Callable[[Attempt, Refusal], Outcome | None]  # what a refusal means; none: it is given back at the end
Write = Callable[[Mapping[int, Outcome]], Awaitable[None]]

_DONE = Done()


class Settling:
    """The end of a claim, in as many parts as its answers come in. What has no answer stays under its lease."""

    def __init__(self, claim: Claim, took: Callable[[], None], judge: Judge, write: Write) -> None:
        self._took = took  # called when anything was confirmed
        self._judge = judge
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._waiting = {attempt.message.id: attempt for attempt in claim.attempts}
        self._copies: dict[str, list[Attempt]] = {}  # of messages that a claim holds more than once
        if len(self._waiting) < len(claim.attempts):
            self._find_copies(claim.attempts)
        self._spared: list[Attempt] = []  # answered, and given back all the same
        self._unwritten: dict[int, Outcome] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self.answered = False  # whether the destination said anything at all

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cut off, it writes the answers that it has; the claim gives the others back."""
        await self._no_more_parts()
        if kind is not None:
            with suppress(Exception):  # then their leases run out
                await self._write_unwritten()

    @property
    def waiting(self) -> list[str]:
        """The ids of messages without an answer."""
        return list(self._waiting)

    def report(self, published: Published) -> None:
        """Take answers, whenever they come."""
        self._take(published)
        self._write_soon()

    async def finish(self, rest: Outcome) -> None:
        """No more answers will come: write what is left, and how it goes on for messages that got none."""
        await self._no_more_parts()
        left = [each for id, attempt in self._waiting.items() for each in (attempt, *self._copies.get(id, ()))]
        self._unwritten.update((attempt.id, rest) for attempt in (*left, *self._spared))
        self._waiting.clear()
        self._spared.clear()
        await self._write_unwritten()

    def _take(self, published: Published) -> None:
        self.answered = self.answered or published.answered
        waiting, unwritten, left = self._waiting, self._unwritten, len(self._waiting)
        for id in published.confirmed:
            attempt = waiting.pop(id, None)
            if attempt is not None:
                unwritten[attempt.id] = _DONE
                if self._copies:
                    unwritten.update((copy.id, _DONE) for copy in self._copies.get(id, ()))
        if len(waiting) < left:
            self._took()
        for id, refusal in published.refused.items():
            attempt = waiting.pop(id, None)
            if attempt is not None:
                self._refuse((attempt, *self._copies.get(id, ())), refusal)

    def _refuse(self, attempts: Sequence[Attempt], refusal: Refusal) -> None:
        for attempt in attempts:
            outcome = self._judge(attempt, refusal)
            if outcome is None:
                self._spared.append(attempt)
            else:
                self._unwritten[attempt.id] = outcome

    def _find_copies(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if self._waiting[attempt.message.id] is not attempt:
                self._copies.setdefault(attempt.message.id, []).append(attempt)

    def _write_soon(self) -> None:
        if self._unwritten and self._timer is None and self._writing is None:
            self._timer = self._loop.call_later(SETTLE_WITHIN, self._begin_part)

    def _begin_part(self) -> None:
        self._timer = None
        self._writing = self._loop.create_task(self._write_part(), name="outbox settlement")

    async def _write_part(self) -> None:
        part = dict(self._unwritten)
        try:
            await self._write_unwritten()
        except Exception:  # noqa: BLE001 - it is tried again, at last at the end, and there an error counts
            self._unwritten = part | self._unwritten
        self._writing = None
        self._write_soon()

    async def _write_unwritten(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        if unwritten:
            await self._write(unwritten)

    async def _no_more_parts(self) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


DEADLINE = 30.0  # seconds after which a publish that has not answered is in doubt

LONGEST_RETRY_AFTER = timedelta(hours=1)  # whatever a destination asks for


class Publisher:
    """Claim, commit, publish, settle: no transaction is open while the transport is spoken to."""

    def __init__(
        self,
        feed: Feed,
        transport: Transport,
        *,
        batch_size: int,
        lease: timedelta,
        retry_policy: RetryPolicy,
        observe: Observer,
        destination: str | None = None,  # whose messages it takes; none: those that were not routed
        breaker: Breaker | None = None,  # what relays share about the destination, if they do
    ) -> None:
        self._feed = feed
        self._transport = transport
        self._largest = batch_size
        self.batch_size = batch_size  # of the last round
        self.asked = True  # whether the last round asked the store for messages
        self._lease = lease
        self._retry_policy = retry_policy
        self._observe = observe
        self._destination = destination
        self._breaker = breaker
        self._answered_at = float("-inf")  # when the transport last told of an answer, by the loop's clock

    async def round(self, sending: Sending = lambda count: None) -> int:
        """Publish one batch; how many messages it held. `sending` is called when they are handed over."""
        if self._breaker is None:
            return await self._openly(sending)
        async with self._breaker.passage() as passage:
            return await self._guarded(self._breaker, passage, sending)

    async def wait(self, longest: float) -> None:
        """Sleep until there may be something to publish, and a destination that takes it."""
        held = 0.0 if self._breaker is None else self._breaker.held()
        if held:
            await asyncio.sleep(held)
        else:
            longest = longest if self._breaker is None else self._breaker.patience(longest)
            await self._feed.wait(longest, destination=self._destination)

    async def _openly(self, sending: Sending) -> int:
        async with self._claim(self._largest) as claim:
            if not claim.attempts:
                return 0
            sending(len(claim.attempts))
            async with self._settling(claim) as settling:
                published = await self._publish(claim.attempts, settling)
                settling.report(published)
                await settling.finish(Released())
        if not settling.answered and (published.asked or not published.refused):
            raise self._nothing(claim.attempts, published)
        return len(claim.attempts)

    async def _guarded(self, breaker: Breaker, passage: Passage, sending: Sending) -> int:
        """The same where relays tell each other that no answer comes. A round without one counts as empty."""
        self.batch_size = max(1, min(self._largest, passage.room))
        self.asked = passage.room > 0
        if not self.asked:
            return 0
        async with self._claim(self.batch_size) as claim:
            if not claim.attempts or not await breaker.passes(passage):
                return 0  # what was claimed is given back
            sending(len(claim.attempts))
            async with self._settling(claim, breaker, passage) as settling:
                try:
                    published = await self._publish(claim.attempts, settling)
                    error = self._nothing(claim.attempts, published)
                except TransportUnavailable as unavailable:
                    published, error = Published(), unavailable
                settling.report(published)
                alone = len(claim.attempts) == 1
                if settling.answered:
                    if passage.refusal:
                        await breaker.answered(passage)  # before anything that was refused is given back
                    await settling.finish(Released(passage.pause if alone else NO_DELAY))
                elif not published.asked and published.refused:
                    # Nothing could be sent, so nothing is known of the destination: another message probes it.
                    await settling.finish(Released())
                    await breaker.unused(passage)
                    return len(claim.attempts)
                elif not published.asked and not passage.probing:
                    return 0  # what was claimed is given back
                else:
                    # Another message goes first next time: this one may be what its destination cannot bear.
                    ids = [attempt.message.id for attempt in claim.attempts]
                    await settling.finish(Released(await breaker.failed(passage, str(error), ids)))
                    return 0
        await breaker.answered(passage)
        return len(claim.attempts)

    def _claim(self, limit: int) -> AbstractAsyncContextManager[Claim]:
        return self._feed.claim(Selection(limit=limit, lease=self._lease, destination=self._destination))

    def _nothing(self, attempts: Sequence[Attempt], published: Published) -> TransportUnavailable:
        why = f": {published.silence}" if published.silence else ""
        return TransportUnavailable(f"{self._transport.name} confirmed nothing of {len(attempts)} messages{why}")

    def _settling(self, claim: Claim, breaker: Breaker | None = None, passage: Passage | None = None) -> Settling:
        def took() -> None:
            if breaker is not None and passage is not None:
                breaker.took(passage)

        def judge(attempt: Attempt, refusal: Refusal) -> Outcome | None:
            if breaker is None or passage is None or not refusal.unspecific:
                return self._outcome(attempt, refusal)
            return None if breaker.spares(passage, refusal.error) else self._outcome(attempt, refusal)

        async def write(outcomes: Mapping[int, Outcome]) -> None:
            lost = await claim.settle(outcomes)
            self._tell(claim.attempts, outcomes, lost)
            if breaker is not None and passage is not None and settling.answered:
                with suppress(Exception):  # it is told again at the end
                    await breaker.answered(passage)

        settling = Settling(claim, took, judge, write)
        return settling

    async def _publish(self, attempts: Sequence[Attempt], settling: Settling) -> Published:
        """What the transport says within the deadline. It sees each message id once, whatever the claim held."""
        messages = list({attempt.message.id: attempt.message for attempt in attempts}.values())
        now = asyncio.get_running_loop().time
        began = now()

        def report(published: Published) -> None:
            if published.answered:
                self._answered_at = now()
            settling.report(published)

        try:
            async with asyncio.timeout(DEADLINE):
                published = await self._transport.publish(messages, report)
        except TimeoutError:
            if self._answered_at <= began:
                return Published()
            # Answers came to other messages meanwhile, so this is about those that got none.
            silence = Refusal(f"{self._transport.name} gave no answer within {DEADLINE:g} s, and answered others")
            return Published(refused=dict.fromkeys(settling.waiting, silence))
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return Published()  # the client library's own end, not ours: everything is in doubt
        if not isinstance(published, Published):
            raise TypeError(f"publish() of {self._transport.name} returned {type(published).__name__}, not Published")
        if published.answered:
            self._answered_at = now()
        return published

    def _outcome(self, attempt: Attempt, refusal: Refusal) -> Outcome:
        if refusal.permanent:
            return Dead(Reason.REFUSED, refusal.error)
        try:
            delay = self._retry_policy.delay(attempt.attempt_count, RefusedError(refusal.error))
        except Exception as error:  # noqa: BLE001 - the application's function decides, and other messages wait for it
            text = f"retry_delays raised {type(error).__name__}; the refusal was: {refusal.error}"
            return Dead(Reason.EXHAUSTED, text)
        if delay is None:
            return Dead(Reason.EXHAUSTED, refusal.error)
        asked = min(refusal.retry_after or NO_DELAY, LONGEST_RETRY_AFTER)
        return RetryIn(max(delay, asked), refusal.error)

    def _tell(self, attempts: Sequence[Attempt], outcomes: Mapping[int, Outcome], lost: frozenset[int]) -> None:
        for attempt in attempts:
            outcome = outcomes.get(attempt.id)
            if attempt.id in lost:
                count = attempt.attempt_count + attempt.crash_count
                self._observe(LeaseWasLost("terminal", attempt.id, self._destination, count))
            elif outcome is not None and type(outcome) is not Released:
                self._observe(Relayed(attempt, outcome, self._destination))


class RefusedError(Exception):
    """What a retry policy is asked about when a destination refused a message."""
