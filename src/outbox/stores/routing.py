"""SqlRouting: bindings in a table, and the messages they send to queues."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from secrets import randbits
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    ScalarSelect,
    Select,
    String,
    Text,
    bindparam,
    case,
    delete,
    insert,
    literal,
    null,
    select,
    update,
)

from outbox.core.attempt import Dead
from outbox.core.binding import Binding, Bindings, first_match
from outbox.core.message import Message
from outbox.core.store import DISCARD, Routing, Wanted
from outbox.stores.claims import SqlClaim, one_more
from outbox.stores.rows import BODY, as_seconds, history_line, placed_row
from outbox.stores.tables import MESSAGE_COLUMNS, NOT_ROUTED
from outbox.stores.weights import how_many_fit

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

MOST_KNOWN = 200  # routing keys that a statement is told the queues of; keys may hold ids, and have no end
LONGEST_PAUSE = 300  # seconds between two looks at a message that no binding matches
KNOWN_FOR = 10.0  # seconds for which bindings that were read count: tables may be changed by other means than ours


@dataclass(frozen=True, slots=True)
class _Known:
    """Bindings as they were read."""

    version: int
    bindings: Bindings
    read_at: float = field(default_factory=time.monotonic)

    @property
    def old(self) -> bool:
        return time.monotonic() - self.read_at > KNOWN_FOR


class _Round:
    """One batch on its way to its queues, and what has become of it so far."""

    def __init__(self, store: SqlStore, wanted: Mapping[str, Wanted]) -> None:
        self.token = store.new_token()
        self.claims = {
            queue: SqlClaim(store, each.lease, store.weights[queue], token=self.token) for queue, each in wanted.items()
        }
        self.room = {queue: each.limit for queue, each in wanted.items()}
        self.bytes = {queue: store.weights[queue].most for queue in wanted}  # that may still be leased
        self.all_routed = False
        self.unanswered = False  # whether a statement that leases was sent, and what it did is not known
        self.taken = 0
        self.routed: Counter[str] = Counter()
        self.unroutable: dict[str, int] = {}
        self.discarded = 0
        self.dead: dict[str, dict[int, Dead]] = {}

    def hold(self, rows: Sequence[Sequence[Any]]) -> None:
        """What was routed straight: rows that end with their queue and how many messages were due."""
        self.unanswered = False
        for queue, leased in self._by_queue(rows).items():
            self.routed[queue] += len(leased)
            self.room[queue] -= len(leased)
            self.bytes[queue] -= sum(len(row[BODY]) for row in leased)
            if dead := self.claims[queue].hold(leased):
                self.dead[queue] = dead
        self.taken += len(rows)
        self.all_routed = bool(rows) and rows[0][-1] == len(rows)

    def fitting(self, queue: str, rows: Sequence[Any]) -> int:
        """How many of these are leased for a queue, by the room and the bytes that it has left."""
        if not self.room.get(queue):
            return 0
        sizes = [row.size or 0 for row in rows[: self.room[queue]]]
        if self.claims[queue].attempts and sizes[0] > self.bytes[queue]:
            return 0
        count = how_many_fit(sizes, self.bytes[queue])
        self.room[queue] -= count
        self.bytes[queue] -= sum(sizes[:count])
        return count

    def _by_queue(self, rows: Sequence[Sequence[Any]]) -> Mapping[str, Sequence[Sequence[Any]]]:
        if len(self.claims) == 1:
            return {rows[0][-2]: rows} if rows else {}
        by_queue: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
        for row in rows:
            by_queue[row[-2]].append(row)
        return by_queue

    def result(self) -> Routing:
        leased = {queue: claim for queue, claim in self.claims.items() if claim.attempts}
        return Routing(self.taken, self.routed, self.unroutable, self.discarded, leased)


class SqlRouting:
    """Reads the bindings in the same transaction in which it writes the destinations."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._known_bindings: _Known | None = None

    async def bind(self, bindings: Sequence[Binding]) -> None:
        """Add bindings, then look again at what no binding matched."""

        def work(connection: Connection) -> bool:
            table = self._store.tables.bindings
            known = {tuple(row) for row in connection.execute(select(table.c.queue, table.c.binding_key))}
            new = [b for b in bindings if (b.queue, b.binding_key) not in known]
            if new:
                self._change_bindings(connection)
                rows = [{"queue": binding.queue, "binding_key": binding.binding_key} for binding in new]
                connection.execute(self._store.ignoring(table), rows)
            return bool(new)

        if await self._store.transact(work):
            # In a transaction of its own: a router that holds messages waits for the bindings' version, so whoever
            # holds the version must not wait for messages. Those that a router holds now it routes by the new ones.
            await self._store.transact(lambda connection: connection.execute(self._look_again))
            self._store.announce(None)

    async def begin_anew(self) -> None:
        """Let what was refused or found no queue be due at once, as if nobody had tried it."""
        await self._store.transact(lambda connection: connection.execute(self._try_anew))
        self._store.announce(None)

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        """Remove a queue's bindings, or one of them."""
        table = self._store.tables.bindings
        removal = delete(table).where(table.c.queue == queue)
        if binding_key is not None:
            removal = removal.where(table.c.binding_key == binding_key)

        def work(connection: Connection) -> int:
            self._change_bindings(connection)
            return connection.execute(removal).rowcount

        return await self._store.transact(work)

    async def route(self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted]) -> Routing:
        """Give due messages their destinations, and lease at once what is wanted."""
        due = {"wanted": NOT_ROUTED, "limit": limit, "suspected": True}
        if not await self._store.anything_due(due):
            return Routing()
        weights = self._store.weights
        wanted = {queue: Wanted(weights[queue].limit(each.limit), each.lease) for queue, each in wanted.items()}
        round = _Round(self._store, wanted)
        due["most"] = min(round.bytes.values(), default=0)
        try:
            if (known := self._known(wanted)) is not None:
                await self._route_straight(due | known, round)
            if not round.all_routed:
                rest = due | {"limit": limit - round.taken}
                await self._store.transact(lambda connection: self._route(connection, rest, unroutable, round))
                round.unanswered = False
        except BaseException as error:
            for queue, claim in round.claims.items():
                await claim.give_up(queue, error, unanswered=round.unanswered)
            raise
        return round.result()

    def _known(self, wanted: Mapping[str, Wanted]) -> dict[str, Any] | None:
        """What a statement must know to route by itself: the queue of each routing key that goes to one alone."""
        known = self._known_bindings
        if known is None or known.old or not wanted or len(known.bindings.known) > MOST_KNOWN:
            return None
        lease = next(iter(wanted.values())).lease
        rooms = {queue: each.limit for queue, each in wanted.items() if each.lease == lease}
        queues = {key: found[0] for key, found in known.bindings.known.items() if len(found) == 1 and found[0] in rooms}
        terms = {"version": known.version, "lease": as_seconds(lease)}
        return {**terms, "queues": queues, "rooms": rooms} if queues else None

    async def _route_straight(self, parameters: Mapping[str, Any], round: _Round) -> None:
        """All in one statement, if it knows everything that is due. What it does not know is left alone."""
        round.unanswered = True
        await self._store.route_straight({**parameters, "token": round.token}, round.hold)
        for queue, dead in round.dead.items():
            claim = round.claims[queue]
            await self._store.apply(lambda connection: claim.bury(connection, dead))  # noqa: B023

    def _route(
        self, connection: Connection, due: Mapping[str, Any], unroutable: Mapping[str, str], round: _Round
    ) -> None:
        rows = self._store.search(connection, self._unrouted, due)
        if not rows:
            return
        bindings = self._bindings_of(rows[0].version or 0, connection)
        groups: defaultdict[tuple[str, ...], list[Any]] = defaultdict(list)
        lost: defaultdict[str, list[int]] = defaultdict(list)
        unwanted: list[int] = []
        for row in rows:
            routing_key = str(row.routing_key)  # SQLite keeps bytes in a column of texts
            queues = bindings.queues(routing_key)
            if queues:
                groups[queues].append(row)
            elif first_match(unroutable, routing_key) == DISCARD:
                unwanted.append(row.id)
            else:
                lost[routing_key].append(row.id)
        for queues, found in groups.items():
            self._send_to(connection, queues, found, round)
            round.routed.update({queue: len(found) for queue in queues})
        for routing_key, ids in lost.items():
            line = history_line("unroutable", f"no queue is bound to {routing_key!r}")
            connection.execute(self._pause_unroutable, {"ids": self._store.listed(ids), "line": line})
            round.unroutable[routing_key] = len(ids)
        if unwanted:
            gone = delete(self._store.messages).where(self._store.among(self._store.messages.c.id, "ids"))
            connection.execute(gone, {"ids": self._store.listed(unwanted)})
            round.discarded = len(unwanted)
        round.taken += len(rows)

    def _send_to(
        self,
        connection: Connection,
        queues: tuple[str, ...],
        rows: Sequence[Any],
        round: _Round,
    ) -> None:
        """The message stays in its row for one queue, if possible one that wants it; each further queue gets a copy."""
        claims = round.claims
        stays = next((queue for queue in queues if round.room.get(queue)), queues[0])
        ids = [row.id for row in rows]
        for queue in queues:
            if queue != stays:
                connection.execute(self._copy_to, {"ids": self._store.listed(ids), "queue": queue})
        wanted = round.fitting(stays, rows)
        taken, left = ids[:wanted], ids[wanted:]
        if taken:
            round.unanswered = True
            chosen = {"ids": self._store.listed(taken), "queue": stays}
            leased = connection.execute(self._move_and_lease, chosen | claims[stays].terms).all()
            claims[stays].bury(connection, claims[stays].hold(leased))
        if left:
            connection.execute(self._move_to, {"ids": self._store.listed(left), "queue": stays})

    @cached_property
    def _move_to(self) -> Executable:
        chosen = self._store.among(self._store.messages.c.id, "ids")
        unleased = {"starts": 0, "lease_token": null(), "lease_until": null()}
        return update(self._store.messages).where(chosen).values({**self.moved(bindparam("queue")), **unleased})

    @cached_property
    def _move_and_lease(self) -> Executable:
        chosen = self._store.among(self._store.messages.c.id, "ids")
        statement: Executable = self._store.leasing(chosen, **self.moved(bindparam("queue")), starts=1)
        return statement

    def moved(self, queue: ColumnElement[Any]) -> dict[str, Any]:
        """What routing changes in a message's row."""
        return {
            "destination": queue,
            "routed_at": self._store.clock(),
            "unroutable": False,
            "attempts": 0,
        }

    @cached_property
    def _copy_to(self) -> Executable:
        columns = self._store.messages.c
        fresh: dict[str, ColumnElement[Any]] = {
            "destination": bindparam("queue", type_=String),
            "routed_at": self._store.clock(),
            "attempts": literal(0),
            "starts": literal(0),
        }
        source = select(*(fresh.get(name, columns[name]) for name in MESSAGE_COLUMNS))
        return insert(self._store.messages).from_select(
            list(MESSAGE_COLUMNS), source.where(self._store.among(columns.id, "ids"))
        )

    @cached_property
    def _pause_unroutable(self) -> Executable:
        columns = self._store.messages.c
        pause = case((columns.attempts > 8, LONGEST_PAUSE), else_=literal(1).bitwise_lshift(columns.attempts))
        return (
            update(self._store.messages)
            .where(self._store.among(columns.id, "ids"))
            .values(
                unroutable=True,
                attempts=one_more(columns.attempts),
                due_at=self._store.later(self._store.clock(), pause),
                history=case((columns.history.is_(None), bindparam("line", type_=Text)), else_=columns.history),
            )
        )

    @cached_property
    def _look_again(self) -> Executable:
        columns = self._store.messages.c
        waiting = self._store.skipping_locked(select(columns.id).where(columns.unroutable).order_by(columns.id))
        again = update(self._store.messages).where(columns.id.in_(waiting))
        return again.values(due_at=self._store.clock(), attempts=0)

    @cached_property
    def _try_anew(self) -> Executable:
        columns = self._store.messages.c
        tried = (columns.destination == NOT_ROUTED) & columns.done_at.is_(None) & (columns.attempts > 0)
        waiting = self._store.skipping_locked(select(columns.id).where(tried).order_by(columns.id))
        again = update(self._store.messages).where(columns.id.in_(waiting))
        return again.values(due_at=self._store.clock(), attempts=0, starts=0, unroutable=False)

    @cached_property
    def _unrouted(self) -> Select[Any]:
        """Due messages and the bindings' version."""
        return self._store.due.add_columns(self.version.label("version"))

    @cached_property
    def version(self) -> ScalarSelect[Any]:
        """The bindings' version. The lock on it makes a change wait until whoever asked has committed."""
        state = self._store.tables.state
        version = select(state.c.bindings_version).where(state.c.id == 1).with_for_update(read=True)
        return version.scalar_subquery()

    def _bindings_of(self, version: int, connection: Connection) -> Bindings:
        known = self._known_bindings
        if known is None or known.version != version or known.old:
            known = self._known_bindings = _Known(version, Bindings(self.read(connection)))
        return known.bindings

    def read(self, connection: Connection) -> list[Binding]:
        """All bindings."""
        table = self._store.tables.bindings
        rows = connection.execute(select(table.c.queue, table.c.binding_key).order_by(*table.c))
        return [Binding(queue, binding_key) for queue, binding_key in rows]

    def _change_bindings(self, connection: Connection) -> None:
        self._store.make_state(connection)
        state = self._store.tables.state
        # By chance, not one more than before: a restored database would count on from an older number, and come to
        # one that routers know with other bindings. Zero stays what it is before the first change.
        changed = update(state).where(state.c.id == 1).values(bindings_version=1 + randbits(30))
        connection.execute(changed)

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        """Store messages that already have their destinations."""
        rows = [placed_row(queue, message) for message in messages for queue in destinations.get(message.id, ())]
        if rows:
            place = self._store.receiving.place
            await self._store.transact(lambda connection: connection.execute(place, rows))
            self._store.announce(*{row["queue"] for row in rows})
