"""SqlFeed: claims on due messages. A claim holds them under a lease, which it renews while it is open."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, assert_never

from sqlalchemy import Connection, Executable, String, bindparam, select

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.dead_letter import clean
from outbox.core.errors import DatabaseSilent
from outbox.core.kept_property import kept_property
from outbox.core.store import Lease, Rows, Selection
from outbox.stores.burying import SqlBurying
from outbox.stores.callers import CallerConnections
from outbox.stores.dialect import SqlDialect
from outbox.stores.lost_claims import LostClaims
from outbox.stores.rows import EXPIRATION_PASSED, ClaimedRow, as_attempts, as_seconds, history_line
from outbox.stores.runner import Runner
from outbox.stores.selecting import SqlSelecting, Tokens, Weight
from outbox.stores.settling import SqlSettling, Token
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.wakeup import Wakeup

RENEW_AFTER = 1 / 3  # of the lease
RENEW_SOONER = 1 / 5  # where a listener's transaction, which may take three quarters of a lease, holds up all renewals


class SqlFeed:
    """Where relays and workers claim messages, and sleep until there may be some."""

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        runner: Runner,
        *,
        callers: CallerConnections,
        selecting: SqlSelecting,
        settling: SqlSettling,
        burying: SqlBurying,
        wakeup: Wakeup,
    ) -> None:
        self._messages = tables.messages
        self.dialect = dialect
        self.runner = runner
        self.callers = callers
        self.selecting = selecting
        self.settling = settling
        self.burying = burying
        self.wakeup = wakeup
        self.lost_claims = LostClaims(tables, dialect, runner, wakeup)
        self.weights: defaultdict[str, Weight] = defaultdict(Weight)  # by destination

    def claim(self, selection: Selection) -> SqlClaim:
        return SqlClaim(self, self.fitting(selection))

    def fitting(self, selection: Selection) -> Selection:
        """No more messages than can be fetched in time, by what is known of how large they are."""
        weight = self.weights[selection.destination or NOT_ROUTED]
        return replace(selection, limit=weight.limit(selection.limit), largest_bytes=weight.most)

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        await self.wakeup.listen(longest)
        if longest > 0.2:  # shorter sleeps are not worth a question
            longest = min(longest, await self.until_next_due(destination, longest))
        if longest > 0:
            await self.wakeup.wait(destination or NOT_ROUTED, longest)

    async def close(self) -> None:
        """Leave what was not given back to the end of its lease."""
        await self.lost_claims.close()

    async def until_next_due(self, destination: str | None, at_most: float) -> float:
        """Seconds until a further message of the destination is due."""
        found = await self.runner.ask(self._next_due, {"wanted": destination or NOT_ROUTED})
        return max(0.0, float(found[0][0])) if found else at_most

    @kept_property
    def _next_due(self) -> Executable:
        columns = self._messages.c
        later = columns.destination == bindparam("wanted", type_=String), columns.done_at.is_(None)
        found = select(self.dialect.seconds_until(columns.due_at)).where(*later, columns.due_at > self.dialect.now())
        return found.order_by(columns.due_at).limit(1)


class SqlClaim:
    """A claim on one destination's due messages, as an asynchronous context manager."""

    def __init__(self, feed: SqlFeed, selection: Selection, tokens: Tokens | None = None) -> None:
        self._feed = feed
        self._runner = feed.runner
        self._settling = feed.settling
        self._selection = selection
        self._given = tokens is not None  # what it holds it is given by the router
        self._tokens = tokens or Tokens.new()
        self._lease = selection.lease
        self._weight = feed.weights[selection.destination or NOT_ROUTED]
        self._began = time.monotonic()
        self._held: set[int] = set()
        self._unstarted: set[int] = set()
        self._perhaps_started: set[int] = set()  # of those: the answer was lost
        self._unrenewed: set[int] = set()  # those whose listeners' transactions could not complete them otherwise
        # A renewal and a settlement in two transactions could wait for each other, unless one writes at a time.
        self._writing = asyncio.Lock() if self._runner.writes_side_by_side else nullcontext()
        self._renewal: asyncio.Task[None] | None = None
        self.unanswered = False  # whether a statement that leases was sent, and what it did is not known
        self.attempts: list[Attempt] = []

    async def __aenter__(self) -> Self:
        if not self._given and await self._feed.selecting.anything_due(self._selection):
            try:
                await self._runner.apply(self._take)
            except BaseException as error:
                await self.give_up(error)
                raise
        if self._held or self._unstarted:
            self._renewal = asyncio.create_task(self._renew(), name="outbox lease renewal")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._renewal is not None:
                self._renewal.cancel()
                await asyncio.wait([self._renewal])
        finally:
            await self.give_back()

    async def settle(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        async with self._writing:
            written = {id for id, outcome in outcomes.items() if outcome.in_transaction}
            to_write = {id: outcome for id, outcome in outcomes.items() if id not in written}
            if to_write:
                written |= await self._runner.apply(lambda connection: self._settle(connection, to_write))
            self._held -= outcomes.keys()
            self._unstarted -= outcomes.keys()
        return frozenset(outcomes.keys() - written)

    def completion(self, attempt: Attempt) -> tuple[Executable, Rows]:
        return self._settling.completion, [{"row_id": attempt.id, "token": self._tokens.token}]

    def conclude(self, connection: Connection, attempt: Attempt, outcome: Outcome) -> bool:
        return attempt.id in self._settle(self._feed.callers.on(connection), {attempt.id: outcome})

    def lease_on(self, attempt: Attempt) -> Lease:
        return Lease(attempt.id, self._tokens.token)

    async def start(self, attempt: Attempt) -> bool:
        parameters = {"row_id": attempt.id, "lease": as_seconds(self._lease), **self._tokens._asdict()}
        async with self._writing:
            self._perhaps_started.add(attempt.id)
            started = await self._runner.apply(
                lambda connection: connection.execute(self._settling.start, parameters).rowcount
            )
            self._perhaps_started.discard(attempt.id)
            self._unstarted.discard(attempt.id)
            if started:
                self._held.add(attempt.id)
        return bool(started)

    def hold(self, rows: Sequence[ClaimedRow]) -> dict[int, Dead]:
        """Hold what a leasing statement returned; what cannot be attempted is to be buried."""
        attempts, dead = as_attempts(rows)
        self.attempts += attempts
        self._held.update(attempt.id for attempt in attempts if not attempt.isolated)
        self._unstarted.update(attempt.id for attempt in attempts if attempt.isolated)
        if attempts:
            size = sum(len(attempt.message.body) for attempt in attempts)
            self._weight.took(len(attempts), size, time.monotonic() - self._began)
        return dead

    def _take(self, connection: Connection) -> None:
        self.forget()
        self.take(connection)
        self.unanswered = False

    def forget(self) -> None:
        """Hold nothing: a transaction that had leased messages was rolled back, and is run again."""
        self.attempts.clear()
        self._held.clear()
        self._unstarted.clear()

    def take(self, connection: Connection) -> None:
        """Lease what is due, and hold it. Who began the transaction says that it was answered."""
        self.unanswered = True
        dead = self.hold(self._feed.selecting.take(connection, self._selection, self._tokens))
        self.bury(connection, dead)
        if dead:
            # Others may wait behind a batch of which nothing is left.
            self._feed.wakeup.ring(self._selection.destination or NOT_ROUTED)

    def _settle(self, connection: Connection, outcomes: Mapping[int, Outcome]) -> set[int]:
        done: list[int] = []
        released: list[int] = []
        postponed: Rows = []
        unstarted: Rows = []
        retries: Rows = []
        dead: dict[int, Dead] = {}
        for id, outcome in outcomes.items():
            match outcome:
                case Done():
                    done.append(id)
                case RetryIn(delay, error):
                    line = history_line(f"attempt {self._attempt_count(id)} failed", clean(error))
                    retries.append({"id": id, "delay": as_seconds(delay), "line": line})
                case Dead():
                    dead[id] = outcome
                case Released(delay) if id in self._unstarted:
                    unstarted.append({"id": id, "delay": as_seconds(delay)})
                    released += {id} & self._perhaps_started
                case Released(delay) if delay:
                    postponed.append({"id": id, "delay": as_seconds(delay)})
                case Released():
                    released.append(id)
                case _:
                    assert_never(outcome)
        token: Token = {"token": self._tokens.token}
        written: set[int] = set()
        if done:
            written |= self._settling.done.of_ids(connection, done, token)
        if retries:
            written |= self._settling.retry.of_rows(connection, retries, token)
        written |= self.bury(connection, dead)
        if released:
            written |= self._settling.release.of_ids(connection, released, token)
        if postponed:
            written |= self._settling.postpone.of_rows(connection, postponed, token)
        if unstarted:
            apart: Token = {"apart": self._tokens.apart}
            written |= self._settling.release_unstarted.of_rows(connection, unstarted, apart)
        return written

    def bury(self, connection: Connection, dead: Mapping[int, Dead]) -> set[int]:
        """Make dead letters of messages that it holds."""
        if not dead:
            return set()
        rows = [
            {
                "id": id,
                "reason": outcome.reason.value,
                "error": (error := clean(outcome.error)),
                "line": self._last_line(id, outcome.reason, error),
            }
            for id, outcome in dead.items()
        ]
        parameters: dict[str, Any] = {"rows": self._feed.dialect.json(rows), **self._tokens._asdict()}
        return set(self._feed.burying.bury(connection, self._settling.dead, parameters))

    def _last_line(self, id: int, reason: Reason, error: str) -> str:
        count = self._attempt_count(id)
        if not count:  # it was dead before anybody could attempt it
            return history_line("given up", error or EXPIRATION_PASSED)
        return history_line(f"attempt {count} was the last, {reason}", error)

    def _attempt_count(self, id: int) -> int:
        return next((attempt.attempt_count for attempt in self.attempts if attempt.id == id), 0)

    async def _renew(self) -> None:
        """Renew in time. A database that is away is asked again: the fence decides, not this task."""
        pause = self._lease.total_seconds() * (RENEW_AFTER if self._runner.writes_side_by_side else RENEW_SOONER)
        while True:
            await asyncio.sleep(pause)
            with suppress(Exception):  # drivers throw what they like when their database is away
                async with self._writing:
                    await self._renew_now(self._held - self._unrenewed, self._lease)
                    await self._renew_unstarted()

    async def renew_once(self, ids: Collection[int], lease: timedelta) -> None:
        async with self._writing:
            self._unrenewed.update(ids)
            await self._renew_now(self._held.intersection(ids), max(lease, self._lease))

    def renew_again(self, ids: Collection[int]) -> None:
        self._unrenewed.difference_update(ids)

    async def _renew_now(self, ids: Collection[int], lease: timedelta) -> None:
        chosen = {"ids": self._feed.dialect.listed(sorted(ids)), "token": self._tokens.token}
        parameters = {**chosen, "lease": as_seconds(lease)}
        if ids:
            await self._runner.renew(lambda connection: connection.execute(self._settling.renew, parameters))

    async def _renew_unstarted(self) -> None:
        ids = sorted(self._unstarted - self._unrenewed)
        chosen = {"ids": self._feed.dialect.listed(ids), "apart": self._tokens.apart}
        parameters = {**chosen, "lease": as_seconds(self._lease)}
        if ids:
            await self._runner.renew(lambda connection: connection.execute(self._settling.renew_unstarted, parameters))

    async def give_up(self, error: BaseException) -> None:
        """Give back what was leased before an error, whether the database could still tell what that was or not."""
        if self.unanswered and isinstance(error, DatabaseSilent | TimeoutError):
            self._weight.took_too_long()
        known = self._held or self._unstarted
        if known and (not self.unanswered or isinstance(error, asyncio.CancelledError)):
            await self.give_back()  # a cancellation waits for the answer
        elif self.unanswered:
            destination = self._selection.destination or NOT_ROUTED
            self._feed.lost_claims.give_back(self._tokens, destination, self._lease)

    async def give_back(self) -> None:
        """Let anybody have what was not settled."""
        if self._held or self._unstarted:
            # If this fails the lease runs out and the messages are claimed again: later, not lost.
            with suppress(Exception):
                await self.settle({id: Released() for id in self._held | self._unstarted})
