"""SqlBindings: which queue asks for which routing keys, in a table, and what this process knows of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import Any

from sqlalchemy import BigInteger, Connection, Executable, ScalarSelect, Select, bindparam, delete, select, update

from outbox.core.binding import Binding, Bindings
from outbox.core.kept_property import kept_property
from outbox.stores.dialect import SqlDialect
from outbox.stores.maintenance import make_state
from outbox.stores.runner import Runner
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup

KNOWN_FOR = 10.0  # seconds for which bindings that were read count: tables may be changed by other means than ours
LOOK_AGAIN = 10_000  # messages that one transaction lets be routed again


@dataclass(frozen=True, slots=True)
class KnownBindings:
    """Bindings as they were read."""

    version: int
    bindings: Bindings
    read_at: float = field(default_factory=time.monotonic)

    @property
    def old(self) -> bool:
        return time.monotonic() - self.read_at > KNOWN_FOR


class SqlBindings:
    """Each change draws a new version, by which routers notice it."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner, wakeup: Wakeup) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._wakeup = wakeup
        self.known: KnownBindings | None = None

    async def bind(self, bindings: Sequence[Binding]) -> None:
        """Add bindings, then look again at what no binding matched."""

        def work(connection: Connection) -> bool:
            table = self._tables.bindings
            known = {tuple(row) for row in connection.execute(select(table.c.queue, table.c.binding_key))}
            new = [b for b in bindings if (b.queue, b.binding_key) not in known]
            if new:
                self._change_bindings(connection)
                rows = [{"queue": binding.queue, "binding_key": binding.binding_key} for binding in new]
                self._dialect.enter(connection, self._dialect.ignoring(table), rows)
            return bool(new)

        if await self._runner.transact(work):
            # In transactions of their own: a router that holds messages waits for the version of the bindings, so the
            # holder of the version must not wait for messages. Those that a router holds now it routes by the new ones.
            last: int | None = 0
            while last is not None:
                after = last
                last = await self._runner.transact(lambda connection: self._look_again(connection, after))  # noqa: B023
            self._wakeup.announce(None)

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        """Remove a queue's bindings, or one of them."""
        table = self._tables.bindings
        removal = delete(table).where(table.c.queue == queue)
        if binding_key is not None:
            removal = removal.where(table.c.binding_key == binding_key)

        def work(connection: Connection) -> int:
            self._change_bindings(connection)
            return connection.execute(removal).rowcount

        return await self._runner.transact(work)

    def read(self, connection: Connection) -> list[Binding]:
        """All bindings."""
        table = self._tables.bindings
        rows = connection.execute(select(table.c.queue, table.c.binding_key).order_by(*table.c))
        return [Binding(queue, binding_key) for queue, binding_key in rows]

    def of(self, version: int, connection: Connection) -> Bindings:
        """The bindings of a version, read if they are not known or were read too long ago."""
        known = self.known
        if known is None or known.version != version or known.old:
            known = self.known = KnownBindings(version, Bindings(self.read(connection)))
        return known.bindings

    def _change_bindings(self, connection: Connection) -> None:
        make_state(connection, self._tables, self._dialect)
        state = self._tables.state
        # By chance, not one more than before: a restored database would count on from an older number, and come to
        # one that routers know with other bindings. Zero stays what it is before the first change.
        changed = update(state).where(state.c.id == 1).values(bindings_version=1 + randbits(30))
        connection.execute(changed)

    def _look_again(self, connection: Connection, after: int) -> int | None:
        """Let unroutable messages be due at once; the last one's id, none if there are no more."""
        ids = connection.execute(self._unroutable, {"after": after}).scalars().all()
        if not ids:
            return None
        connection.execute(self._due_at_once, {"ids": self._dialect.listed(ids)})
        return ids[-1] if len(ids) == LOOK_AGAIN else None

    @kept_property
    def _unroutable(self) -> Select[Any]:
        columns = self._messages.c
        waiting = columns.unroutable, columns.id > bindparam("after", type_=BigInteger)
        return self._dialect.skipping_locked(select(columns.id).where(*waiting).order_by(columns.id).limit(LOOK_AGAIN))

    @kept_property
    def _due_at_once(self) -> Executable:
        again = self._dialect.update(self._messages).where(self._dialect.among(self._messages.c.id, "ids"))
        return again.values(due_at=self._dialect.clock(), attempts=0)


def locked_version(tables: Tables) -> ScalarSelect[Any]:
    """The bindings' version. The lock on it makes a change wait until the reader has committed."""
    state = tables.state
    version = select(state.c.bindings_version).where(state.c.id == 1).with_for_update(read=True)
    return version.scalar_subquery()
