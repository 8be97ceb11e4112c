"""SqlEntering: entries in the inbox, one for each queue and message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Executable, String, bindparam, delete, exists, not_, select

from outbox.core.store import Rows, Seal

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

COLUMNS = ("queue", "message_id", "entered_at")
SEALS = "webhook-id"  # in place of a queue, in entries of requests; no message's id in a queue of that name is a digest


class SealsBroken(Exception):
    """Requests that are known were read in another way before, or two of them now."""

    def __init__(self, seals: frozenset[Seal]) -> None:
        super().__init__()
        self.seals = seals


class SqlEntering:
    """What a listener's transaction writes first, where its messages come from elsewhere."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._inbox = store.tables.inbox

    def one(self, queue: str, message_id: str, also: str | None) -> tuple[Executable, Rows]:
        entry = {"entered_queue": queue, "entered_id": message_id}
        return (self._one, [entry]) if also is None else (self._renamed, [entry | {"also": also}])

    def many(self, connection: Connection, queue: str, message_ids: Sequence[str], also: str | None) -> set[str]:
        entries: dict[str, Any] = {"queue": queue, "rows": self._named(message_ids)}
        if also is None:
            return set(connection.execute(self._many, entries).scalars())
        return set(connection.execute(self._many_renamed, entries | {"also": also}).scalars())

    def sealed(
        self, connection: Connection, queue: str, message_ids: Sequence[str], seals: Sequence[Seal]
    ) -> frozenset[str]:
        """Enter messages together with the requests that brought them; which messages are new.

        A request has two entries for each mark: one of the mark alone, and one of how it was read as well. If
        only the second is new, the request is read in another way than it was before: SealsBroken, to be rolled back.
        """
        readings = {mark: seal.reading for seal in reversed(seals) for mark in seal.marks}  # of equal ones the first
        marks = {entry for mark, reading in readings.items() for entry in (mark, _reading_entry(mark, reading))}
        rows = [*((queue, id) for id in message_ids), *((SEALS, mark) for mark in marks)]
        records = self._store.json([{"queue": queue, "message_id": id} for queue, id in rows])
        new = {tuple(row) for row in connection.execute(self._sealed, {"rows": records})}

        def is_broken(seal: Seal, mark: str) -> bool:
            entry = _reading_entry(mark, seal.reading)
            return readings[mark] != seal.reading or ((SEALS, mark) not in new and (SEALS, entry) in new)

        broken = frozenset(seal for seal in seals if any(is_broken(seal, mark) for mark in seal.marks))
        if broken:
            raise SealsBroken(broken)
        return frozenset(id for id in message_ids if (queue, id) in new)

    def forget(self, connection: Connection, queue: str, message_ids: Sequence[str]) -> None:
        connection.execute(self._forget, {"queue": queue, "rows": self._named(message_ids)})

    def _named(self, message_ids: Sequence[str]) -> str:
        return self._store.json([{"message_id": message_id} for message_id in message_ids])

    @cached_property
    def _one(self) -> Executable:
        entry = {
            "queue": bindparam("entered_queue"),
            "message_id": bindparam("entered_id"),
            "entered_at": self._store.clock(),
        }
        return self._store.ignoring(self._inbox).values(entry).execution_options(preserve_rowcount=True)

    @cached_property
    def _renamed(self) -> Executable:
        id = bindparam("entered_id", type_=String)
        source = select(bindparam("entered_queue", type_=String), id, self._store.clock()).where(self._unknown(id))
        entries = self._store.ignoring(self._inbox).from_select(COLUMNS, source)
        return entries.execution_options(preserve_rowcount=True)

    @cached_property
    def _many(self) -> Any:
        return self._entries(renamed=False)

    @cached_property
    def _many_renamed(self) -> Any:
        return self._entries(renamed=True)

    def _entries(self, *, renamed: bool) -> Any:
        """In one order for all workers: of two lists with messages in common, one waits for the other."""
        named = self._store.records("rows", {"message_id": String}).alias("named")
        id = named.c.message_id
        source = select(bindparam("queue", type_=String), id, self._store.clock())
        # Without a WHERE, SQLite takes the ON of what follows for the beginning of a join.
        source = source.where(id.is_not(None), *([self._unknown(id)] if renamed else ())).order_by(id)
        return self._store.ignoring(self._inbox).from_select(COLUMNS, source).returning(self._inbox.c.message_id)

    @cached_property
    def _sealed(self) -> Any:
        """In one order for all processes, as above."""
        named = self._store.records("rows", {"queue": String, "message_id": String}).alias("named")
        source = select(named.c.queue, named.c.message_id, self._store.clock())
        source = source.where(named.c.message_id.is_not(None)).order_by(named.c.queue, named.c.message_id)
        entries = self._store.ignoring(self._inbox).from_select(COLUMNS, source)
        return entries.returning(self._inbox.c.queue, self._inbox.c.message_id)

    def _unknown(self, message_id: ColumnElement[str]) -> ColumnElement[bool]:
        """Whether there is no entry from when the queue had another name."""
        before = self._inbox.alias("before")
        return not_(
            exists().where(before.c.queue == bindparam("also", type_=String), before.c.message_id == message_id)
        )

    @cached_property
    def _forget(self) -> Executable:
        named = self._store.records("rows", {"message_id": String}).alias("named")
        return delete(self._inbox).where(
            self._inbox.c.queue == bindparam("queue", type_=String),
            self._inbox.c.message_id.in_(select(named.c.message_id)),
        )


def _reading_entry(mark: str, reading: str) -> str:
    return sha256(f"{mark} {reading}".encode()).hexdigest()
