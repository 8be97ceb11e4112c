"""SqlDeadLetters: the table of messages that are no longer tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Text,
    bindparam,
    func,
    insert,
    literal,
    null,
    select,
)

from outbox.core.dead_letter import DeadLetter, DeadLetters, Deaths, Filter
from outbox.core.errors import NotFound
from outbox.core.kept_property import kept_property
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import with_line
from outbox.stores.queries import readable
from outbox.stores.rows import as_dead_letter, as_shown, history_line
from outbox.stores.runner import Runner
from outbox.stores.tables import MESSAGE_COLUMNS, Tables
from outbox.stores.wakeup import Wakeup


class SqlDeadLetters(DeadLetters):
    """Dead letters of a store: those of its relays, and those of its queues where the database is the transport."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner, wakeup: Wakeup) -> None:
        self._table = tables.dead_letters
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._wakeup = wakeup

    async def chosen(self, filter: Filter) -> list[DeadLetter]:
        columns = self._table.c
        statement = select(*self._all).where(columns.id > filter.after).order_by(columns.id).limit(filter.limit)
        if filter.queue is not None:
            statement = statement.where(columns.destination == filter.queue)
        if filter.reason is not None:
            statement = statement.where(columns.reason == str(filter.reason))
        if filter.error is not None:
            statement = statement.where(columns.error.contains(filter.error, autoescape=True))
        if filter.routing_key is not None:
            statement = statement.where(columns.routing_key == filter.routing_key)
        if filter.since is not None:
            statement = statement.where(columns.died_at >= filter.since.astimezone(UTC))
        if filter.before is not None:
            statement = statement.where(columns.died_at < filter.before.astimezone(UTC))
        rows = await self._runner.look(lambda connection: connection.execute(statement).all())
        return [as_dead_letter(row) for row in rows]

    async def deaths(self, within: timedelta, *, known: Collection[str] = ()) -> list[Deaths]:
        columns = self._table.c
        since = self._dialect.ago(within)
        counted = select(columns.destination, columns.reason, func.count()).where(columns.died_at >= since)
        statement = counted.group_by(columns.destination, columns.reason).order_by(columns.destination, columns.reason)
        rows = await self._runner.survey(lambda connection: connection.execute(statement).all())
        return [
            Deaths(queue=as_shown(queue) or None, reason=as_shown(reason), count=count) for queue, reason, count in rows
        ]

    async def show(self, id: int) -> DeadLetter:
        statement = select(*self._all).where(self._table.c.id == id)
        row = await self._runner.look(lambda connection: connection.execute(statement).first())
        if row is None:
            raise NotFound(f"no dead letter has the id {id}")
        return as_dead_letter(row)

    async def replay(self, ids: Sequence[int]) -> int:
        chosen = {"ids": self._dialect.listed(list(ids))}

        def work(connection: Connection) -> dict[int, str]:
            # The locks of the SELECT hold off a second replay of the same letters until this one has committed.
            found = connection.execute(self._chosen, chosen).all()
            here = {"ids": self._dialect.listed([row.id for row in found])}
            connection.execute(self._revive, here | {"line": history_line("replayed", "attempts start again")})
            connection.execute(self._forget, here)
            return {row.id: row.destination for row in found}

        replayed = await self._runner.transact(work)
        self._wakeup.announce(*set(replayed.values()))
        return len(replayed)

    async def discard(self, ids: Sequence[int]) -> int:
        chosen = {"ids": self._dialect.listed(list(ids))}
        return await self._runner.transact(lambda connection: connection.execute(self._forget, chosen).rowcount)

    @kept_property
    def _all(self) -> list[ColumnElement[Any]]:
        return readable(self._dialect, self._table)

    @kept_property
    def _chosen(self) -> Any:
        columns = self._table.c
        return self._dialect.skipping_locked(
            select(columns.id, columns.destination).where(self._dialect.among(columns.id, "ids"))
        )

    @kept_property
    def _revive(self) -> Executable:
        """Back where it died, as if it had just arrived. A timer that fired long ago is no timer any more."""
        line = bindparam("line", type_=Text)
        fresh: dict[str, ColumnElement[Any]] = {
            "due_at": self._dialect.clock(),
            "first_due_at": null(),
            "expires_at": null(),
            "timer_id": null(),
            "attempts": literal(0),
            "starts": literal(0),
            "history": with_line(self._dialect, self._table.c.history, line),
        }
        names = list(MESSAGE_COLUMNS)
        source = select(*(fresh.get(name, self._table.c[name]).label(name) for name in names))
        return insert(self._messages).from_select(names, source.where(self._dialect.among(self._table.c.id, "ids")))

    @kept_property
    def _forget(self) -> Any:
        return self._dialect.delete(self._table).where(self._dialect.among(self._table.c.id, "ids"))
