"""LoggedTable: what the feed writes and reads in the outbox table. It leases nothing that comes by the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    Select,
    Text,
    Update,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.types import UserDefinedType

from outbox.core.attempt import Outcome
from outbox.core.kept_property import kept_property
from outbox.core.store import Selection
from outbox.stores.claiming import SqlClaim, SqlFeed
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql.selecting import PostgresqlSelecting
from outbox.stores.runner import Runner
from outbox.stores.selecting import Tokens, lease_parameters
from outbox.stores.tables import NOT_ROUTED, Tables

# A row with `first_due_at` is left to the table: it was not due when it was committed, or was put off, or the log did
# not bring it. All others come by the log. So no message is in both, whatever was confirmed or deleted last.

SWEEP = 1000  # rows that one statement leaves to the table

_XIDS = 2**32


@dataclass(frozen=True, slots=True)
class SeenTransactions:
    """Which transactions a statement could see. Decoding may tell of one a moment before others see it."""

    next: int  # with its epoch; nothing from here on was seen
    running: Collection[int]

    @classmethod
    def of(cls, text: str) -> SeenTransactions:
        """As PostgreSQL writes a snapshot: xmin:xmax:running,running."""
        _, following, running = text.split(":")
        return cls(int(following), frozenset(int(each) for each in running.split(",") if each))

    def has(self, xid: int) -> bool:
        """Whether a transaction was seen, by its number without the epoch."""
        if any(each % _XIDS == xid for each in self.running):
            return False
        return (xid - self.next) % _XIDS >= _XIDS // 2


class LeftSelecting(PostgresqlSelecting):
    """Claims only rows that are left to the table."""

    def _further(self) -> tuple[ColumnElement[bool], ...]:
        return (self._messages.c.first_due_at.is_not(None),)

    @kept_property
    def take_over(self) -> Any:
        """Leases rows that came by the log, for an outcome that keeps them."""
        columns = self._messages.c
        chosen = self._dialect.among(columns.id, "ids") & columns.done_at.is_(None)
        unleased = columns.lease_until.is_(None) | (columns.lease_until <= self._dialect.clock())
        marked = {"first_due_at": func.coalesce(columns.first_due_at, columns.due_at)}
        return self._leasing(chosen & unleased, **marked).returning(*self._told(self._isolated))


class LoggedTable:
    """The statements, and the claims of what is left to the table."""

    def __init__(
        self, tables: Tables, dialect: SqlDialect, runner: Runner, feed: SqlFeed, selecting: LeftSelecting
    ) -> None:
        self._tables = tables
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._selecting = selecting
        self.feed = feed

    async def done(self, ids: Sequence[int]) -> tuple[set[int], SeenTransactions]:
        """Delete rows whose message was confirmed, or mark them where done ones are kept."""
        return await self._changed(self._done, {"ids": self._dialect.listed(ids)})

    async def leave(self, ids: Sequence[int]) -> tuple[set[int], SeenTransactions]:
        """Leave rows to the table: from now on they are polled."""
        return await self._changed(self._leave, {"ids": self._dialect.listed(ids)})

    async def fresh(self, ids: Sequence[int]) -> tuple[dict[int, str | None], SeenTransactions]:
        """Which of these rows are there: their messages' ids; none of one that is not to be delivered from the log."""
        parameters = {"ids": self._dialect.listed(ids)}

        def work(connection: Connection) -> tuple[dict[int, str | None], SeenTransactions]:
            rows = connection.execute(self._fresh, parameters).all()
            seen = SeenTransactions.of(rows[0].seen)
            return {row.id: row.message_id if row.fresh else None for row in rows if row.id is not None}, seen

        return await self._runner.apply(work)

    async def seen(self) -> SeenTransactions:
        """Which transactions statements can see now."""
        [row] = await self._runner.ask(select(_SEEN), {})
        return SeenTransactions.of(str(row[0]))

    async def settle(self, outcomes: Mapping[int, Outcome], selection: Selection) -> frozenset[int]:
        """Write outcomes that keep rows: lease them first, then settle them like any others. Says which were there."""
        tokens = Tokens.new()
        claim = SqlClaim(self.feed, selection, tokens)
        parameters = {**lease_parameters(selection, tokens), "ids": self._dialect.listed(list(outcomes))}

        def take(connection: Connection) -> None:
            rows: Any = connection.execute(self._selecting.take_over, parameters).all()
            claim.bury(connection, claim.hold(rows))

        async with claim:
            await self._runner.apply(take)
            held = {attempt.id for attempt in claim.attempts}
            lost = await claim.settle({id: outcome for id, outcome in outcomes.items() if id in held})
        return frozenset(held) - lost

    async def sweep_bound(self) -> tuple[str, int]:
        """Every transaction before the first has a commit before the second, a position."""
        return await self._runner.apply(lambda connection: _bound(connection))

    async def sweep(self, before: str) -> int:
        """Leave to the table what was committed before that transaction and is still fresh; how many there were.

        Only after everything that the log has of that time was settled: what is left then, the log did not bring.
        """
        parameters = {"before": before, "limit": SWEEP}
        swept = 0
        while True:
            found, _ = await self._changed(self._sweep, parameters)
            swept += len(found)
            if len(found) < SWEEP:
                return swept

    async def leave_all(self) -> int:
        """Leave everything to the table that is there now: for a slot that was just made; how many there were."""
        swept = 0
        while True:
            found, _ = await self._changed(self._leave_all, {"limit": SWEEP})
            swept += len(found)
            if len(found) < SWEEP:
                return swept

    async def _changed(self, statement: Executable, parameters: Mapping[str, Any]) -> tuple[set[int], SeenTransactions]:
        def work(connection: Connection) -> tuple[set[int], SeenTransactions]:
            ids, seen = connection.execute(statement, parameters).one()
            return set(ids or ()), SeenTransactions.of(seen)

        return await self._runner.apply(work)

    @kept_property
    def _done(self) -> Executable:
        return self._telling(self.feed.settling.done_without_lease)

    @kept_property
    def _leave(self) -> Executable:
        return self._telling(self._leaving(self._dialect.among(self._messages.c.id, "ids")))

    @kept_property
    def _sweep(self) -> Executable:
        columns = self._messages.c
        age = func.pg_catalog.age
        before = cast(cast(bindparam("before", type_=Text), Text), _Xid())
        older = age(literal_column("xmin")) > age(before)
        return self._telling(self._leaving(columns.id.in_(self._unbrought.where(older))))

    @kept_property
    def _leave_all(self) -> Executable:
        return self._telling(self._leaving(self._messages.c.id.in_(self._unbrought)))

    @property
    def _unbrought(self) -> Select[Any]:
        columns = self._messages.c
        found = select(columns.id).where(
            columns.destination == NOT_ROUTED,
            columns.done_at.is_(None),
            columns.first_due_at.is_(None),
        )
        return self._dialect.skipping_locked(found.order_by(columns.due_at, columns.id).limit(bindparam("limit")))

    def _leaving(self, chosen: Any) -> Update:
        columns = self._messages.c
        return update(self._messages).where(chosen, columns.first_due_at.is_(None)).values(first_due_at=columns.due_at)

    def _telling(self, change: Any) -> Executable:
        """What a change wrote, and what it could see."""
        changed = change.returning(self._messages.c.id).cte("changed")
        ids = select(func.pg_catalog.array_agg(changed.c.id, type_=ARRAY(BigInteger))).scalar_subquery()
        return select(ids, _SEEN).add_cte(changed)

    @kept_property
    def _fresh(self) -> Executable:
        columns = self._messages.c
        fresh = columns.done_at.is_(None) & columns.first_due_at.is_(None)
        chosen = self._dialect.among(columns.id, "ids")
        rows = select(columns.id, columns.message_id, fresh.label("fresh")).where(chosen).subquery("rows")
        snapshot = select(_SEEN.label("seen")).subquery("snapshot")
        return select(rows.c.id, rows.c.message_id, rows.c.fresh, snapshot.c.seen).select_from(
            snapshot.outerjoin(rows, literal_column("true"))
        )


class _Xid(UserDefinedType[Any]):
    """PostgreSQL's number of a transaction, without the epoch."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid"


_SEEN = cast(func.pg_catalog.pg_current_snapshot(), Text)


def _bound(connection: Connection) -> tuple[str, int]:
    first = func.pg_catalog.pg_snapshot_xmin(func.pg_catalog.pg_current_snapshot())
    position = func.pg_catalog.pg_wal_lsn_diff(func.pg_catalog.pg_current_wal_insert_lsn(), literal_column("'0/0'"))
    row = connection.execute(select(cast(first, Text), position)).one()
    return str(int(row[0]) % _XIDS), int(row[1])
