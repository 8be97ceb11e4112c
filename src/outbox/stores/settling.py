"""SqlSettling: how attempts end in SQL. Every write carries the token of its lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Float,
    Select,
    String,
    Table,
    Text,
    Uuid,
    bindparam,
    case,
    func,
    null,
    select,
)

from outbox.core.attempt import Reason
from outbox.core.durations import IMMEDIATELY, Retention
from outbox.core.kept_property import kept_property
from outbox.core.store import Lease, Rows
from outbox.stores.callers import CallerConnections
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import held, one_less, one_more, set_in_order, with_line
from outbox.stores.tables import Tables

Token = Mapping[str, UUID]  # what a fence binds

_UNTRIED = (Reason.EXPIRED, Reason.CRASHED)  # found out before the listener ran: no attempt, and no start either


class FencedChange:
    """Changes rows whose lease still holds, and tells which: locks them, then changes them by their ids."""

    def __init__(self, dialect: SqlDialect, messages: Table, change: Any, fence: ColumnElement[bool]) -> None:
        self._dialect = dialect
        chosen = select(messages.c.id).where(dialect.among(messages.c.id, "ids"), fence)
        self._lock = dialect.locking(chosen, messages)
        self._change = change

    def of_ids(self, connection: Connection, ids: Sequence[int], token: Token) -> set[int]:
        locked = self._locked(connection, ids, token)
        if locked:
            connection.execute(self._change, {"ids": self._dialect.listed(sorted(locked))})
        return locked

    def of_rows(self, connection: Connection, rows: Rows, token: Token) -> set[int]:
        """The same, where the change is told more of each row than its id."""
        locked = self._locked(connection, [row["id"] for row in rows], token)
        if locked:
            changed = [row for row in rows if row["id"] in locked]
            connection.execute(self._change, {"rows": self._dialect.json(changed)})
        return locked

    def _locked(self, connection: Connection, ids: Sequence[int], token: Token) -> set[int]:
        return set(connection.execute(self._lock, {"ids": self._dialect.listed(ids), **token}).scalars())


class SqlSettling:
    """The statements; built once for each store."""

    change_class: ClassVar[type[FencedChange]] = FencedChange

    def __init__(
        self, tables: Tables, dialect: SqlDialect, callers: CallerConnections, clean_up_after: Retention
    ) -> None:
        self._messages = tables.messages
        self._dialect = dialect
        self._callers = callers
        self._clean_up_after = clean_up_after

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        """Complete rows under whatever leases, each by its own token, in a caller's transaction."""
        own = self._callers.on(connection)
        found = own.execute(self._held_leases, {"rows": self._as_records(leases)}).scalars().all()
        if found:
            own.execute(self._done_by_ids, {"ids": self._dialect.listed(found)})
        return set(found)

    def _as_records(self, leases: Sequence[Lease]) -> str:
        return self._dialect.json([{"id": lease.id, "lease_token": lease.token.hex} for lease in leases])

    @kept_property
    def _held_leases(self) -> Select[Any]:
        found = select(self._messages.c.id).where(self._own_leases, self._in_time)
        return self._dialect.locking(found, self._messages)

    @property
    def _own_leases(self) -> ColumnElement[bool]:
        columns = self._messages.c
        leases = self._dialect.records("rows", {"id": BigInteger, "lease_token": Uuid}).alias("leases")
        return self._dialect.are_among(leases, columns.id, columns.lease_token)

    @property
    def _in_time(self) -> ColumnElement[bool]:
        return self._messages.c.lease_until > self._dialect.clock()

    @kept_property
    def done(self) -> FencedChange:
        return self._fenced(self._done_by_ids, self._held)

    @kept_property
    def _done_by_ids(self) -> Any:
        return self._done(self._by_ids)

    @kept_property
    def completion(self) -> Any:
        """One row's end."""
        return self._done(self._messages.c.id == bindparam("row_id")).where(self._held)

    @kept_property
    def done_without_lease(self) -> Any:
        """The end of rows that were never leased, because the log brought them."""
        return self._done(self._by_ids).where(self._messages.c.done_at.is_(None))

    def _done(self, chosen: ColumnElement[bool]) -> Any:
        if self._clean_up_after == IMMEDIATELY:
            return self._dialect.delete(self._messages).where(chosen)
        return (
            self._dialect.update(self._messages)
            .where(chosen)
            .values(
                done_at=self._dialect.clock(),
                attempts=one_more(self._messages.c.attempts),
                lease_token=null(),
                lease_until=null(),
            )
        )

    @kept_property
    def retry(self) -> FencedChange:
        columns = self._messages.c
        rows = self._dialect.records("rows", {"id": BigInteger, "delay": Float, "line": Text}).alias("settled")
        change = set_in_order(
            self._dialect.update(self._messages).where(columns.id == rows.c.id),
            **self._put_off(rows.c.delay),
            attempts=one_more(columns.attempts),
            history=with_line(self._dialect, columns.history, rows.c.line),
            lease_token=null(),
            lease_until=null(),
        )
        return self._fenced(change, self._held)

    @kept_property
    def dead(self) -> Select[Any]:
        columns = self._messages.c
        said = {"id": BigInteger, "reason": String, "error": Text, "line": Text}
        rows = self._dialect.records("rows", said).alias("settled")
        untried = rows.c.reason.in_([reason.value for reason in _UNTRIED])
        chosen = select(
            columns.id,
            rows.c.reason,
            rows.c.error,
            case((untried, columns.attempts), else_=one_more(columns.attempts)).label("attempts"),
            case((untried, one_less(columns.starts)), else_=columns.starts).label("starts"),
            with_line(self._dialect, columns.history, rows.c.line).label("history"),
        ).where(columns.id == rows.c.id, self._held | self._held_apart)
        return self._dialect.locking(chosen, self._messages)

    @kept_property
    def release(self) -> FencedChange:
        columns = self._messages.c
        change = (
            self._dialect.update(self._messages)
            .where(self._by_ids)
            .values(starts=one_less(columns.starts), lease_token=null(), lease_until=null())
        )
        return self._fenced(change, self._held)

    @kept_property
    def start(self) -> Any:
        """From now on it is leased like the others, and its start is counted."""
        columns = self._messages.c
        return (
            self._dialect.update(self._messages)
            .where(columns.id == bindparam("row_id"), self._held_apart)
            .values(
                starts=one_more(columns.starts),
                lease_token=bindparam("token", type_=columns.lease_token.type),
                lease_until=self._dialect.later(self._dialect.clock(), bindparam("lease", type_=Float)),
            )
        )

    @kept_property
    def release_unstarted(self) -> FencedChange:
        """A release of what was not started; it may be due only later."""
        columns = self._messages.c
        rows = self._dialect.records("rows", {"id": BigInteger, "delay": Float}).alias("settled")
        later = self._put_off(rows.c.delay)
        kept = {name: case((rows.c.delay > 0.0, value), else_=columns[name]) for name, value in later.items()}
        change = self._dialect.update(self._messages).where(columns.id == rows.c.id)
        change = set_in_order(change, **kept, lease_token=null(), lease_until=null())
        return self._fenced(change, self._held_apart)

    @kept_property
    def postpone(self) -> FencedChange:
        """A release after which a row is due only later."""
        columns = self._messages.c
        rows = self._dialect.records("rows", {"id": BigInteger, "delay": Float}).alias("settled")
        change = set_in_order(
            self._dialect.update(self._messages).where(columns.id == rows.c.id),
            **self._put_off(rows.c.delay),
            starts=one_less(columns.starts),
            lease_token=null(),
            lease_until=null(),
        )
        return self._fenced(change, self._held)

    def _put_off(self, delay: ColumnElement[float]) -> dict[str, Any]:
        """A message is as old as when it was due at first: a copy of it may have arrived then."""
        columns = self._messages.c
        return {
            "first_due_at": func.coalesce(columns.first_due_at, columns.due_at),
            "due_at": self._dialect.later(self._dialect.clock(), delay),
        }

    @kept_property
    def renew(self) -> Any:
        return self._renewal.where(self._by_ids, self._held)

    @kept_property
    def renew_unstarted(self) -> Any:
        return self._renewal.where(self._by_ids, self._held_apart)

    @property
    def _renewal(self) -> Any:
        until = self._dialect.later(self._dialect.clock(), bindparam("lease", type_=Float))
        return self._dialect.update(self._messages).values(lease_until=until)

    def _fenced(self, change: Any, fence: ColumnElement[bool]) -> FencedChange:
        return self.change_class(self._dialect, self._messages, change, fence)

    @property
    def _by_ids(self) -> ColumnElement[bool]:
        return self._dialect.among(self._messages.c.id, "ids")

    @property
    def _held(self) -> ColumnElement[bool]:
        return held(self._messages, self._dialect)

    @property
    def _held_apart(self) -> ColumnElement[bool]:
        return held(self._messages, self._dialect, "apart")
