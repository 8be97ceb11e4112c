"""SqlInbox: entries in the inbox, one for each queue and message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256

from sqlalchemy import ColumnElement, Connection, Executable, String, bindparam, exists, not_, select

from outbox.core.kept_property import kept_property
from outbox.core.store import Rows, Seal
from outbox.stores.callers import CallerConnections
from outbox.stores.dialect import SqlDialect
from outbox.stores.runner import Runner
from outbox.stores.tables import Tables

COLUMNS = ("queue", "message_id", "entered_at")
SEALS = "webhook-id"  # in place of a queue, in entries of requests; no message's id in a queue of that name is a digest

Entry = tuple[str, str]  # of a queue and a message's id


class SealsBroken(Exception):
    """Requests that are known were read in another way before, or two of them now."""

    def __init__(self, seals: frozenset[Seal]) -> None:
        super().__init__()
        self.seals = seals


class SqlInbox:
    """What a listener's transaction writes first, where its messages come from elsewhere."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner, callers: CallerConnections) -> None:
        self._inbox = tables.inbox
        self._dialect = dialect
        self._runner = runner
        self._callers = callers

    def remember(self, queue: str, message_id: str, *, also: str | None = None) -> tuple[Executable, Rows]:
        entry = {"entered_queue": queue, "entered_id": message_id}
        return (self._one, [entry]) if also is None else (self._renamed, [entry | {"also": also}])

    def remember_all(
        self, connection: Connection, queue: str, message_ids: Sequence[str], *, also: str | None = None
    ) -> set[str]:
        return self._enter(self._callers.on(connection), queue, message_ids, also)

    def forget(self, connection: Connection, queue: str, message_ids: Sequence[str]) -> None:
        entries = {"queue": queue, "rows": self._named(message_ids)}
        self._callers.on(connection).execute(self._forget, entries)

    async def purge(self, keep: timedelta, limit: int) -> int:
        columns = self._inbox.c
        before = columns.entered_at < self._dialect.ago(keep)
        old = self._dialect.skipping_locked(
            select(columns.queue, columns.message_id).where(before).order_by(columns.entered_at).limit(limit)
        )

        def work(connection: Connection) -> int:
            found = connection.execute(old).all()
            rows = self._dialect.json([{"queue": row.queue, "message_id": row.message_id} for row in found])
            return connection.execute(self._purge, {"rows": rows}).rowcount if found else 0

        return await self._runner.transact(work)

    def sealed(
        self, connection: Connection, queue: str, message_ids: Sequence[str], seals: Sequence[Seal]
    ) -> frozenset[str]:
        """Enter messages together with the requests that brought them; which messages are new.

        A request has two entries for each mark: one of the mark alone, and one of how it was read as well. If
        only the second is new, the request is read in another way than it was before: SealsBroken, to be rolled back.
        """
        readings = {mark: seal.reading for seal in reversed(seals) for mark in seal.marks}  # of equal ones the first
        marks = {entry for mark, reading in readings.items() for entry in (mark, _reading_entry(mark, reading))}
        entries = [*((queue, id) for id in message_ids), *((SEALS, mark) for mark in marks)]
        new = self._enter_all(self._callers.on(connection), entries)

        def is_broken(seal: Seal, mark: str) -> bool:
            entry = _reading_entry(mark, seal.reading)
            return readings[mark] != seal.reading or ((SEALS, mark) not in new and (SEALS, entry) in new)

        broken = frozenset(seal for seal in seals if any(is_broken(seal, mark) for mark in seal.marks))
        if broken:
            raise SealsBroken(broken)
        return frozenset(id for id in message_ids if (queue, id) in new)

    def _enter(self, connection: Connection, queue: str, message_ids: Sequence[str], also: str | None) -> set[str]:
        """Enter many messages; which of them are new. One by one, where a list would not tell."""
        new = set()
        for message_id in sorted(set(message_ids)):  # in one order for all: of two workers, one waits for the other
            statement, [entry] = self.remember(queue, message_id, also=also)
            if self._dialect.enter(connection, statement, entry):
                new.add(message_id)
        return new

    def _enter_all(self, connection: Connection, entries: Sequence[Entry]) -> set[Entry]:
        """The same for several queues."""
        new = set()
        for queue, message_id in sorted(set(entries)):
            entry = {"entered_queue": queue, "entered_id": message_id}
            if self._dialect.enter(connection, self._one, entry):
                new.add((queue, message_id))
        return new

    def _named(self, message_ids: Sequence[str]) -> str:
        return self._dialect.json([{"message_id": message_id} for message_id in message_ids])

    @kept_property
    def _one(self) -> Executable:
        entry = {
            "queue": bindparam("entered_queue"),
            "message_id": bindparam("entered_id"),
            "entered_at": self._dialect.clock(),
        }
        return self._dialect.ignoring(self._inbox).values(entry).execution_options(preserve_rowcount=True)

    @kept_property
    def _renamed(self) -> Executable:
        id = bindparam("entered_id", type_=String)
        source = select(bindparam("entered_queue", type_=String), id, self._dialect.clock()).where(self._unknown(id))
        entries = self._dialect.ignoring(self._inbox).from_select(COLUMNS, source)
        return entries.execution_options(preserve_rowcount=True)

    def _unknown(self, message_id: ColumnElement[str]) -> ColumnElement[bool]:
        """Whether there is no entry from when the queue had another name."""
        before = self._inbox.alias("before")
        return not_(
            exists().where(before.c.queue == bindparam("also", type_=String), before.c.message_id == message_id)
        )

    @kept_property
    def _forget(self) -> Executable:
        named = self._dialect.records("rows", {"message_id": String}).alias("named")
        return self._dialect.delete(self._inbox).where(
            self._inbox.c.queue == bindparam("queue", type_=String),
            self._dialect.are_among(named, self._inbox.c.message_id),
        )

    @kept_property
    def _purge(self) -> Executable:
        named = self._dialect.records("rows", {"queue": String, "message_id": String}).alias("named")
        columns = self._inbox.c
        return self._dialect.delete(self._inbox).where(
            self._dialect.are_among(named, columns.queue, columns.message_id)
        )


def _reading_entry(mark: str, reading: str) -> str:
    return sha256(f"{mark} {reading}".encode()).hexdigest()
