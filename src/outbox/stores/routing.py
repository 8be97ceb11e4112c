"""SqlRouting: bindings in a table, and the messages they send to queues."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    DateTime,
    Executable,
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

from outbox.core.binding import Binding, Bindings, first_match
from outbox.core.message import Message
from outbox.core.store import DISCARD, Routing, Wanted
from outbox.stores.claims import SqlClaim
from outbox.stores.rows import history_line, message_row
from outbox.stores.tables import MESSAGE_COLUMNS, NOT_ROUTED

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

LONGEST_PAUSE = 300  # seconds between two looks at a message that no binding matches


class SqlRouting:
    """Reads the bindings in the same transaction in which it writes the destinations."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._known_bindings: tuple[int, Bindings] | None = None

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

    async def unbind(self, queue: str) -> int:
        """Remove a queue's bindings."""

        def work(connection: Connection) -> int:
            self._change_bindings(connection)
            table = self._store.tables.bindings
            return connection.execute(delete(table).where(table.c.queue == queue)).rowcount

        return await self._store.transact(work)

    async def route(self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted]) -> Routing:
        """Give due messages their destinations, and lease at once what is wanted."""
        due = {"wanted": NOT_ROUTED, "limit": limit, "suspects": True}
        if not await self._store.anything_due(due):
            return Routing()
        claims = {queue: SqlClaim(self._store, each.lease) for queue, each in wanted.items()}
        room = {queue: each.limit for queue, each in wanted.items()}
        try:
            return await self._store.transact(lambda connection: self._route(connection, due, unroutable, claims, room))
        except asyncio.CancelledError:
            for claim in claims.values():
                await claim.give_back()
            raise

    def _route(
        self,
        connection: Connection,
        due: Mapping[str, Any],
        unroutable: Mapping[str, str],
        claims: Mapping[str, SqlClaim],
        room: dict[str, int],
    ) -> Routing:
        rows = self._store.search(connection, self._unrouted, due)
        if not rows:
            return Routing()
        bindings = self._bindings_of(rows[0].version or 0, connection)
        groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        lost: defaultdict[str, list[int]] = defaultdict(list)
        unwanted: list[int] = []
        for row in rows:
            queues = bindings.queues(row.routing_key)
            if queues:
                groups[queues].append(row.id)
            elif first_match(unroutable, row.routing_key) == DISCARD:
                unwanted.append(row.id)
            else:
                lost[row.routing_key].append(row.id)
        routed: Counter[str] = Counter()
        for queues, ids in groups.items():
            self._send_to(connection, queues, ids, claims, room)
            routed.update({queue: len(ids) for queue in queues})
        for routing_key, ids in lost.items():
            line = history_line("unroutable", f"no queue is bound to {routing_key!r}")
            connection.execute(self._pause_unroutable, {"ids": self._store.listed(ids), "line": line})
        if unwanted:
            gone = delete(self._store.messages).where(self._store.among(self._store.messages.c.id, "ids"))
            connection.execute(gone, {"ids": self._store.listed(unwanted)})
        taken = {queue: claim for queue, claim in claims.items() if claim.attempts}
        return Routing(len(rows), routed, {key: len(ids) for key, ids in lost.items()}, len(unwanted), taken)

    def _send_to(
        self,
        connection: Connection,
        queues: tuple[str, ...],
        ids: list[int],
        claims: Mapping[str, SqlClaim],
        room: dict[str, int],
    ) -> None:
        """The message stays in its row for one queue, if possible one that wants it; each further queue gets a copy."""
        stays = next((queue for queue in queues if room.get(queue)), queues[0])
        for queue in queues:
            if queue != stays:
                connection.execute(self._copy_to, {"ids": self._store.listed(ids), "queue": queue})
        taken, left = ids[: room.get(stays, 0)], ids[room.get(stays, 0) :]
        if taken:
            room[stays] -= len(taken)
            chosen = {"ids": self._store.listed(taken), "queue": stays}
            leased = connection.execute(self._move_and_lease, chosen | claims[stays].terms).all()
            claims[stays].hold(connection, leased)
        if left:
            connection.execute(self._move_to, {"ids": self._store.listed(left), "queue": stays})

    @cached_property
    def _move_to(self) -> Executable:
        chosen = self._store.among(self._store.messages.c.id, "ids")
        unleased = {"starts": 0, "lease_token": null(), "lease_until": null()}
        return update(self._store.messages).where(chosen).values({**self._moved(), **unleased})

    @cached_property
    def _move_and_lease(self) -> Executable:
        chosen = self._store.among(self._store.messages.c.id, "ids")
        statement: Executable = self._store.leasing(chosen, **self._moved(), starts=1)
        return statement

    def _moved(self) -> dict[str, Any]:
        return {
            "destination": bindparam("queue"),
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
                attempts=columns.attempts + 1,
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
    def _unrouted(self) -> Select[Any]:
        """Due messages and the bindings' version. The lock on it makes a change wait until this routing committed."""
        state = self._store.tables.state
        version = select(state.c.bindings_version).where(state.c.id == 1).with_for_update(read=True)
        return self._store.due.add_columns(version.scalar_subquery().label("version"))

    def _bindings_of(self, version: int, connection: Connection) -> Bindings:
        if self._known_bindings is None or self._known_bindings[0] != version:
            self._known_bindings = (version, Bindings(self.read(connection)))
        return self._known_bindings[1]

    def read(self, connection: Connection) -> list[Binding]:
        """All bindings."""
        table = self._store.tables.bindings
        rows = connection.execute(select(table.c.queue, table.c.binding_key).order_by(*table.c))
        return [Binding(queue, binding_key) for queue, binding_key in rows]

    def _change_bindings(self, connection: Connection) -> None:
        self._store.make_state(connection)
        state = self._store.tables.state
        more = update(state).where(state.c.id == 1).values(bindings_version=state.c.bindings_version + 1)
        connection.execute(more)

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        """Store messages that already have their destinations."""
        rows = [
            message_row(message) | {"queue": queue, "expires": message.expires_at, "timer_id": None}
            for message in messages
            for queue in destinations.get(message.id, ())
        ]
        if rows:
            statement = insert(self._store.messages).values(
                destination=bindparam("queue"),
                expires_at=bindparam("expires", type_=DateTime(timezone=True)),
                due_at=self._store.clock(),
                routed_at=self._store.clock(),
            )
            await self._store.transact(lambda connection: connection.execute(statement.inline(), rows))
            self._store.announce(*{row["queue"] for row in rows})
