"""SqlClaim: messages under a lease, renewed while it is held; every write carries its token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, assert_never
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    Float,
    Integer,
    Select,
    String,
    Text,
    Uuid,
    bindparam,
    case,
    delete,
    func,
    null,
    select,
    tuple_,
    update,
)
from sqlalchemy.types import TypeEngine

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.dead_letter import clean
from outbox.core.durations import IMMEDIATELY
from outbox.core.errors import DatabaseSilent
from outbox.core.store import Lease, Rows, Suspected
from outbox.stores.rows import EXPIRATION_PASSED, as_attempts, as_seconds, history_line
from outbox.stores.weights import Weight

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

RENEW_AFTER = 1 / 3  # of the lease
NEVER = -(2**31)  # crashes that no message has: one that found no queue has fewer starts than attempts
HIGHEST = 2**31 - 1  # that a column holds
RENEW_SOONER = 1 / 5  # where a listener's transaction, which may take three quarters of a lease, holds up all renewals

Fetch = Callable[[Connection, Executable, Mapping[str, Any]], Sequence[Sequence[Any]]]

# What a statement that buries says of each message; the rest is copied from its row.
BURIAL: Mapping[str, type[TypeEngine[Any]]] = {
    "id": BigInteger,
    "reason": String,
    "error": Text,
    "attempts": Integer,
    "starts": Integer,
    "history": Text,
}

_UNTRIED = (Reason.EXPIRED, Reason.CRASHED)  # found out before the listener ran: no attempt, and no start either


def one_more(count: ColumnElement[int]) -> ColumnElement[int]:
    """A count and one. A row of another program may hold the highest there is, and must not fail a whole batch."""
    return case((count < HIGHEST, count + 1), else_=count)


def one_less(count: ColumnElement[int]) -> ColumnElement[int]:
    return case((count > -HIGHEST, count - 1), else_=count)


class SettleStatements:
    """How attempts end in SQL; built once for each store."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._messages = store.messages

    @cached_property
    def done(self) -> Any:
        columns = self._messages.c
        return self._done(self._store.among(columns.id, "ids"), self._store.held()).returning(columns.id)

    @cached_property
    def completion(self) -> Any:
        """One row's end."""
        return self._done(self._messages.c.id == bindparam("row_id"), self._store.held())

    @cached_property
    def completions(self) -> Any:
        """Ends of rows under whatever leases, each by its own token."""
        columns = self._messages.c
        leases = self._store.records("rows", {"id": BigInteger, "token": Uuid}).alias("leases")
        own = tuple_(columns.id, columns.lease_token).in_(select(leases.c.id, leases.c.token))
        return self._done(own, columns.lease_until > self._store.clock()).returning(columns.id)

    def _done(self, chosen: ColumnElement[bool], held: ColumnElement[bool]) -> Any:
        if self._store.clean_up_after == IMMEDIATELY:
            return delete(self._messages).where(chosen, held)
        return (
            update(self._messages)
            .where(chosen, held)
            .values(
                done_at=self._store.clock(),
                attempts=one_more(self._messages.c.attempts),
                lease_token=null(),
                lease_until=null(),
            )
        )

    @cached_property
    def retry(self) -> Any:
        columns = self._messages.c
        rows = self._store.records("rows", {"id": BigInteger, "delay": Float, "line": Text}).alias("settled")
        return (
            update(self._messages)
            .where(columns.id == rows.c.id, self._store.held())
            .values(
                **self._put_off(rows.c.delay),
                attempts=one_more(columns.attempts),
                history=self._store.appended_history(rows.c.line),
                lease_token=null(),
                lease_until=null(),
            )
            .returning(columns.id)
        )

    @cached_property
    def dead(self) -> Select[Any]:
        columns = self._messages.c
        said = {"id": BigInteger, "reason": String, "error": Text, "line": Text}
        rows = self._store.records("rows", said).alias("settled")
        untried = rows.c.reason.in_([reason.value for reason in _UNTRIED])
        return (
            select(
                columns.id,
                rows.c.reason,
                rows.c.error,
                case((untried, columns.attempts), else_=one_more(columns.attempts)).label("attempts"),
                case((untried, one_less(columns.starts)), else_=columns.starts).label("starts"),
                self._store.appended_history(rows.c.line).label("history"),
            )
            .where(columns.id == rows.c.id, self._store.held() | self._held_apart)
            .with_for_update(of=self._messages)
        )

    @cached_property
    def release(self) -> Any:
        columns = self._messages.c
        return (
            update(self._messages)
            .where(self._store.among(columns.id, "ids"), self._store.held())
            .values(starts=one_less(columns.starts), lease_token=null(), lease_until=null())
            .returning(columns.id)
        )

    @cached_property
    def start(self) -> Any:
        """From now on it is leased like the others, and its start is counted."""
        columns = self._messages.c
        return (
            update(self._messages)
            .where(columns.id == bindparam("row_id"), self._held_apart)
            .values(
                starts=one_more(columns.starts),
                lease_token=bindparam("token", type_=Uuid),
                lease_until=self._store.later(self._store.clock(), bindparam("lease", type_=Float)),
            )
            .returning(columns.id)
        )

    @cached_property
    def release_unstarted(self) -> Any:
        """A release of what was not started; it may be due only later."""
        columns = self._messages.c
        rows = self._store.records("rows", {"id": BigInteger, "delay": Float}).alias("settled")
        later = self._put_off(rows.c.delay)
        kept = {name: case((rows.c.delay > 0.0, value), else_=columns[name]) for name, value in later.items()}
        return (
            update(self._messages)
            .where(columns.id == rows.c.id, self._held_apart)
            .values(**kept, lease_token=null(), lease_until=null())
            .returning(columns.id)
        )

    @cached_property
    def renew_unstarted(self) -> Any:
        until = self._store.later(self._store.clock(), bindparam("lease", type_=Float))
        return (
            update(self._messages)
            .where(self._store.among(self._messages.c.id, "ids"), self._held_apart)
            .values(lease_until=until)
        )

    @property
    def _held_apart(self) -> ColumnElement[bool]:
        columns = self._messages.c
        return (columns.lease_token == bindparam("apart", type_=Uuid)) & (columns.lease_until > self._store.clock())

    @cached_property
    def postpone(self) -> Any:
        """A release after which a row is due only later."""
        columns = self._messages.c
        rows = self._store.records("rows", {"id": BigInteger, "delay": Float}).alias("settled")
        return (
            update(self._messages)
            .where(columns.id == rows.c.id, self._store.held())
            .values(
                **self._put_off(rows.c.delay),
                starts=one_less(columns.starts),
                lease_token=null(),
                lease_until=null(),
            )
            .returning(columns.id)
        )

    def _put_off(self, delay: ColumnElement[float]) -> dict[str, Any]:
        """A message is as old as when it was due at first: a copy of it may have arrived then."""
        columns = self._messages.c
        return {
            "due_at": self._store.later(self._store.clock(), delay),
            "first_due_at": func.coalesce(columns.first_due_at, columns.due_at),
        }

    @cached_property
    def renew(self) -> Any:
        until = self._store.later(self._store.clock(), bindparam("lease", type_=Float))
        return (
            update(self._messages)
            .where(self._store.among(self._messages.c.id, "ids"), self._store.held())
            .values(lease_until=until)
            .returning(self._messages.c.id)
        )


def executed(connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    """The rows of a statement, on anybody's connection."""
    return connection.execute(statement, parameters).all()


class SqlClaim:
    """A claim on one destination's due messages, as an asynchronous context manager."""

    def __init__(
        self,
        store: SqlStore,
        lease: timedelta,
        weight: Weight,
        wanted: Mapping[str, Any] | None = None,
        suspected: Suspected = Suspected.ALL,
        isolated_at: int | None = None,
        token: UUID | None = None,
    ) -> None:
        self._store = store
        self._statements = store.settling
        self._wanted = wanted  # none: it is given what it holds by whoever routes
        self._suspected = suspected
        self._lease = lease
        self._weight = weight
        self._began = time.monotonic()
        self._isolated_at = isolated_at
        self._token = token or store.new_token()
        self._apart = UUID(int=self._token.int ^ 1)  # what is not started yet bears this one
        self._held: set[int] = set()
        self._unstarted: set[int] = set()
        self._perhaps_started: set[int] = set()  # of those: the answer was lost
        self._unrenewed: set[int] = set()  # those whose listeners' transactions could not complete them otherwise
        # A renewal and a settlement in two transactions could wait for each other, unless one writes at a time.
        self._writing = asyncio.Lock() if store.writes_side_by_side else nullcontext()
        self._renewal: asyncio.Task[None] | None = None
        self._unanswered = False  # whether a statement that leases was sent, and what it did is not known
        self.attempts: list[Attempt] = []

    async def __aenter__(self) -> Self:
        if self._wanted is not None and await self._store.anything_due(self._wanted):
            try:
                await self._store.apply(self._take)
            except BaseException as error:
                await self.give_up(self._wanted["wanted"], error, unanswered=self._unanswered)
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
                written |= await self._store.apply(
                    lambda connection: self._settle(connection, to_write, self._store.fetched)
                )
            self._held -= outcomes.keys()
            self._unstarted -= outcomes.keys()
        return frozenset(outcomes.keys() - written)

    def completion(self, attempt: Attempt) -> tuple[Executable, Rows]:
        return self._statements.completion, [{"row_id": attempt.id, "token": self._token}]

    def conclude(self, connection: Connection, attempt: Attempt, outcome: Outcome) -> bool:
        return attempt.id in self._settle(self._store.on(connection), {attempt.id: outcome}, executed)

    def lease_on(self, attempt: Attempt) -> Lease:
        return Lease(attempt.id, self._token)

    async def start(self, attempt: Attempt) -> bool:
        parameters = {"row_id": attempt.id, "apart": self._apart, **self.terms}
        async with self._writing:
            self._perhaps_started.add(attempt.id)
            started = await self._store.apply(
                lambda connection: connection.execute(self._statements.start, parameters).all()
            )
            self._perhaps_started.discard(attempt.id)
            self._unstarted.discard(attempt.id)
            if started:
                self._held.add(attempt.id)
        return bool(started)

    @property
    def terms(self) -> dict[str, Any]:
        """What a leasing statement binds."""
        return {"token": self._token, "lease": as_seconds(self._lease)}

    def hold(self, rows: Sequence[Sequence[Any]]) -> dict[int, Dead]:
        """Hold what a leasing statement returned; what nobody can attempt is to be buried."""
        attempts, dead = as_attempts(rows)
        self.attempts += attempts
        self._held.update(attempt.id for attempt in attempts if not attempt.isolated)
        self._unstarted.update(attempt.id for attempt in attempts if attempt.isolated)
        if attempts:
            size = sum(len(attempt.message.body) for attempt in attempts)
            self._weight.took(len(attempts), size, time.monotonic() - self._began)
        return dead

    def _take(self, connection: Connection) -> None:
        assert self._wanted is not None  # noqa: S101 - or nobody would have asked
        self._unanswered = True
        isolated_at = NEVER if self._isolated_at is None else self._isolated_at
        terms = {**self.terms, "apart": self._apart, "isolated_at": isolated_at}
        dead = self.hold(self._store.take(connection, self._wanted, terms, self._suspected))
        self.bury(connection, dead)
        self._unanswered = False
        if dead:
            self._store.ring(self._wanted["wanted"])  # others may wait behind a batch of which nothing is left

    def _settle(self, connection: Connection, outcomes: Mapping[int, Outcome], fetch: Fetch) -> set[int]:
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
        written: set[int] = set()
        if done:
            chosen = {"ids": self._store.listed(done), "token": self._token}
            written.update(id for (id,) in fetch(connection, self._statements.done, chosen))
        if retries:
            written |= self._ids(connection, self._statements.retry, {"rows": self._store.json(retries)})
        written |= self.bury(connection, dead)
        if released:
            written |= self._ids(connection, self._statements.release, {"ids": self._store.listed(released)})
        if postponed:
            written |= self._ids(connection, self._statements.postpone, {"rows": self._store.json(postponed)})
        if unstarted:
            chosen = {"rows": self._store.json(unstarted), "apart": self._apart}
            written.update(connection.execute(self._statements.release_unstarted, chosen).scalars())
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
        parameters = {"rows": self._store.json(rows), "token": self._token, "apart": self._apart}
        return set(self._store.bury(connection, self._statements.dead, parameters))

    def _ids(self, connection: Connection, statement: Any, parameters: dict[str, Any]) -> set[int]:
        return set(connection.execute(statement, parameters | {"token": self._token}).scalars())

    def _last_line(self, id: int, reason: Reason, error: str) -> str:
        count = self._attempt_count(id)
        if not count:  # it was dead before anybody could attempt it
            return history_line("given up", error or EXPIRATION_PASSED)
        return history_line(f"attempt {count} was the last, {reason}", error)

    def _attempt_count(self, id: int) -> int:
        return next((attempt.attempt_count for attempt in self.attempts if attempt.id == id), 0)

    async def _renew(self) -> None:
        """Renew in time. A database that is away is asked again: the fence decides, not this task."""
        pause = self._lease.total_seconds() * (RENEW_AFTER if self._store.writes_side_by_side else RENEW_SOONER)
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
        parameters = {"ids": self._store.listed(sorted(ids)), "token": self._token, "lease": as_seconds(lease)}
        if ids:
            await self._store.renew(lambda connection: connection.execute(self._statements.renew, parameters).all())

    async def _renew_unstarted(self) -> None:
        ids = self._store.listed(sorted(self._unstarted))
        parameters = {"ids": ids, "apart": self._apart, "lease": as_seconds(self._lease)}
        if self._unstarted:
            await self._store.renew(lambda connection: connection.execute(self._statements.renew_unstarted, parameters))

    async def give_up(self, destination: str, error: BaseException, *, unanswered: bool) -> None:
        """Give back what was leased before an error, whether the database could still tell what that was or not."""
        if unanswered and isinstance(error, DatabaseSilent | TimeoutError):
            self._weight.took_too_long()
        known = self._held or self._unstarted
        if known and (not unanswered or isinstance(error, asyncio.CancelledError)):
            await self.give_back()  # a cancellation waits for the answer
        elif unanswered:
            self._store.lost_claims.give_back(self._token, self._apart, destination, self._lease)

    async def give_back(self) -> None:
        """Let anybody have what was not settled."""
        if self._held or self._unstarted:
            # If this fails the lease runs out and the messages are claimed again: later, not lost.
            with suppress(Exception):
                await self.settle({id: Released() for id in self._held | self._unstarted})
