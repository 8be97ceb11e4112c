"""PostgresqlSelecting: claims, and routes and claims, in one round trip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    CTE,
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
    cast,
    func,
    literal,
    not_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS

from outbox.core.kept_property import kept_property
from outbox.core.loops import finish
from outbox.core.store import Selection, Suspected
from outbox.stores.bindings import locked_version
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql.batches import count, fitting
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.scan_position import ScanPosition
from outbox.stores.postgresql.wakeup import PostgresqlWakeup
from outbox.stores.routing import moved
from outbox.stores.rows import FOUND, ClaimedRow, as_seconds
from outbox.stores.runner import WORK_WITHIN
from outbox.stores.selecting import SqlSelecting, StraightRoute, Tokens, due_parameters, lease_parameters
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.weights import AIM

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
            first = {**due_parameters(selection), "limit": 1, "since": look.bound}
            look.found = await self._runner.ask(self.due, first)
            look.ended = not look.found
        return bool(look.found)

    def search(self, connection: Connection, statement: Executable, selection: Selection) -> Sequence[Row[Any]]:
        return self._look_for(
            connection, due_parameters(selection), lambda all: connection.execute(statement, all).all(), len
        )

    def take(self, connection: Connection, selection: Selection, tokens: Tokens) -> Sequence[ClaimedRow]:
        take = self._take_all if selection.suspected is Suspected.ALL else self._take_one_suspected
        parameters = {
            **due_parameters(selection),
            **lease_parameters(selection, tokens),
            "most": AIM if selection.largest_bytes is None else selection.largest_bytes,
        }
        rows: Any = self._look_for(
            connection,
            parameters,
            lambda all: self._runner.fetch(connection, take, all),
            lambda rows: rows[0][FOUND] if rows else 0,
        )
        self._wakeup.found(selection.destination or NOT_ROUTED, bool(rows))
        return rows  # type: ignore[no-any-return]

    def _look_for(
        self,
        connection: Connection,
        parameters: Mapping[str, Any],
        find: Callable[[Mapping[str, Any]], Found],
        found: Callable[[Found], int],
    ) -> Found:
        head = self._heads[parameters["wanted"]]
        with head.looking() as look:
            rows = find({**parameters, "since": look.bound})
            look.found, look.ended = rows, found(rows) < parameters["limit"]
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

    async def route_straight(self, route: StraightRoute, hold: Callable[[Sequence[ClaimedRow]], None]) -> None:
        head = self._heads[NOT_ROUTED]
        statement, asked = self._route_straight_statement, _parameters(route)
        if len(route.rooms) == 1 and route.limit <= min(route.rooms.values()):
            statement = self._route_to_one_statement
            del asked["rooms"]

        async def work() -> None:
            with head.looking() as look:
                rows: Any = await self._own_runner.direct.ask(statement, {**asked, "since": look.bound})
                hold(rows)
                if rows and rows[0][FOUND] == len(rows):  # otherwise the head stays where somebody still waits
                    look.found, look.ended = rows, len(rows) < route.limit
            if head.in_doubt:
                head.counted(await self._own_runner.first_look(self._dead_rows))

        await self._runner.open()
        await finish(work(), WORK_WITHIN)

    @kept_property
    def _route_straight_statement(self) -> Any:
        found = self.due.cte("found")
        queue = _queue_of(found)
        position = func.row_number().over(partition_by=queue, order_by=(found.c.due_at, found.c.id))
        ranked = select(found.c.id, queue.label("queue"), position.label("position")).subquery("ranked")
        room = cast(bindparam("rooms", type_=JSONB).op("->>")(ranked.c.queue), Integer)
        return self._routing_straight(found, select(ranked.c.id).where(ranked.c.position <= room))

    @kept_property
    def _route_to_one_statement(self) -> Any:
        """The same for a queue that has room for everything: nobody needs to be counted."""
        found = self.due.cte("found")
        return self._routing_straight(found, select(found.c.id).where(_queue_of(found).is_not(None)))

    def _routing_straight(self, found: CTE, chosen: Select[Any]) -> Any:
        # Nothing is chosen when the bindings are not those that the queues were told by.
        chosen = chosen.where(locked_version(self._tables) == bindparam("version", type_=Integer))
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


def _parameters(route: StraightRoute) -> dict[str, Any]:
    return {
        "wanted": NOT_ROUTED,
        "limit": route.limit,
        "suspected": True,
        "most": route.largest_bytes,
        "version": route.version,
        "lease": as_seconds(route.lease),
        "queues": route.queues,
        "rooms": route.rooms,
        "token": route.token,
    }


def _queue_of(messages: FromClause) -> ColumnElement[Any]:
    """The queue of a message, of those that a statement is told."""
    return bindparam("queues", type_=JSONB).op("->>")(cast(messages.c.routing_key, Text))
