"""PostgresqlSelecting: claims, and routes and claims, in one round trip, from where the live rows begin."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Integer,
    Row,
    Select,
    Text,
    Uuid,
    any_,
    bindparam,
    case,
    cast,
    func,
    literal,
    not_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS

from outbox.core.durations import EARLIEST
from outbox.core.kept_property import kept_property
from outbox.core.loops import finish
from outbox.core.store import Selection, Suspected
from outbox.stores.bindings import locked_version
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.wakeup import PostgresqlWakeup
from outbox.stores.routing import moved
from outbox.stores.rows import CLAIMED, ClaimedRow, as_seconds
from outbox.stores.runner import WORK_WITHIN
from outbox.stores.selecting import (
    AIM,
    SqlSelecting,
    StraightRoute,
    StraightRouted,
    Tokens,
    due_parameters,
    lease_parameters,
)
from outbox.stores.tables import NOT_ROUTED, Tables

# ScanPosition: where in a queue the live rows begin.
# A row that was handled is dead, and an old transaction somewhere in the database keeps the dead from being removed.
# Each look for due messages then steps over all of them, from the first. When that has become slow, looks go on from
# where the last one ended, and only now and then from the very beginning: such a look finds who was overtaken, a
# message whose transaction took long to commit, or whose lease ran out.

BEGINNING = EARLIEST

SLOW = 0.015  # seconds for a look from the beginning that make it worth its while to ask for the dead
MANY = 10_000  # dead rows that make it worth its while to remember the head
RESPITE = 20  # looks from the beginning take at most one part in so many of the time
SHORTEST_RESPITE = 1.0  # seconds
OVERTAKEN = timedelta(seconds=0.25)  # how much longer than others a transaction may take and still be met on the way

_due_at = itemgetter(0)


@dataclass(slots=True)
class Scan:
    """One look for due messages."""

    since: datetime
    found: Sequence[Any] = ()  # rows that begin with when they were due
    ended: bool = True  # there was nothing more to find

    @property
    def bound(self) -> datetime | None:
        """The same for a statement. None: from the very beginning, where a row of another program may be due."""
        return None if self.since == BEGINNING else self.since


class ScanPosition:
    """The head of one queue, as this process knows it."""

    def __init__(self) -> None:
        self._reached = BEGINNING
        self._from_beginning_at = 0.0
        self._ask_again_at = 0.0
        self.in_doubt = False  # whether the dead should be counted

    @contextmanager
    def looking(self) -> Iterator[Scan]:
        """Scan from where the live rows begin, or from the beginning if that is cheap or its time has come."""
        known = time.monotonic() < self._from_beginning_at and self._reached > BEGINNING
        look = Scan(self._reached - OVERTAKEN if known else BEGINNING)
        began = time.perf_counter()
        yield look
        took = time.perf_counter() - began
        last = max(map(_due_at, look.found), default=self._reached)
        if known:
            self._reached = max(self._reached, last)
            return
        self._reached = max(self._reached, last) if look.ended else last
        if took > SLOW and time.monotonic() > self._ask_again_at:
            respite = max(SHORTEST_RESPITE, RESPITE * took)
            self._ask_again_at = time.monotonic() + respite
            self.in_doubt = True

    def counted(self, dead: int) -> None:
        """So many dead rows are in the table."""
        self.in_doubt = False
        if dead > MANY:
            self._from_beginning_at = self._ask_again_at


def fitting(found: CTE, chosen: Select[Any]) -> ColumnElement[Any]:
    """The ids of what was chosen of `due`, up to so many bytes of bodies as `most` says; the first one always.

    Where everything found fits, which is nearly always, that is all there is to add up.
    """
    most = bindparam("most", type_=BigInteger)
    (id,) = chosen.selected_columns
    running = func.sum(found.c.size).over(order_by=(found.c.due_at, found.c.id), rows=(None, 0)).label("running")
    summed = select(found.c.id, found.c.size, running).subquery("summed")
    fits = select(summed.c.id).where((summed.c.running <= most) | (summed.c.running == summed.c.size))
    everything = select(func.coalesce(func.sum(found.c.size), 0)).scalar_subquery()
    return case((everything <= most, _array(chosen)), else_=_array(chosen.where(id.in_(fits))))


def count(found: CTE) -> ColumnElement[int]:
    """How many were found."""
    return select(func.count()).select_from(found).scalar_subquery()


def _array(ids: Select[Any]) -> ColumnElement[Any]:
    return func.array(ids.scalar_subquery(), type_=ARRAY(BigInteger))


Found = TypeVar("Found", bound=Sequence[Any])


class PostgresqlSelecting(SqlSelecting):
    """An UPDATE of what a `SELECT … FOR UPDATE SKIP LOCKED` found, from where the live rows begin."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: PostgresqlRunner, wakeup: PostgresqlWakeup) -> None:
        super().__init__(tables, dialect, runner)
        self._tables = tables
        self._own_runner = runner
        self._wakeup = wakeup
        self._heads: defaultdict[str, ScanPosition] = defaultdict(ScanPosition)

    async def anything_due(self, selection: Selection) -> bool:
        """A claim that found nothing is followed by questions, which are cheaper."""
        destination = selection.destination or NOT_ROUTED
        if not self._wakeup.is_quiet(destination) or not self._own_runner.direct.is_free:
            return True
        with self._heads[destination].looking() as look:
            first = replace(selection, limit=1, since=look.bound)
            look.found = await self._runner.ask(self.due, due_parameters(first))
            look.ended = not look.found
        return bool(look.found)

    def search(self, connection: Connection, statement: Executable, selection: Selection) -> Sequence[Row[Any]]:
        return self._look_for(
            connection, selection, lambda seen: connection.execute(statement, due_parameters(seen)).all(), len
        )

    def take(self, connection: Connection, selection: Selection, tokens: Tokens) -> Sequence[ClaimedRow]:
        take = self._take_all if selection.suspected is Suspected.ALL else self._take_one_suspected
        leasing = {
            **lease_parameters(selection, tokens),
            "most": AIM if selection.largest_bytes is None else selection.largest_bytes,
        }
        rows: Any = self._look_for(
            connection,
            selection,
            lambda seen: connection.execute(take, {**due_parameters(seen), **leasing}).all(),
            _found,
        )
        self._wakeup.found(selection.destination or NOT_ROUTED, bool(rows))
        return rows  # type: ignore[no-any-return]

    def _look_for(
        self,
        connection: Connection,
        selection: Selection,
        find: Callable[[Selection], Found],
        found: Callable[[Found], int],
    ) -> Found:
        head = self._heads[selection.destination or NOT_ROUTED]
        with head.looking() as look:
            rows = find(replace(selection, since=look.bound))
            look.found, look.ended = rows, found(rows) < selection.limit
        if head.in_doubt:
            head.counted(self._dead_rows(connection))
        return rows

    def _dead_rows(self, connection: Connection) -> int:
        quoted = connection.dialect.identifier_preparer.format_table(self._messages)
        return int(connection.scalar(select(func.pg_catalog.pg_stat_get_dead_tuples(cast(quoted, REGCLASS)))) or 0)

    @kept_property
    def _take_all(self) -> Any:
        found = self.due.cte("found")
        return self._taking(found, select(found.c.id))

    @kept_property
    def _take_one_suspected(self) -> Any:
        found = self.due.cte("found")
        first = select(found.c.id).where(found.c.suspected).limit(1).scalar_subquery()
        return self._taking(found, select(found.c.id).where(not_(found.c.suspected) | (found.c.id == first)))

    def _taking(self, found: CTE, chosen: Select[Any]) -> Any:
        leased = self._leasing(self._messages.c.id == any_(fitting(found, chosen)))
        return leased.returning(*self._told(self._isolated), count(found))

    # Routing in one round trip.

    async def route_straight(self, route: StraightRoute, hold: Callable[[StraightRouted], None]) -> None:
        head = self._heads[NOT_ROUTED]

        async def work() -> None:
            with head.looking() as look:
                asked = _parameters(replace(route, since=look.bound))
                rows = await self._own_runner.direct.ask(self._route_statement, asked)
                routed = StraightRouted(_found(rows), _by_queue(rows))
                hold(routed)
                if rows and routed.found == len(rows):  # otherwise the head stays where a message still waits
                    look.found, look.ended = rows, len(rows) < route.limit
            if head.in_doubt:
                head.counted(await self._own_runner.first_look(self._dead_rows))

        await self._runner.open()
        await finish(work(), WORK_WITHIN)

    @kept_property
    def _route_statement(self) -> Any:
        found = self.due.cte("found")
        queue = _queue_of(found)
        position = func.row_number().over(partition_by=queue, order_by=(found.c.due_at, found.c.id))
        ranked = select(found.c.id, queue.label("queue"), position.label("position")).subquery("ranked")
        room = cast(bindparam("rooms", type_=JSONB).op("->>")(ranked.c.queue), Integer)
        chosen = select(ranked.c.id).where(
            ranked.c.position <= room,
            # Nothing is chosen when the bindings are not those that the queues were told by.
            locked_version(self._tables) == bindparam("version", type_=Integer),
        )
        leased = (
            update(self._messages)
            .where(self._messages.c.id == any_(fitting(found, chosen)))
            .values(
                **moved(self._dialect, _queue_of(self._messages)),
                lease_token=bindparam("token", type_=Uuid),
                lease_until=self._lease_until,
                starts=1,
            )
        )
        return leased.returning(*self._told(literal(0)), count(found), self._messages.c.destination)


# Behind what is claimed: how many due messages the statement found, and the queue, where it has routed too.
_FOUND = len(CLAIMED)
_QUEUE = _FOUND + 1


def _found(rows: Sequence[Any]) -> int:
    found: int = rows[0][_FOUND] if rows else 0
    return found


def _by_queue(rows: Sequence[Any]) -> Mapping[str, Sequence[ClaimedRow]]:
    by_queue: defaultdict[str, list[ClaimedRow]] = defaultdict(list)
    for row in rows:
        by_queue[row[_QUEUE]].append(row)
    return by_queue


def _parameters(route: StraightRoute) -> dict[str, Any]:
    return {
        "rooms": route.rooms,
        "wanted": NOT_ROUTED,
        "limit": route.limit,
        "suspected": True,
        "most": route.largest_bytes,
        "version": route.version,
        "lease": as_seconds(route.lease),
        "queues": route.queues,
        "since": route.since,
        "token": route.token,
    }


def _queue_of(messages: FromClause) -> ColumnElement[Any]:
    """The queue of a message, of those that a statement is told."""
    return bindparam("queues", type_=JSONB).op("->>")(cast(messages.c.routing_key, Text))
