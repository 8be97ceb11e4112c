"""Returning: the same in fewer statements, for databases whose UPDATE, DELETE and INSERT tell what they wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, String, Table, bindparam, select

from outbox.core.kept_property import kept_property
from outbox.core.store import Lease, Rows
from outbox.stores.dialect import SqlDialect
from outbox.stores.inbox import COLUMNS, Entry, SqlInbox
from outbox.stores.rows import ClaimedRow
from outbox.stores.selecting import SqlSelecting
from outbox.stores.settling import FencedChange, SqlSettling, Token


class ReturningSelecting(SqlSelecting):
    """Locks what it finds, then updates and reads it by one statement."""

    def _take(self, connection: Connection, ids: Sequence[int], terms: Mapping[str, Any]) -> Sequence[ClaimedRow]:
        leased: Any = connection.execute(self._take_statement, {**terms, "ids": self._dialect.listed(ids)}).all()
        return leased  # type: ignore[no-any-return]

    @kept_property
    def _take_statement(self) -> Any:
        return self._lease.returning(*self._told(self._isolated))


class ReturningChange(FencedChange):
    """Changes rows whose lease still holds, and tells which, by one statement."""

    def __init__(self, dialect: SqlDialect, messages: Table, change: Any, fence: ColumnElement[bool]) -> None:
        self._dialect = dialect
        self._statement = change.where(fence).returning(messages.c.id)

    def of_ids(self, connection: Connection, ids: Sequence[int], token: Token) -> set[int]:
        chosen = {"ids": self._dialect.listed(ids), **token}
        return set(connection.execute(self._statement, chosen).scalars())

    def of_rows(self, connection: Connection, rows: Rows, token: Token) -> set[int]:
        chosen = {"rows": self._dialect.json(rows), **token}
        return set(connection.execute(self._statement, chosen).scalars())


class ReturningSettling(SqlSettling):
    """Attempts end by one statement for each kind of outcome."""

    change_class = ReturningChange

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        rows = {"rows": self._as_records(leases)}
        return set(self._callers.on(connection).execute(self._completions, rows).scalars())

    @kept_property
    def _completions(self) -> Any:
        return self._done(self._own_leases).where(self._in_time).returning(self._messages.c.id)


class ReturningInbox(SqlInbox):
    """Many entries by one statement."""

    def _enter(self, connection: Connection, queue: str, message_ids: Sequence[str], also: str | None) -> set[str]:
        entries: dict[str, Any] = {"queue": queue, "rows": self._named(message_ids)}
        if also is None:
            return set(connection.execute(self._many, entries).scalars())
        return set(connection.execute(self._many_renamed, entries | {"also": also}).scalars())

    def _enter_all(self, connection: Connection, entries: Sequence[Entry]) -> set[Entry]:
        records = self._dialect.json([{"queue": queue, "message_id": id} for queue, id in entries])
        return {(queue, id) for queue, id in connection.execute(self._several, {"rows": records})}

    @kept_property
    def _many(self) -> Any:
        return self._entries(renamed=False)

    @kept_property
    def _many_renamed(self) -> Any:
        return self._entries(renamed=True)

    def _entries(self, *, renamed: bool) -> Any:
        """In one order for all workers: of two lists with messages in common, one waits for the other."""
        named = self._dialect.records("rows", {"message_id": String}).alias("named")
        id = named.c.message_id
        source = select(bindparam("queue", type_=String), id, self._dialect.clock())
        # Without a WHERE, SQLite takes the ON of what follows for the beginning of a join.
        source = source.where(id.is_not(None), *([self._unknown(id)] if renamed else ())).order_by(id)
        return self._dialect.ignoring(self._inbox).from_select(COLUMNS, source).returning(self._inbox.c.message_id)

    @kept_property
    def _several(self) -> Any:
        """In one order for all processes, as above."""
        named = self._dialect.records("rows", {"queue": String, "message_id": String}).alias("named")
        source = select(named.c.queue, named.c.message_id, self._dialect.clock())
        source = source.where(named.c.message_id.is_not(None)).order_by(named.c.queue, named.c.message_id)
        entries = self._dialect.ignoring(self._inbox).from_select(COLUMNS, source)
        return entries.returning(self._inbox.c.queue, self._inbox.c.message_id)
