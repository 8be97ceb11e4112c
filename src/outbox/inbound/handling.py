"""Handling: one delivery, from decoding to settling."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.backoff import DATABASE, Outage
from outbox.core.dead_letter import clean
from outbox.core.errors import LeaseLost, Reject, Undecodable, described
from outbox.core.events import Handled, LeaseWasLost, Observer, Unsettled
from outbox.core.listener import Listener
from outbox.core.loops import ABANDONED, was_abandoned
from outbox.core.message import follow
from outbox.core.retry import RetryPolicy
from outbox.core.settlement import Settlement
from outbox.core.transport import Delivery
from outbox.inbound import inbox
from outbox.inbound.invocation import Invocation
from outbox.inbound.on_error import OnErrorInvocation
from outbox.inbound.threads import ThreadTimeout

Redaction = Callable[[str], str]

NOT_STARTED_PAUSE = timedelta(seconds=1)

_DONE, _DONE_IN_TRANSACTION = Done(), Done(in_transaction=True)


class Handling:
    """Runs one listener and says how each attempt ended."""

    def __init__(
        self,
        listener: Listener,
        call: Invocation,
        *,
        retry_policy: RetryPolicy,
        redact_error: Redaction,
        observe: Observer,
        on_error: OnErrorInvocation | None = None,  # if the listener has one
    ) -> None:
        self._listener = listener
        self._call = call
        self._retry_policy = retry_policy
        self._redact_error = redact_error
        self._observe = observe
        self._on_error = on_error
        self._sessions = Outage(f"session for {listener.queue}", DATABASE, observe)

    @property
    def can_be_cut(self) -> bool:
        """Whether a run ends when it is cancelled: the thread of a plain function goes on."""
        return self._call.arguments.is_async

    async def check(self) -> None:
        """Refuse what cannot work before any message is touched."""
        await self._call.check_session()

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None:
        """Every delivery ends in exactly one outcome, whatever the listener or the message does. Runs as a task.

        A refusal is an error from before the listener could be called: the attempt has failed with it.
        """
        attempt = delivery.attempt
        follow(attempt.message.tracking_ids)
        began = time.monotonic()
        error: BaseException | None = None
        outcome: Outcome
        if attempt.crash_count >= self._listener.max_crashes:
            outcome = Dead(Reason.CRASHED, f"its worker died or lost its lease {attempt.crash_count} times")
        else:
            try:
                if refusal is not None:
                    raise refusal
                await self._call(delivery)
                outcome = self._done(delivery)
                self._sessions.over()
            except KeyboardInterrupt:
                raise
            except BaseException as raised:  # noqa: BLE001 - a listener may raise anything
                error = None if isinstance(raised, inbox.AlreadyHandled) else raised
                outcome = await self._outcome_of(raised, delivery)
        if delivery.is_lost and isinstance(error, ThreadTimeout):
            await error.end()  # its message waits for that
        landed = partial(self._landed, delivery, outcome, error, time.monotonic() - began)
        delivery.settle(outcome).then(landed)
        if isinstance(error, ThreadTimeout):
            await error.end()  # the slot is free when the thread is

    def _done(self, delivery: Delivery) -> Outcome:
        if self._call.in_transaction and delivery.completion() is not None:
            return _DONE_IN_TRANSACTION
        return _DONE

    async def _outcome_of(self, error: BaseException, delivery: Delivery) -> Outcome:
        if delivery.is_lost:
            return Released()  # it comes again whatever happened, and `on_error` would be asked for each time
        outcome = await self._usual_outcome_of(error, delivery)
        match outcome:
            case Dead(reason=Reason.EXPIRED | Reason.UNDECODABLE):
                return outcome  # no attempt: its listener was not called
            case Dead() if was_abandoned(error):
                return outcome  # the worker ends, and waits for no `on_error`
            case RetryIn() | Dead() if self._on_error is not None:
                return await self._on_error.outcome(error, delivery, outcome)
            case _:
                return outcome

    async def _usual_outcome_of(self, error: BaseException, delivery: Delivery) -> Outcome:
        match error:
            case inbox.AlreadyHandled():
                return _DONE
            case inbox.NotStarted() | inbox.CommitUnknown():
                return await self._nobodys_attempt(error)
            case inbox.TooOld():
                return Dead(Reason.EXPIRED, str(error))
            case Undecodable():
                return Dead(Reason.UNDECODABLE, self._text(error))
            case Reject():
                return Dead(Reason.REJECTED, self._text(error))
            case LeaseLost():
                return Released(inbox.LEASE_LOST_PAUSE)
            case asyncio.CancelledError() if ABANDONED in error.args:
                delivery.settle(Released())  # the worker gives up on this listener; another worker may try
                raise error
            case _:  # a cancellation that is not ours is the listener's own doing, or of something it called
                return self._failed(delivery.attempt, error)

    async def _nobodys_attempt(self, error: inbox.NotStarted | inbox.CommitUnknown) -> Outcome:
        """The database is away or its pool empty: hold the slot for a moment, then let anybody try."""
        cause = error.__cause__ or error
        self._sessions.struck(cause, NOT_STARTED_PAUSE)
        await asyncio.sleep(NOT_STARTED_PAUSE.total_seconds())
        return Released()

    def _failed(self, attempt: Attempt, error: BaseException) -> Outcome:
        text = self._text(error)
        try:
            delay = self._retry_policy.delay(attempt.attempt_count, error)
        except Exception as policy_error:  # noqa: BLE001 - the user's function decides
            return Dead(Reason.EXHAUSTED, f"retry_delays raised {type(policy_error).__name__}; the failure was: {text}")
        return Dead(Reason.EXHAUSTED, text) if delay is None else RetryIn(delay, text)

    def _landed(
        self, delivery: Delivery, outcome: Outcome, error: BaseException | None, seconds: float, landing: Settlement
    ) -> None:
        queue, attempt = self._listener.queue, delivery.attempt
        if landing.cancelled():
            return  # the transport is gone, and with it the hold on the message
        if landing.result() and not isinstance(error, LeaseLost):
            self._observe(Handled(queue, attempt, outcome, timedelta(seconds=seconds), error))
        elif delivery.lease is None and not landing.result():
            self._observe(Unsettled(queue, attempt, outcome))
        else:
            starts = attempt.attempt_count + attempt.crash_count
            self._observe(LeaseWasLost(_phase(outcome), attempt.id, queue, starts))

    def _text(self, error: BaseException) -> str:
        """What is stored of an error: its words first, then where it came from."""
        try:
            words = described(error)
            frames = "".join(traceback.format_tb(error.__traceback__)[-8:])
            text = f"{words}\n\n{frames}" if frames and not isinstance(error, Undecodable) else words
            return clean(self._redact_error(clean(text)))
        except Exception as failure:  # noqa: BLE001 - what could not be written or redacted is not shown
            return f"{type(error).__name__} (its text could not be had: {type(failure).__name__})"


def _phase(outcome: Outcome) -> str:
    match outcome:
        case RetryIn():
            return "retry"
        case Released():
            return "completion"
        case _:
            return "terminal"
