"""PostgreSQL: leases in one statement, wake-ups by NOTIFY from a connection of our own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar
from weakref import ref

from sqlalchemy import (
    ARRAY,
    CTE,
    URL,
    BigInteger,
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    Executable,
    Float,
    FromClause,
    Insert,
    Integer,
    Row,
    Select,
    String,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    func,
    insert,
    literal_column,
    not_,
    null,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSON, JSONB, REGCLASS
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Finding
from outbox.core.durations import LATEST, OLDEST, Retention
from outbox.core.errors import ConfigurationError, TransactionError
from outbox.core.finish import finish
from outbox.core.loops import LoopLocal, running_loop
from outbox.core.store import Difference, Rows, Suspected
from outbox.core.transaction_state import TransactionState
from outbox.stores import notifying_thread, postgresql_examination, postgresql_receiving, postgresql_state
from outbox.stores.claims import BURIAL
from outbox.stores.heads import Head
from outbox.stores.notify import Notifier
from outbox.stores.places import Places
from outbox.stores.plain_line import PlainLine
from outbox.stores.pooling import explained, unprepared
from outbox.stores.postgresql_batches import count, fitting
from outbox.stores.postgresql_check import PostgresqlCheck, as_array, present_tables
from outbox.stores.snapshots import Snapshots
from outbox.stores.spare import spare
from outbox.stores.sql import WORK_WITHIN, SqlStore
from outbox.stores.straight import fetched
from outbox.stores.tables import MESSAGE_COLUMNS, NOT_ROUTED, Tables

Result = TypeVar("Result")
Found = TypeVar("Found", bound=Sequence[Any])

GOODBYE = 5.0  # seconds for closing connections

_CONFLICTS = ("40001", "40P01")  # a serialization failure, a deadlock
_UNDEFINED_TABLE = "42P01"  # a schema that is not there is one too
_SECOND: ColumnElement[Any] = literal_column("interval '1 second'")


class PostgresqlStore(SqlStore):
    """Messages in PostgreSQL, through asyncpg or psycopg."""

    async_drivers = ("asyncpg", "psycopg")
    sync_drivers = ("psycopg", "psycopg2")
    notifies_in_thread = True

    @classmethod
    def connect_args(cls, url: URL) -> dict[str, Any]:
        return unprepared(url)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        super().__init__(tables, clean_up_after)
        self._given = engine
        self._loops = LoopLocal(lambda: _InLoop(Notifier(self)), _InLoop.close)
        self._places = Places(self, engine)
        self._snapshots = Snapshots()
        self._heads: defaultdict[str, Head] = defaultdict(Head)
        self._callers: ref[Engine] | None = None  # a plain engine by which messages came, where there is no other
        self._calm: set[str] = set()  # destinations of which nothing was heard since a claim found nothing

    async def _own(self) -> _Engines:
        """Connections of our own, made as the given engine makes its: listeners may use up the given pool."""
        in_loop = self._loops.here()
        if in_loop.engines is None:
            engine = await self.spare_engine()
            in_loop.engines = in_loop.engines or _Engines(engine)
        return in_loop.engines

    @property
    def _notifier(self) -> Notifier:
        return self._loops.here().notifier

    async def spare_engine(self) -> AsyncEngine:
        """A further engine that connects as the given one does."""
        if self._given is None:
            raise ConfigurationError("this needs an async database: call setup(db_engine_url=…) with an async driver")
        if not hasattr(self._given.dialect, "default_isolation_level"):
            # SQLAlchemy asks the server once what it can do, on the given pool's first connection, and a pool beside it
            # would not wait for the answer. That connection is not left there: it is this loop's.
            async with self._given.connect() as connection:
                await connection.invalidate()
        return AsyncEngine(spare(self._given.sync_engine))

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self._own()).transactions.begin() as connection:
                return await connection.run_sync(work)

    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self._own()).statements.connect() as connection:
                return await connection.run_sync(work)

    _look = _apply

    async def _survey(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self._own()).snapshots.begin() as connection:
                return await connection.run_sync(work)

    @property
    def driver(self) -> str:
        """The name of the driver that connections of our own use."""
        return "" if self._given is None else self._given.dialect.driver

    async def close(self) -> None:
        await self.lost_claims.close()
        await self._loops.close()
        await notifying_thread.thread.run(self._loops.close, GOODBYE)

    # The caller's connection.

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        if self._given is None and not connection.dialect.is_async and (self._callers is None or not self._callers()):
            self._callers = ref(connection.engine)
        with explained(connection.dialect.driver):
            return self.execute(self.on(connection), statement, rows)

    def on(self, connection: Connection) -> Connection:
        return self._places.on(connection)

    async def open(self) -> None:
        await super().open()
        await self._places.find_own()

    async def first_look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, before it is known where the tables are."""
        return await self._look(work)

    def explained(self, error: BaseException) -> TransactionError | None:
        return self.tables_missing() if _state(error) == _UNDEFINED_TABLE else None

    def driver_state_of(self, connection: Connection) -> TransactionState:
        return postgresql_state.state_of(connection)

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        return postgresql_state.query_counter(connection)

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        return postgresql_state.is_aborted(connection, in_doubt=in_doubt)

    def is_own_conflict(self, error: BaseException) -> bool:
        return _state(error) in _CONFLICTS

    def keeps_snapshot(self, connection: Connection) -> bool:
        return self._snapshots.are_kept(connection)

    def create(self, connection: Connection, schema: str | None = None) -> None:
        if self.missing(connection, schema):  # a role that may not create is fine when there is nothing to create
            # Two processes that start at the same time: CREATE TABLE IF NOT EXISTS alone would collide.
            connection.execute(text("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('outbox tables'))"))
            missing = self.missing(connection, schema)
            # Without a look of SQLAlchemy's own, which compares names as VARCHAR.
            self.tables.metadata.create_all(connection, tables=missing, checkfirst=False)

    def missing(self, connection: Connection, schema: str | None = None) -> list[Table]:
        tables = self.tables.metadata.sorted_tables
        present = present_tables(connection, [each.name for each in tables], self.messages.schema or schema)
        return [each for each in tables if each.name not in present]

    def differences(self, connection: Connection) -> list[Difference]:
        return PostgresqlCheck(connection, self.tables).differences()

    def server(self, connection: Connection) -> str:
        return postgresql_examination.server(connection)

    def findings(self, connection: Connection) -> Iterator[Finding]:
        return postgresql_examination.findings(self.tables, connection)

    # Waking up.

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        await self._notifier.listen(longest)
        await super().wait(longest, destination=destination)

    def announce(self, *destinations: str | None) -> None:
        self._calm.difference_update(destination or NOT_ROUTED for destination in destinations)
        super().announce(*destinations)
        self._notify({destination or NOT_ROUTED for destination in destinations})

    def _notify(self, destinations: set[str]) -> None:
        """Wake other processes, from an event loop of this one, or from a thread of ours where there is none."""
        loop = running_loop()
        if loop is None or loop not in self._loops:
            for other, in_loop in self._loops.elsewhere().items():  # a loop that lasts speaks for one that may not
                with suppress(RuntimeError):  # it was closed meanwhile
                    if not in_loop.notifier.is_pending(destinations):
                        other.call_soon_threadsafe(in_loop.notifier.notify, destinations)
                    return
        if loop is not None and self._given is not None:
            self.notify_here(destinations)
        elif self.notifies_in_thread and (self._given is not None or self._callers is not None):
            notifying_thread.thread.notify(self, destinations)

    def notify_here(self, destinations: set[str]) -> None:
        """Wake other processes from the running event loop."""
        self._notifier.notify(destinations)

    def plain_line(self) -> PlainLine:
        """A connection beside the engine of callers, where this store has none of its own."""
        engine = None if self._callers is None else self._callers()
        if engine is None:
            raise ConfigurationError("the engine of the callers is gone")
        return PlainLine(engine, self._places.on)

    def heard(self, destination: str) -> None:
        """Another process has work for this destination."""
        self._calm.discard(destination)
        self._wakeup.ring(destination)

    def heard_everything(self) -> None:
        """Nobody listened until now: there may be work for anybody."""
        self._calm.clear()
        self._wakeup.ring_all()

    # How PostgreSQL spells it.

    def now(self) -> ColumnElement[Any]:
        return func.now()

    def clock(self) -> ColumnElement[Any]:
        return func.clock_timestamp()

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        # A driver may leave a missing value without a type, for which an operator of another role could fit.
        return moment + cast(seconds, Float) * _SECOND

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        # Each on its own: a difference to infinity is an error before PostgreSQL 17.
        date_part = func.pg_catalog.date_part
        return date_part("epoch", moment, type_=Float) - date_part("epoch", func.now(), type_=Float)

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        if not isinstance(column.type, DateTime):
            return column
        known = (column >= _time(OLDEST)) & (column < _time(LATEST))
        return case((known, column), else_=null() if otherwise is None else _time(otherwise))

    def before_all(self) -> ColumnElement[Any]:
        return literal_column("timestamptz '-infinity'", DateTime(timezone=True))

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column == any_(cast(bindparam(name, type_=Text), ARRAY(BigInteger)))

    def listed(self, values: Sequence[Any]) -> Any:
        return as_array(values)

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        # Texts as TEXT, not VARCHAR: see `texts`.
        typed = [column(each, Text if types is String else types) for each, types in columns.items()]
        rows = cast(bindparam(name, type_=Text), JSON)
        return func.json_to_recordset(rows).table_valued(*typed).render_derived(with_types=True)

    def ignoring(self, table: Table) -> Insert:
        # Without naming a constraint: naming one would ask for the right to read.
        return postgresql_insert(table).on_conflict_do_nothing()

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.pg_catalog.right(text, length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement.with_for_update(skip_locked=True)

    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        return func.pg_catalog.octet_length(column, type_=Integer)

    def rows_written(self, connection: Connection) -> int:
        quoted = connection.dialect.identifier_preparer.format_table(self.messages)
        sequence = func.pg_catalog.pg_get_serial_sequence(quoted, "id")
        return int(connection.scalar(select(func.pg_catalog.pg_sequence_last_value(sequence))) or 0)

    def place(self, connection: Connection, rows: Rows) -> None:
        if postgresql_receiving.fits_in_json(rows):
            records = [postgresql_receiving.as_record(row) for row in rows]
            connection.execute(self._place_statement, {"rows": self.json(records)})
        else:
            super().place(connection, rows)

    @cached_property
    def _place_statement(self) -> Executable:
        return postgresql_receiving.placing(self)

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        """One statement: whoever sees the row gone sees the dead letter."""
        messages, dead_letters = self.messages, self.tables.dead_letters
        said = [name for name in BURIAL if name != "id"]
        kept = [name for name in MESSAGE_COLUMNS if name not in BURIAL]
        chosen = statement.cte("chosen")
        gone = (
            delete(messages)
            .where(messages.c.id == chosen.c.id)
            .returning(messages.c.id, *(chosen.c[name] for name in said), *(messages.c[name] for name in kept))
            .cte("gone")
        )
        source = select(self.clock(), *(gone.c[name] for name in (*said, *kept)))
        buried = insert(dead_letters).from_select(["died_at", *said, *kept], source).cte("buried")
        return list(connection.execute(select(gone.c.id).add_cte(buried), parameters).scalars())

    # Looking while nothing happens, without a pool and SQLAlchemy's execution.

    async def glance(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        await self.open()
        return await finish(self._notifier.ask(statement, parameters), WORK_WITHIN)

    async def anything_due(self, wanted: Mapping[str, Any]) -> bool:
        """A claim that found nothing is followed by questions, which are cheaper."""
        if wanted["wanted"] not in self._calm or not self._notifier.has_line:
            return True
        with self._heads[wanted["wanted"]].looking() as look:
            look.found = await self.glance(self.due, {**wanted, "limit": 1, "since": look.bound})
            look.ended = not look.found
        return bool(look.found)

    # Claiming in one round trip.

    def search(self, connection: Connection, statement: Any, parameters: Mapping[str, Any]) -> list[Row[Any]]:
        return self._look_for(connection, parameters, lambda all: list(connection.execute(statement, all).all()), len)

    def _look_for(
        self,
        connection: Connection,
        parameters: Mapping[str, Any],
        find: Callable[[Mapping[str, Any]], Found],
        found: Callable[[Found], int],
    ) -> Found:
        head = self._heads[parameters["wanted"]]
        with head.looking() as look:
            rows = find({**parameters, "since": look.bound})
            look.found, look.ended = rows, found(rows) < parameters["limit"]
        if head.in_doubt:
            head.counted(self._dead_rows(connection))
        return rows

    def _dead_rows(self, connection: Connection) -> int:
        quoted = connection.dialect.identifier_preparer.format_table(self.messages)
        return int(connection.scalar(select(func.pg_catalog.pg_stat_get_dead_tuples(cast(quoted, REGCLASS)))) or 0)

    def fetched(
        self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        return fetched(connection, statement, parameters)

    def take(
        self, connection: Connection, wanted: Mapping[str, Any], terms: Mapping[str, Any], suspected: Suspected
    ) -> Sequence[Sequence[Any]]:
        take = self._take_all if suspected is Suspected.ALL else self._take_one_suspected
        rows = self._look_for(
            connection,
            {**wanted, **terms},
            lambda all: self.fetched(connection, take, all),
            lambda rows: rows[0][-1] if rows else 0,
        )
        (self._calm.discard if rows else self._calm.add)(wanted["wanted"])
        return rows

    @cached_property
    def _take_all(self) -> Any:
        found = self.due.cte("found")
        return self._taking(found, select(found.c.id))

    @cached_property
    def _take_one_suspected(self) -> Any:
        found = self.due.cte("found")
        first = select(found.c.id).where(found.c.suspected).limit(1).scalar_subquery()
        return self._taking(found, select(found.c.id).where(not_(found.c.suspected) | (found.c.id == first)))

    def _taking(self, found: CTE, chosen: Select[Any]) -> Any:
        leased = self.leasing_some_apart(self.messages.c.id == any_(fitting(found, chosen)))
        return leased.returning(count(found))

    # Routing in one round trip.

    async def route_straight(
        self, parameters: Mapping[str, Any], hold: Callable[[Sequence[Sequence[Any]]], None]
    ) -> None:
        head = self._heads[parameters["wanted"]]
        statement, asked = self._route_straight_statement, dict(parameters)
        if len(asked["rooms"]) == 1 and asked["limit"] <= min(asked["rooms"].values()):
            statement = self._route_to_one_statement
            del asked["rooms"]

        async def work() -> None:
            with head.looking() as look:
                rows = await self._notifier.ask(statement, {**asked, "since": look.bound})
                hold(rows)
                if rows and rows[0][-1] == len(rows):  # otherwise the head stays where somebody still waits
                    look.found, look.ended = rows, len(rows) < parameters["limit"]
            if head.in_doubt:
                head.counted(await self._apply(self._dead_rows))

        await self.open()
        await finish(work(), WORK_WITHIN)

    @cached_property
    def _route_straight_statement(self) -> Any:
        found = self.due.cte("found")
        queue = _queue_of(found)
        position = func.row_number().over(partition_by=queue, order_by=(found.c.due_at, found.c.id))
        ranked = select(found.c.id, queue.label("queue"), position.label("position")).subquery("ranked")
        room = cast(bindparam("rooms", type_=JSONB).op("->>")(ranked.c.queue), Integer)
        return self._routing_straight(found, select(ranked.c.id).where(ranked.c.position <= room))

    @cached_property
    def _route_to_one_statement(self) -> Any:
        """The same for a queue that has room for everything: nobody needs to be counted."""
        found = self.due.cte("found")
        return self._routing_straight(found, select(found.c.id).where(_queue_of(found).is_not(None)))

    def _routing_straight(self, found: CTE, chosen: Select[Any]) -> Any:
        # Nothing is chosen when the bindings are not those that the queues were told by.
        chosen = chosen.where(self.routing.version == bindparam("version", type_=Integer))
        chosen_ones = self.messages.c.id == any_(fitting(found, chosen))
        leased = self.leasing(chosen_ones, **self.routing.moved(_queue_of(self.messages)), starts=1)
        return leased.returning(self.messages.c.destination, count(found))


def _time(moment: datetime) -> ColumnElement[Any]:
    """A constant: what is bound would be sent with every statement. Its year has four digits, or it is another one."""
    return literal_column(f"timestamptz '{moment.isoformat(sep=' ')}'", DateTime(timezone=True))


def _queue_of(messages: FromClause) -> ColumnElement[Any]:
    """The queue of a message, of those that a statement is told."""
    return bindparam("queues", type_=JSONB).op("->>")(cast(messages.c.routing_key, Text))


class _InLoop:
    """What of a store belongs to one event loop."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.engines: _Engines | None = None

    async def close(self) -> None:
        await self.notifier.close()
        engines, self.engines = self.engines, None
        if engines is not None:
            # A connection says goodbye to its server, which may not answer any more.
            await asyncio.wait([asyncio.ensure_future(engines.statements.dispose())], timeout=GOODBYE)


class _Engines:
    """One pool, for statements that stand alone, for transactions, and for looks at one moment."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.statements = engine.execution_options(isolation_level="AUTOCOMMIT")
        # Rows are locked and looked at anew: a stricter level, if the application likes one, would only fail.
        self.transactions = engine.execution_options(isolation_level="READ COMMITTED")
        self.snapshots = engine.execution_options(isolation_level="REPEATABLE READ")


def _state(error: BaseException) -> object:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg2 has its own word
