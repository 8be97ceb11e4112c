"""SqlDeadLetters: the table of messages nobody will try again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    null,
    select,
)

from outbox.core.dead_letter import DeadLetter, DeadLetters, Deaths, Filter
from outbox.core.errors import NotFound
from outbox.stores.looks import readable
from outbox.stores.rows import LONGEST_HISTORY, as_dead_letter, history_line
from outbox.stores.tables import MESSAGE_COLUMNS

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore


class SqlDeadLetters(DeadLetters):
    """Dead letters of a store: those of its relays, and those of its queues where the database is the transport."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._table = store.tables.dead_letters

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
        rows = await self._store.look(lambda connection: connection.execute(statement).all())
        return [as_dead_letter(row) for row in rows]

    async def deaths(self, within: timedelta, *, known: Collection[str] = ()) -> list[Deaths]:
        columns = self._table.c
        since = self._store.later(self._store.now(), literal(-within.total_seconds()))
        counted = select(columns.destination, columns.reason, func.count()).where(columns.died_at >= since)
        statement = counted.group_by(columns.destination, columns.reason).order_by(columns.destination, columns.reason)
        rows = await self._store.survey(lambda connection: connection.execute(statement).all())
        return [Deaths(queue=queue or None, reason=reason, count=count) for queue, reason, count in rows]

    async def show(self, id: int) -> DeadLetter:
        statement = select(*self._all).where(self._table.c.id == id)
        row = await self._store.look(lambda connection: connection.execute(statement).first())
        if row is None:
            raise NotFound(f"no dead letter has the id {id}")
        return as_dead_letter(row)

    async def replay(self, ids: Sequence[int]) -> int:
        chosen = {"ids": self._store.listed(list(ids))}

        def work(connection: Connection) -> set[str]:
            # The locks of the SELECT hold off a second replay of the same letters until this one has committed.
            found = connection.execute(self._chosen, chosen).all()
            here = {"ids": self._store.listed([row.id for row in found])}
            connection.execute(self._revive, here | {"line": history_line("replayed", "attempts start again")})
            connection.execute(self._forget, here)
            replayed.extend(row.id for row in found)
            return {row.destination for row in found}

        replayed: list[int] = []
        self._store.announce(*await self._store.transact(work))
        return len(replayed)

    async def discard(self, ids: Sequence[int]) -> int:
        chosen = {"ids": self._store.listed(list(ids))}
        return await self._store.transact(lambda connection: connection.execute(self._forget, chosen).rowcount)

    @cached_property
    def _all(self) -> list[ColumnElement[Any]]:
        return readable(self._store, self._table)

    @cached_property
    def _chosen(self) -> Any:
        columns = self._table.c
        return self._store.skipping_locked(
            select(columns.id, columns.destination).where(self._store.among(columns.id, "ids"))
        )

    @cached_property
    def _revive(self) -> Executable:
        """Back where it died, as if it had just arrived. A timer that fired long ago is no timer any more."""
        line = bindparam("line", type_=Text)
        fresh: dict[str, ColumnElement[Any]] = {
            "due_at": self._store.clock(),
            "first_due_at": null(),
            "expires_at": null(),
            "timer_id": null(),
            "attempts": literal(0),
            "starts": literal(0),
            "history": self._store.ending(
                case((self._table.c.history.is_(None), line), else_=self._table.c.history + line), LONGEST_HISTORY
            ),
        }
        names = list(MESSAGE_COLUMNS)
        source = select(*(fresh.get(name, self._table.c[name]).label(name) for name in names))
        return insert(self._store.messages).from_select(names, source.where(self._store.among(self._table.c.id, "ids")))

    @cached_property
    def _forget(self) -> Any:
        return delete(self._table).where(self._store.among(self._table.c.id, "ids"))
