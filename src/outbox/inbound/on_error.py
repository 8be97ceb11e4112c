"""OnErrorInvocation: what a listener's `on_error` says of a failed attempt, in a transaction of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.attempt import Dead, Outcome, Reason, Released, RetryIn
from outbox.core.callables import is_async
from outbox.core.durations import NO_DELAY
from outbox.core.errors import ConfigurationError, LeaseLost, described
from outbox.core.events import Observer, Troubled
from outbox.core.listener import Listener
from outbox.core.listener_options import FailedAttempt, OnError
from outbox.core.loops import ABANDONED
from outbox.core.transport import Delivery
from outbox.inbound.inbox import LEASE_LOST_PAUSE
from outbox.inbound.invocation import ListenerSessionSource
from outbox.inbound.reruns import Reruns
from outbox.inbound.threads import Fence, ThreadTimeout, run_in_thread
from outbox.inbound.transaction_guard import TransactionEnded
from outbox.inbound.transactions import Leases, TransactionOptions, transact, transact_in_thread

Failure = RetryIn | Dead


class OnErrorInvocation:
    """Asks `on_error`, and lets what it wrote commit together with the end of the attempt where that is possible."""

    def __init__(
        self,
        listener: Listener,
        on_error: OnError,
        sessions: ListenerSessionSource,
        executor: Executor,
        reruns: Reruns,
        leases: Leases,
        *,
        limit: timedelta,
        observe: Observer,
    ) -> None:
        if is_async(on_error) != is_async(listener.callback):
            raise ConfigurationError(f"{listener.queue}: on_error and the listener are both `async def`, or neither is")
        self._queue = listener.queue
        self._on_error = on_error
        self._sessions = sessions
        self._executor = executor
        self._reruns = reruns
        self._leases = leases
        self._limit = limit
        self._observe = observe

    async def outcome(self, error: BaseException, delivery: Delivery, outcome: Failure) -> Outcome:
        """How the attempt ends. Without an answer, because `on_error` failed itself, it ends as it would have."""
        asking = _Asking(self._on_error, error, delivery, outcome)
        try:
            async with self._sessions.turn():
                await self._ask_until_it_commits(asking)
            return asking.decided
        except LeaseLost:
            return Released(LEASE_LOST_PAUSE)
        except asyncio.CancelledError as cancelled:
            if delivery.is_lost:
                return Released()
            if ABANDONED in cancelled.args:
                delivery.settle(Released())
                raise
            self._failed(cancelled)
        except ThreadTimeout as late:
            self._failed(late)
            await late.end()
            return _unrepeatable(late, outcome) if isinstance(late, TransactionEnded) else outcome
        except TransactionEnded as ended:
            self._failed(ended)
            return _unrepeatable(ended, outcome)
        except Exception as failure:  # noqa: BLE001 - the user's function may raise anything
            self._failed(failure)
        return outcome

    async def _ask_until_it_commits(self, asking: _Asking) -> None:
        rerun = self._reruns.of(asking.delivery)
        while True:
            try:
                await self._ask(asking)
                self._reruns.outage.over()
                return
            except Exception as error:
                if asking.delivery.is_lost or not await rerun.wait(error):
                    raise

    async def _ask(self, asking: _Asking) -> None:
        options = TransactionOptions(self._queue, self._sessions.store, self._limit.total_seconds())
        message = asking.delivery.attempt.message

        def around(connection: Connection) -> AbstractContextManager[None]:
            unrenewed.begin(connection)
            return asking.concluded(connection)

        def work(fence: Fence) -> None:
            transact_in_thread(self._sessions.synchronous(message), around, asking.ask_plainly, options, fence)

        async with self._leases.of(asking.delivery, self._limit) as unrenewed:
            if is_async(self._on_error):
                await transact(self._sessions.asynchronous(message), around, asking.ask, options)
            else:
                await run_in_thread(self._executor, work, self._limit)

    def _failed(self, failure: BaseException) -> None:
        self._observe(Troubled(f"on_error of {self._queue}", failure, NO_DELAY))


def _unrepeatable(ended: TransactionEnded, outcome: Failure) -> Dead:
    """What it wrote may be committed: another attempt that fails would ask, and so write, it again."""
    if isinstance(outcome, Dead):
        return outcome
    return Dead(Reason.REJECTED, f"on_error raised {described(ended)}; the failure was: {outcome.error}")


class _Asking:
    """One failed attempt, and what is decided about it."""

    def __init__(self, on_error: OnError, error: BaseException, delivery: Delivery, outcome: Failure) -> None:
        self._on_error = on_error
        self._error = error
        self._outcome = outcome
        self.delivery = delivery
        self.decided: Failure = outcome

    async def ask(self, session: AsyncSession) -> None:
        answer: Any = self._answer(session)
        self.decided = self._decision(await answer)

    def ask_plainly(self, session: Session) -> None:
        answer: Any = self._answer(session)
        if inspect.iscoroutine(answer):
            answer.close()
        self.decided = self._decision(answer)

    @contextmanager
    def concluded(self, connection: Connection) -> Iterator[None]:
        """Around the call: the attempt ends in the same transaction, if its delivery is in that database."""
        yield
        written = self.delivery.conclude(connection, self.decided)
        if written is False:
            raise LeaseLost("the lease ran out before on_error could commit")
        if written:
            self.decided = replace(self.decided, in_transaction=True)

    def _answer(self, session: AsyncSession | Session) -> object:
        attempt = self.delivery.attempt
        retry_in = self._outcome.delay if isinstance(self._outcome, RetryIn) else None
        return self._on_error(self._error, attempt.message, session, FailedAttempt(attempt.attempt_count, retry_in))

    def _decision(self, answer: object) -> Failure:
        match answer:
            case None | "transient":
                return self._outcome
            case "permanent":
                return self._outcome if isinstance(self._outcome, Dead) else Dead(Reason.REJECTED, self._outcome.error)
            case _:
                raise TypeError(f'on_error answered {answer!r}: "transient", "permanent", or None for what would be')
