"""MysqlSettling: attempts end by one statement for each kind of outcome, which tells how many rows it has changed.

The condition on the lease is part of the statement that changes a row: a process that is frozen between two statements
cannot write under a lease that has ended meanwhile. Which rows these were is asked only where they are not all: then
LeaseLost rolls a transaction of the store's own back, and it runs again with care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Select, Table, bindparam, select

from outbox.core.errors import LeaseLost
from outbox.core.kept_property import kept_property
from outbox.core.store import Lease, Rows
from outbox.stores.burying import SqlBurying
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import held
from outbox.stores.settling import FencedChange, SqlSettling, Token

_CAREFULLY = {"outbox_carefully": True}


def carefully(connection: Connection) -> Connection:
    """A connection on which rows are locked before they are changed, so that it is known which are changed."""
    return connection.execution_options(**_CAREFULLY)


def _is_careful(connection: Connection) -> bool:
    # A caller's connection never is: one attempt ends there, of which the count of rows tells all.
    return isinstance(connection, Connection) and "outbox_carefully" in connection.get_execution_options()


class MysqlChange(FencedChange):
    """Changes rows whose lease still holds. A single row, all rows or none are told by the count."""

    def __init__(self, dialect: SqlDialect, messages: Table, change: Any, fence: ColumnElement[bool]) -> None:
        super().__init__(dialect, messages, change.where(fence), fence)
        bearer = bindparam("bearer", type_=messages.c.lease_token.type)
        self._left = select(messages.c.id).where(dialect.among(messages.c.id, "ids"), messages.c.lease_token == bearer)

    def of_ids(self, connection: Connection, ids: Sequence[int], token: Token) -> set[int]:
        return self._of(connection, ids, token, lambda few: {"ids": self._dialect.listed(sorted(few))})

    def of_rows(self, connection: Connection, rows: Rows, token: Token) -> set[int]:
        def told(few: set[int]) -> dict[str, Any]:
            return {"rows": self._dialect.json([row for row in rows if row["id"] in few])}

        return self._of(connection, [row["id"] for row in rows], token, told)

    def _of(self, connection: Connection, ids: Sequence[int], token: Token, told: Any) -> set[int]:
        wanted = set(ids)
        if _is_careful(connection):
            wanted = self._locked(connection, ids, token)
            if not wanted:
                return wanted
        count = connection.execute(self._change, {**told(wanted), **token}).rowcount
        if count in (0, len(wanted)):
            return wanted if count else set()
        if not _is_careful(connection):
            raise LeaseLost(f"{len(wanted) - count} of {len(wanted)} leases ran out before they were settled")
        [bearer] = token.values()
        left = connection.execute(self._left, {"ids": self._dialect.listed(sorted(wanted)), "bearer": bearer})
        return wanted - set(left.scalars())


class MysqlSettling(SqlSettling):
    """A list of leases is completed in its caller's transaction, which cannot run again: it is locked first."""

    change_class = MysqlChange

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        own, rows = self._callers.on(connection), {"rows": self._as_records(leases)}
        if len(leases) == 1:
            return {leases[0].id} if own.execute(self._completions, rows).rowcount else set()
        found = set(own.execute(self._held_leases, rows).scalars())
        if found:
            held_rows = {"rows": self._as_records([lease for lease in leases if lease.id in found])}
            if own.execute(self._completions, held_rows).rowcount < len(found):
                found -= set(own.execute(self._leases_left, held_rows).scalars())
        return found

    @kept_property
    def _completions(self) -> Any:
        return self._done(self._own_leases).where(self._in_time)

    @kept_property
    def _leases_left(self) -> Select[Any]:
        return self._dialect.locking(select(self._messages.c.id).where(self._own_leases), self._messages)


class MysqlBurying(SqlBurying):
    """A message is deleted only under its lease: if that has ended since it was copied, the copy is rolled back."""

    def _delete(self, connection: Connection, ids: Sequence[int], parameters: Mapping[str, Any]) -> None:
        if "token" not in parameters:  # an expired message is swept out without a lease
            super()._delete(connection, ids, parameters)
            return
        tokens = {name: parameters[name] for name in ("token", "apart")}
        count = connection.execute(self._gone_if_held, {"ids": self._dialect.listed(ids), **tokens}).rowcount
        if count < len(ids):
            raise LeaseLost("a lease ran out before its message was a dead letter")

    @kept_property
    def _gone_if_held(self) -> Executable:
        messages = self._tables.messages
        leased = held(messages, self._dialect) | held(messages, self._dialect, "apart")
        return self._dialect.delete(messages).where(self._dialect.among(messages.c.id, "ids"), leased)
