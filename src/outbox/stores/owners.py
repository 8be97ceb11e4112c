"""SqlOwners: which service a queue belongs to, and what workers declared at a broker.

The first service to record a queue has it until it is released. A broker may not tell its bindings, so they are
recorded here. They are not in the table of bindings: after a move to the database the router would follow them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

from sqlalchemy import ColumnElement, Connection, delete, select

from outbox.core.binding import Binding
from outbox.stores.dialect import SqlDialect
from outbox.stores.runner import Runner
from outbox.stores.tables import Tables

_BINDING = "binding\n"  # begins the name of such a row; a queue's name has printable characters only
_FEED = "feed\n"  # the same, of a row that says from which server's log the table's messages come


class SqlOwners:
    """A row for each queue, one for where the transport leads, and one for each binding at a broker."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner) -> None:
        self._table = tables.owners
        self._dialect = dialect
        self._runner = runner

    async def record(self, owners: Mapping[str, str]) -> dict[str, str]:
        """Record those that have no owner yet; returns the owners of all of them."""

        def work(connection: Connection) -> dict[str, str]:
            self._insert(connection, owners)
            return {queue: owner for queue, owner in self._read(connection).items() if queue in owners}

        return await self._runner.transact(work)

    async def all(self) -> dict[str, str]:
        """Whose every queue is."""
        found = await self._runner.look(self._read)
        return {queue: owner for queue, owner in found.items() if not queue.startswith((_BINDING, _FEED))}

    async def release(self, queue: str) -> str | None:
        """Forget whose a queue is; whose it was."""
        return await self._runner.transact(lambda connection: self.released(connection, queue))

    def released(self, connection: Connection, queue: str) -> str | None:
        """The same within a transaction."""
        table = self._table
        found: str | None = connection.scalar(select(table.c.owner).where(table.c.queue == queue))
        connection.execute(delete(table).where(table.c.queue == queue))
        return found

    async def declare(self, bindings: Collection[Binding]) -> None:
        """Record bindings that workers make at a broker."""
        rows = {_row(binding): f"{binding.queue}\n{binding.binding_key}" for binding in bindings}
        await self._runner.transact(lambda connection: self._insert(connection, rows))

    async def declared(self) -> list[Binding]:
        """Those that were recorded."""
        found = await self._runner.look(self._read)
        told = sorted(owner for queue, owner in found.items() if queue.startswith(_BINDING))
        return [Binding(*each.split("\n")) for each in told]

    async def retract(self, binding: Binding) -> None:
        """Forget a binding that was removed at the broker."""
        await self.release(_row(binding))

    async def feeds(self) -> list[str]:
        """The servers from whose log relays have read the messages of the table; none: they are polled."""
        queue = self._table.c.queue
        chosen = select(queue).where(self._is_feed)
        found = await self._runner.look(lambda connection: connection.scalars(chosen).all())
        return sorted(each.removeprefix(_FEED) for each in found)

    @property
    def has_feeds(self) -> ColumnElement[bool]:
        """Whether there are such servers, for a statement."""
        return select(self._table.c.queue).where(self._is_feed).exists()

    async def record_feed(self, server: str, slot: str) -> None:
        """Record that messages are read from a server's log, by this slot."""
        await self._runner.transact(lambda connection: self._insert(connection, {_FEED + server: slot}))

    async def release_feeds(self) -> bool:
        """Forget that the log was read: relays may poll; whether it was recorded."""
        gone = delete(self._table).where(self._is_feed)
        return bool(await self._runner.transact(lambda connection: connection.execute(gone).rowcount))

    @property
    def _is_feed(self) -> ColumnElement[bool]:
        return self._table.c.queue.startswith(_FEED, autoescape=True)

    def _insert(self, connection: Connection, owners: Mapping[str, str]) -> None:
        for queue in sorted(owners):  # always in the same order: no two processes wait for each other
            entry = {"queue": queue, "owner": owners[queue]}
            self._dialect.enter(connection, self._dialect.ignoring(self._table), entry)

    def _read(self, connection: Connection) -> dict[str, str]:
        table = self._table
        return {row.queue: row.owner for row in connection.execute(select(table.c.queue, table.c.owner))}


def _row(binding: Binding) -> str:
    """The name of a binding's row. Two names of 255 characters do not fit into one, so it is a hash of both."""
    return _BINDING + sha256(f"{binding.queue}\n{binding.binding_key}".encode()).hexdigest()
