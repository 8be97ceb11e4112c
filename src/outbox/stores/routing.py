"""SqlQueues: everything that concerns queues, and how due messages get theirs, by the bindings of the same moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Select,
    String,
    Text,
    bindparam,
    case,
    insert,
    literal,
    null,
    select,
)

from outbox.core.attempt import Dead
from outbox.core.binding import Binding, first_match
from outbox.core.durations import NO_DELAY
from outbox.core.kept_property import kept_property
from outbox.core.message import Message
from outbox.core.store import DISCARD, Lease, Receipt, Routing, Seal, Selection, Suspected, Wanted
from outbox.stores.bindings import SqlBindings, locked_version
from outbox.stores.callers import PlacingStatements
from outbox.stores.claiming import SqlClaim, SqlFeed
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import one_more, set_in_order
from outbox.stores.receiving import SqlReceiving
from outbox.stores.rows import history_line, placed_row
from outbox.stores.runner import Runner
from outbox.stores.selecting import SqlSelecting, StraightRoute, StraightRouted, Tokens
from outbox.stores.settling import SqlSettling
from outbox.stores.tables import MESSAGE_COLUMNS, Tables
from outbox.stores.wakeup import Wakeup

MOST_KNOWN = 200  # routing keys that a statement is told the queues of; keys may hold ids, and have no end
LONGEST_PAUSE = 300  # seconds between two looks at a message that no binding matches


class _Round:
    """One batch on its way to its queues, and what has become of it so far."""

    def __init__(self, claims: Mapping[str, SqlClaim]) -> None:
        self.claims = claims
        self.all_routed = False
        self.taken = 0
        self.routed: Counter[str] = Counter()
        self.held: set[str] = set()  # queues whose claim has taken what it takes, although all of it may be dead
        self.unroutable: dict[str, int] = {}
        self.discarded = 0
        self.dead: dict[str, dict[int, Dead]] = {}

    def hold(self, routed: StraightRouted) -> None:
        """What was routed straight."""
        self.answered()
        for queue, leased in routed.leased.items():
            self.held.add(queue)
            self.routed[queue] += len(leased)
            if dead := self.claims[queue].hold(leased):
                self.dead[queue] = dead
            self.taken += len(leased)
        self.all_routed = self.taken > 0 and routed.found == self.taken

    def begun_again(self) -> _Round:
        """The same as it is now, for a transaction that may be run more than once."""
        again = _Round(self.claims)
        again.taken, again.routed, again.held = self.taken, self.routed.copy(), self.held.copy()
        for queue, claim in self.claims.items():
            if queue not in self.held:
                claim.forget()
        return again

    def answered(self) -> None:
        for claim in self.claims.values():
            claim.unanswered = False

    def result(self) -> Routing:
        leased = {queue: claim for queue, claim in self.claims.items() if claim.attempts}
        return Routing(self.taken, self.routed, self.unroutable, self.discarded, leased)


class SqlRouting:
    """Reads the bindings in the same transaction in which it writes the destinations.

    What workers of this process want is then claimed for them in that transaction, as any claim would take it.
    """

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        runner: Runner,
        *,
        bindings: SqlBindings,
        feed: SqlFeed,
        selecting: SqlSelecting,
    ) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._bindings = bindings
        self._feed = feed
        self._selecting = selecting

    async def route(self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted]) -> Routing:
        """Give due messages their destinations, and claim at once what is wanted."""
        due = Selection(limit=limit, lease=NO_DELAY)
        if not await self._selecting.anything_due(due):
            return Routing()
        tokens = Tokens.new()
        selections = {queue: self._selection(queue, each) for queue, each in wanted.items()}
        round = _Round({queue: SqlClaim(self._feed, each, tokens) for queue, each in selections.items()})
        try:
            if (straight := self._straight(limit, selections, tokens)) is not None:
                await self._route_straight(straight, round)
            if not round.all_routed:
                rest = Selection(limit=limit - round.taken, lease=NO_DELAY)
                round = await self._runner.transact(
                    lambda connection: self._route(connection, rest, unroutable, round.begun_again())
                )
                round.answered()
        except BaseException as error:
            for claim in round.claims.values():
                await claim.give_up(error)
            raise
        return round.result()

    def _selection(self, queue: str, wanted: Wanted) -> Selection:
        # A worker knows how many suspected messages it runs already, and claims them by itself.
        chosen = Selection(limit=wanted.limit, lease=wanted.lease, destination=queue, suspected=Suspected.NONE)
        return self._feed.fitting(chosen)

    def _straight(self, limit: int, selections: Mapping[str, Selection], tokens: Tokens) -> StraightRoute | None:
        """What a statement must know to route by itself: the queue of each routing key that goes to one alone."""
        known = self._bindings.known
        if known is None or known.old or not selections or len(known.bindings.known) > MOST_KNOWN:
            return None
        lease = next(iter(selections.values())).lease
        rooms = {queue: each.limit for queue, each in selections.items() if each.lease == lease}
        queues = {key: found[0] for key, found in known.bindings.known.items() if len(found) == 1 and found[0] in rooms}
        if not queues:
            return None
        return StraightRoute(
            limit=limit,
            largest_bytes=min(each.largest_bytes or 0 for each in selections.values()),
            version=known.version,
            queues=queues,
            rooms=rooms,
            lease=lease,
            token=tokens.token,
        )

    async def _route_straight(self, route: StraightRoute, round: _Round) -> None:
        """All in one statement, if it knows everything that is due. What it does not know is left alone."""
        for claim in round.claims.values():
            claim.unanswered = True
        await self._selecting.route_straight(route, round.hold)
        for queue, dead in round.dead.items():
            claim = round.claims[queue]
            await self._runner.apply(lambda connection: claim.bury(connection, dead))  # noqa: B023

    def _route(self, connection: Connection, due: Selection, unroutable: Mapping[str, str], round: _Round) -> _Round:
        rows = self._selecting.search(connection, self._unrouted, due)
        if not rows:
            return round
        bindings = self._bindings.of(rows[0].version or 0, connection)
        groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        lost: defaultdict[str, list[int]] = defaultdict(list)
        unwanted: list[int] = []
        for row in rows:
            routing_key = str(row.routing_key)  # SQLite keeps bytes in a column of texts
            queues = bindings.queues(routing_key)
            if queues:
                groups[queues].append(row.id)
            elif first_match(unroutable, routing_key) == DISCARD:
                unwanted.append(row.id)
            else:
                lost[routing_key].append(row.id)
        for queues, ids in groups.items():
            self._send_to(connection, queues, ids)
            round.routed.update({queue: len(ids) for queue in queues})
        for routing_key, ids in lost.items():
            line = history_line("unroutable", f"no queue is bound to {routing_key!r}")
            connection.execute(self._pause_unroutable, {"ids": self._dialect.listed(ids), "line": line})
            round.unroutable[routing_key] = len(ids)
        if unwanted:
            gone = self._dialect.delete(self._messages).where(self._dialect.among(self._messages.c.id, "ids"))
            connection.execute(gone, {"ids": self._dialect.listed(unwanted)})
            round.discarded = len(unwanted)
        round.taken += len(rows)
        for queue, claim in round.claims.items():
            if round.routed[queue] and queue not in round.held:
                claim.take(connection)
        return round

    def _send_to(self, connection: Connection, queues: tuple[str, ...], ids: Sequence[int]) -> None:
        """The message stays in its row for one queue, and each further queue gets a copy."""
        stays, *others = queues
        chosen = self._dialect.listed(ids)
        for queue in others:
            connection.execute(self._copy_to, {"ids": chosen, "queue": queue})
        connection.execute(self._move_to, {"ids": chosen, "queue": stays})

    @kept_property
    def _move_to(self) -> Executable:
        chosen = self._dialect.among(self._messages.c.id, "ids")
        unleased = {"starts": 0, "lease_token": null(), "lease_until": null()}
        return (
            self._dialect.update(self._messages)
            .where(chosen)
            .values({**moved(self._dialect, bindparam("queue")), **unleased})
        )

    @kept_property
    def _copy_to(self) -> Executable:
        columns = self._messages.c
        fresh: dict[str, ColumnElement[Any]] = {
            "destination": bindparam("queue", type_=String),
            "routed_at": self._dialect.clock(),
            "attempts": literal(0),
            "starts": literal(0),
        }
        source = select(*(fresh.get(name, columns[name]) for name in MESSAGE_COLUMNS))
        return insert(self._messages).from_select(
            list(MESSAGE_COLUMNS), source.where(self._dialect.among(columns.id, "ids"))
        )

    @kept_property
    def _pause_unroutable(self) -> Executable:
        columns = self._messages.c
        pause = case((columns.attempts > 8, LONGEST_PAUSE), else_=literal(1).bitwise_lshift(columns.attempts))
        return set_in_order(
            self._dialect.update(self._messages).where(self._dialect.among(columns.id, "ids")),
            unroutable=True,
            due_at=self._dialect.later(self._dialect.clock(), pause),
            attempts=one_more(columns.attempts),
            history=case((columns.history.is_(None), bindparam("line", type_=Text)), else_=columns.history),
        )

    @kept_property
    def _unrouted(self) -> Select[Any]:
        """Due messages and the bindings' version."""
        return self._selecting.due.add_columns(locked_version(self._tables).label("version"))


def moved(dialect: SqlDialect, queue: ColumnElement[Any]) -> dict[str, Any]:
    """What routing changes in a message's row."""
    return {
        "destination": queue,
        "routed_at": dialect.clock(),
        "unroutable": False,
        "attempts": 0,
    }


class SqlQueues:
    """Bindings, messages on their way into queues, and the end of many of them at once."""

    def __init__(
        self,
        runner: Runner,
        *,
        bindings: SqlBindings,
        routing: SqlRouting,
        receiving: SqlReceiving,
        placing: PlacingStatements,
        settling: SqlSettling,
        wakeup: Wakeup,
    ) -> None:
        self._runner = runner
        self._bindings = bindings
        self._routing = routing
        self._receiving = receiving
        self._placing = placing
        self._settling = settling
        self._wakeup = wakeup

    async def bind(self, bindings: Sequence[Binding]) -> None:
        await self._bindings.bind(bindings)

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        return await self._bindings.unbind(queue, binding_key)

    async def bindings(self) -> list[Binding]:
        return await self._runner.look(self._bindings.read)

    def route(
        self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted] | None = None
    ) -> Coroutine[Any, Any, Routing]:
        return self._routing.route(limit, unroutable, wanted or {})

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        rows = [placed_row(queue, message) for message in messages for queue in destinations.get(message.id, ())]
        if rows:
            await self._runner.transact(lambda connection: connection.execute(self._placing.place, rows))
            self._wakeup.announce(*{row["queue"] for row in rows})

    def receive(
        self, queue: str, messages: Sequence[Message], *, also: str | None = None, seals: Sequence[Seal] = ()
    ) -> Coroutine[Any, Any, Receipt]:
        return self._receiving.receive(queue, messages, also, seals)

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        return self._settling.complete(connection, leases)

    def announce(self, *destinations: str | None) -> None:
        self._wakeup.announce(*destinations)
