"""SqlEntering: entries in the inbox, one for each queue and message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Executable, String, bindparam, delete, exists, not_, select

from outbox.core.store import Rows

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

COLUMNS = ("queue", "message_id", "entered_at")


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
