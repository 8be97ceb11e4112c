"""SqlStore: what every SQL database does alike. Each database's file says what it does differently."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, TypeVar
from uuid import UUID, uuid4

from sqlalchemy import (
    URL,
    Boolean,
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    Executable,
    Float,
    FromClause,
    Insert,
    Row,
    Select,
    String,
    Table,
    Text,
    Uuid,
    bindparam,
    case,
    create_engine,
    delete,
    insert,
    literal,
    null,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.types import TypeEngine

from outbox.core.attempt import Attempt, Reason
from outbox.core.binding import Binding, Bindings, first_match
from outbox.core.durations import Retention
from outbox.core.message import Message, Schedule
from outbox.core.store import DISCARD, Backlog, Routing, Rows, StoredMessage
from outbox.stores import looks
from outbox.stores.claims import BURIAL, SettleStatements, SqlClaim
from outbox.stores.dead_letters import SqlDeadLetters
from outbox.stores.finish import finish
from outbox.stores.rows import LONGEST_HISTORY, as_attempt, as_seconds, history_line, message_row
from outbox.stores.tables import NOT_ROUTED, Tables, message_columns
from outbox.stores.wakeup import Wakeup

Result = TypeVar("Result")

LONGEST_PAUSE = 300  # seconds between two looks at a message that no binding matches

_MESSAGE_COLUMNS = tuple(column.name for column in message_columns())


class SqlStore(ABC):
    """Messages in tables. Statements are built here, the few words that databases spell differently are methods."""

    async_drivers: ClassVar[tuple[str, ...]]
    sync_drivers: ClassVar[tuple[str, ...]]

    @classmethod
    def make_engine(cls, url: URL) -> AsyncEngine:
        # Error texts go to logs: the parameters of a statement are somebody's data.
        return create_async_engine(url, hide_parameters=True, pool_pre_ping=True)

    @classmethod
    def make_sync_engine(cls, url: URL) -> Engine:
        return create_engine(url, hide_parameters=True, pool_pre_ping=True)

    @classmethod
    def safe_engine(cls, given: AsyncEngine) -> AsyncEngine:
        return given

    def __init__(self, tables: Tables, clean_up_after: Retention) -> None:
        self.tables = tables
        self.messages: Table = tables.messages
        self.clean_up_after = clean_up_after
        self.dead_letters = SqlDeadLetters(self)
        self.settling = SettleStatements(self)
        self._wakeup = Wakeup()
        self._ready = False
        self._known_bindings: tuple[int, Bindings] | None = None

    # How a database does it.

    @abstractmethod
    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work on a connection of the store's own, in one transaction."""

    @abstractmethod
    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together: one round trip each where the database can."""

    @abstractmethod
    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""

    @abstractmethod
    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute a statement on the caller's connection, in the caller's transaction; how many rows it wrote."""

    @staticmethod
    def execute(connection: Connection, statement: Executable, rows: Rows | None) -> int:
        """One row goes as a plain statement, several as one batch."""
        return connection.execute(statement, rows[0] if rows and len(rows) == 1 else rows).rowcount

    @abstractmethod
    def create(self, connection: Connection) -> None:
        """Make what is missing."""

    @abstractmethod
    def now(self) -> ColumnElement[Any]:
        """The database's time when the transaction began; indexes can be searched with it."""

    @abstractmethod
    def clock(self) -> ColumnElement[Any]:
        """The database's time at this very moment."""

    @abstractmethod
    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        """A moment that many seconds after another; NULL if the seconds are."""

    @abstractmethod
    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        """How many seconds from now a moment is."""

    @abstractmethod
    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Whether a column's value is in the list bound under this name."""

    @abstractmethod
    def listed(self, values: Sequence[Any]) -> Any:
        """The list to bind for `among`."""

    @abstractmethod
    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        """A table whose rows are the JSON list of objects bound under this name."""

    @abstractmethod
    def ignoring(self, table: Table) -> Insert:
        """An INSERT that does nothing where a unique index already has the row."""

    @abstractmethod
    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        """The last characters of a text."""

    @abstractmethod
    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        """A SELECT that locks what it finds and passes over what others have locked."""

    @abstractmethod
    def rows_written(self, connection: Connection) -> int:
        """How many rows the messages table was ever given."""

    async def open(self) -> None:
        """Get ready; tables are made if they are missing."""
        if not self._ready:
            await self.create_tables()
            self._ready = True

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""

    async def create_tables(self) -> None:
        await finish(self._transact(self.create))

    # How the store's own work runs: on tables that exist, and to its end whatever happens to the caller.

    async def transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work in one transaction."""
        await self.open()
        return await finish(self._transact(work))

    async def apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together."""
        await self.open()
        return await finish(self._apply(work))

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""
        await self.open()
        return await finish(self._look(work))

    # Statements for the caller's own connection.

    def insert(self, messages: Sequence[Message], schedule: Schedule) -> tuple[Executable, Rows]:
        statement = self._insert if schedule.timer_id is None else self._insert_timer
        due = schedule.due
        times = {
            "due": due if isinstance(due, datetime) else None,
            "delay": as_seconds(due) if isinstance(due, timedelta) else 0.0,
            "expiration": as_seconds(schedule.expiration) if schedule.expiration else None,
            "timer_id": schedule.timer_id,
        }
        return statement, [message_row(message) | times for message in messages]

    def cancel(self, timer_id: str) -> Executable:
        return delete(self.messages).where(
            self.messages.c.timer_id == timer_id,
            self.messages.c.destination == NOT_ROUTED,
            self.messages.c.done_at.is_(None),
            self._unleased(self.clock()),
        )

    def remember(self, queue: str, message_id: str) -> Executable:
        entry = self.ignoring(self.tables.inbox).values(queue=queue, message_id=message_id, entered_at=self.clock())
        return entry.execution_options(preserve_rowcount=True)

    # Burying.

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        """Move the rows that a SELECT of the columns in BURIAL names to the dead letters; returns their ids.

        Three steps, for databases whose `apply` is a transaction.
        """
        found = connection.execute(statement, parameters).all()
        if not found:
            return []
        ids = [row.id for row in found]
        rows = [dict(row._mapping) for row in found]
        connection.execute(self._copy_dead, {"rows": self.json(rows)})
        gone = delete(self.messages).where(self.among(self.messages.c.id, "ids"))
        connection.execute(gone, {"ids": self.listed(ids)})
        return ids

    @cached_property
    def _copy_dead(self) -> Executable:
        chosen = self.records("rows", BURIAL).alias("chosen")
        columns = self.messages.c
        kept = [name for name in _MESSAGE_COLUMNS if name not in BURIAL]
        source = select(
            self.clock(), *(chosen.c[name] for name in BURIAL if name != "id"), *(columns[name] for name in kept)
        ).where(columns.id == chosen.c.id)
        names = ["died_at", *(name for name in BURIAL if name != "id"), *kept]
        return insert(self.tables.dead_letters).from_select(names, source)

    # Claiming.

    async def anything_due(self, wanted: Mapping[str, Any]) -> bool:
        """Whether a claim is worth its locks. Where looking costs as much as claiming, it always is."""
        return True

    def claim(self, limit: int, *, lease: timedelta, destination: str | None = None, suspects: bool = True) -> SqlClaim:
        wanted = {"wanted": destination or NOT_ROUTED, "limit": limit, "suspects": suspects}
        return SqlClaim(self, wanted, lease)

    def take(
        self, connection: Connection, wanted: Mapping[str, Any], token: UUID, lease: timedelta
    ) -> tuple[list[Attempt], list[int]]:
        """Lease due messages: the attempts, and the ids of those whose expiration has passed."""
        rows = self._take(connection, wanted, {"token": token, "lease": as_seconds(lease)})
        rows.sort(key=lambda row: (row.due_at, row.id))
        expired = [row.id for row in rows if row.expired]
        return [as_attempt(row) for row in rows if not row.expired], expired

    def _take(self, connection: Connection, wanted: Mapping[str, Any], lease: Mapping[str, Any]) -> list[Row[Any]]:
        """Choose, then lease: two steps, for databases whose `apply` is a transaction."""
        found = connection.execute(self._due, wanted).all()
        if found and found[0].lease_until is not None:
            chosen = found[:1]
        else:
            chosen = [row for row in found if row.lease_until is None]
        if not chosen:
            return []
        ids = {"ids": self.listed([row.id for row in chosen])}
        return list(connection.execute(self._lease, {**lease, **ids}).all())

    @cached_property
    def _due(self) -> Select[Any]:
        columns = self.messages.c
        return self.skipping_locked(
            select(columns.id, columns.lease_until, columns.routing_key)
            .where(
                columns.destination == bindparam("wanted"),
                columns.done_at.is_(None),
                columns.due_at <= self.now(),
                columns.lease_until.is_(None)
                | (bindparam("suspects", type_=Boolean) & (columns.lease_until <= self.now())),
            )
            .order_by(columns.due_at, columns.id)
            .limit(bindparam("limit"))
        )

    @cached_property
    def _lease(self) -> Any:
        return self.leasing(self.among(self.messages.c.id, "ids"))

    def leasing(self, chosen: ColumnElement[bool]) -> Any:
        """The statement that leases rows, counts their start, and tells what they hold."""
        columns = self.messages.c
        wanted = [columns[name] for name in ("id", *_MESSAGE_COLUMNS) if name not in ("history", "timer_id")]
        return (
            update(self.messages)
            .where(chosen)
            .values(
                lease_token=bindparam("token", type_=Uuid),
                lease_until=self.later(self.now(), bindparam("lease", type_=Float)),
                starts=columns.starts + 1,
            )
            .returning(*wanted, (columns.expires_at <= self.now()).label("expired"))
        )

    def _unleased(self, moment: ColumnElement[Any]) -> ColumnElement[bool]:
        until = self.messages.c.lease_until
        return until.is_(None) | (until <= moment)

    # Waiting.

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        if longest > 0.2:  # shorter sleeps are not worth a question
            longest = min(longest, await self._until_next_due(destination or NOT_ROUTED, longest))
        if longest > 0:
            await self._wakeup.wait(destination or NOT_ROUTED, longest)

    def announce(self, *destinations: str | None) -> None:
        for destination in destinations:
            self._wakeup.ring(destination or NOT_ROUTED)

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _until_next_due(self, destination: str, at_most: float) -> float:
        statement = (
            select(self.seconds_until(self.messages.c.due_at))
            .where(
                self.messages.c.destination == destination,
                self.messages.c.done_at.is_(None),
                self.messages.c.due_at > self.now(),
            )
            .order_by(self.messages.c.due_at)
            .limit(1)
        )
        found = await self.look(lambda connection: connection.scalar(statement))
        return at_most if found is None else max(0.0, float(found))

    # Routing.

    async def bind(self, bindings: Sequence[Binding]) -> None:
        def work(connection: Connection) -> None:
            table = self.tables.bindings
            known = {tuple(row) for row in connection.execute(select(table.c.queue, table.c.binding_key))}
            new = [b for b in bindings if (b.queue, b.binding_key) not in known]
            if new:
                self._change_bindings(connection)
                rows = [{"queue": binding.queue, "binding_key": binding.binding_key} for binding in new]
                connection.execute(self.ignoring(table), rows)

        await self.transact(work)
        # In a transaction of its own: a router that holds messages waits for the bindings' version, so whoever holds
        # the version must not wait for messages.
        await self.transact(lambda connection: connection.execute(self._look_again))
        self.announce(None)

    async def unbind(self, queue: str) -> int:
        def work(connection: Connection) -> int:
            self._change_bindings(connection)
            table = self.tables.bindings
            return connection.execute(delete(table).where(table.c.queue == queue)).rowcount

        return await self.transact(work)

    async def bindings(self) -> list[Binding]:
        return await self.look(self._read_bindings)

    async def route(self, limit: int, unroutable: Mapping[str, str]) -> Routing:
        wanted = {"wanted": NOT_ROUTED, "limit": limit, "suspects": True}
        if not await self.anything_due(wanted):
            return Routing()
        return await self.transact(lambda connection: self._route(connection, wanted, unroutable))

    def _route(self, connection: Connection, wanted: Mapping[str, Any], unroutable: Mapping[str, str]) -> Routing:
        rows = connection.execute(self._due, wanted).all()
        if not rows:
            return Routing()
        bindings = self._current_bindings(connection)
        groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        lost: defaultdict[str, list[int]] = defaultdict(list)
        unwanted: list[int] = []
        for row in rows:
            queues = bindings.queues(row.routing_key)
            if queues:
                groups[queues].append(row.id)
            elif first_match(unroutable, row.routing_key) == DISCARD:
                unwanted.append(row.id)
            else:
                lost[row.routing_key].append(row.id)
        routed: Counter[str] = Counter()
        for queues, ids in groups.items():
            self._send_to(connection, queues, ids)
            routed.update({queue: len(ids) for queue in queues})
        for routing_key, ids in lost.items():
            line = history_line("unroutable", f"no queue is bound to {routing_key!r}")
            connection.execute(self._pause_unroutable, {"ids": self.listed(ids), "line": line})
        if unwanted:
            gone = delete(self.messages).where(self.among(self.messages.c.id, "ids"))
            connection.execute(gone, {"ids": self.listed(unwanted)})
        return Routing(len(rows), routed, {key: len(ids) for key, ids in lost.items()}, len(unwanted))

    def _send_to(self, connection: Connection, queues: tuple[str, ...], ids: list[int]) -> None:
        """The message stays in its row for the first queue; each further queue gets a copy."""
        first, *further = queues
        chosen = {"ids": self.listed(ids)}
        for queue in further:
            connection.execute(self._copy_to, chosen | {"queue": queue})
        connection.execute(self._move_to, chosen | {"queue": first})

    @cached_property
    def _move_to(self) -> Executable:
        return (
            update(self.messages)
            .where(self.among(self.messages.c.id, "ids"))
            .values(
                destination=bindparam("queue"),
                routed_at=self.clock(),
                unroutable=False,
                attempts=0,
                starts=0,
                lease_token=null(),
                lease_until=null(),
            )
        )

    @cached_property
    def _copy_to(self) -> Executable:
        columns = self.messages.c
        fresh: dict[str, ColumnElement[Any]] = {
            "destination": bindparam("queue", type_=String),
            "routed_at": self.clock(),
            "attempts": literal(0),
            "starts": literal(0),
        }
        source = select(*(fresh.get(name, columns[name]) for name in _MESSAGE_COLUMNS))
        return insert(self.messages).from_select(list(_MESSAGE_COLUMNS), source.where(self.among(columns.id, "ids")))

    @cached_property
    def _pause_unroutable(self) -> Executable:
        columns = self.messages.c
        pause = case((columns.attempts > 8, LONGEST_PAUSE), else_=literal(1).bitwise_lshift(columns.attempts))
        return (
            update(self.messages)
            .where(self.among(columns.id, "ids"))
            .values(
                unroutable=True,
                attempts=columns.attempts + 1,
                due_at=self.later(self.clock(), pause),
                history=case((columns.history.is_(None), bindparam("line", type_=Text)), else_=columns.history),
            )
        )

    @cached_property
    def _look_again(self) -> Executable:
        columns = self.messages.c
        return update(self.messages).where(columns.unroutable).values(due_at=self.clock(), attempts=0)

    def _current_bindings(self, connection: Connection) -> Bindings:
        """The bindings of this moment. The lock on their version makes a change wait until this routing committed."""
        version = connection.scalar(select(self.tables.state.c.bindings_version).with_for_update(read=True)) or 0
        if self._known_bindings is None or self._known_bindings[0] != version:
            self._known_bindings = (version, Bindings(self._read_bindings(connection)))
        return self._known_bindings[1]

    def _read_bindings(self, connection: Connection) -> list[Binding]:
        table = self.tables.bindings
        rows = connection.execute(select(table.c.queue, table.c.binding_key).order_by(*table.c))
        return [Binding(queue, binding_key) for queue, binding_key in rows]

    def _change_bindings(self, connection: Connection) -> None:
        self.make_state(connection)
        state = self.tables.state
        connection.execute(update(state).values(bindings_version=state.c.bindings_version + 1))

    def make_state(self, connection: Connection) -> None:
        """Make the one row of the state table if it is missing: migrations make tables, not rows."""
        connection.execute(self.ignoring(self.tables.state), {"id": 1, "bindings_version": 0})

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        rows = [
            message_row(message) | {"queue": queue, "expires": message.expires_at, "timer_id": None}
            for message in messages
            for queue in destinations.get(message.id, ())
        ]
        if rows:
            statement = insert(self.messages).values(
                destination=bindparam("queue"),
                expires_at=bindparam("expires", type_=DateTime(timezone=True)),
                due_at=self.clock(),
                routed_at=self.clock(),
            )
            await self.transact(lambda connection: connection.execute(statement.inline(), rows))
            self.announce(*{row["queue"] for row in rows})

    async def record_transport(self, name: str, *, switch: bool = False) -> str:
        def work(connection: Connection) -> str:
            self.make_state(connection)
            state = self.tables.state
            free = state.c.transport.is_(None) if not switch else state.c.id == 1
            connection.execute(update(state).where(free).values(transport=name))
            return str(connection.scalar(select(state.c.transport)))

        return await self.transact(work)

    # Cleaning up.

    async def purge(self, keep: timedelta, limit: int) -> int:
        columns = self.messages.c
        old = select(columns.id).where(columns.done_at < self._ago(keep)).order_by(columns.done_at).limit(limit)
        return await self._delete(delete(self.messages).where(columns.id.in_(self.skipping_locked(old))))

    async def purge_inbox(self, keep: timedelta, limit: int) -> int:
        table = self.tables.inbox
        entry = tuple_(table.c.queue, table.c.message_id)
        old = select(*entry).where(table.c.entered_at < self._ago(keep)).order_by(table.c.entered_at).limit(limit)
        return await self._delete(delete(table).where(entry.in_(self.skipping_locked(old))))

    async def expire(self, limit: int) -> int:
        columns = self.messages.c
        past = columns.expires_at <= self.now()
        waits = columns.done_at.is_(None) & self._unleased(self.now())
        chosen = self.skipping_locked(
            select(
                columns.id,
                literal(Reason.EXPIRED.value, String).label("reason"),
                literal("", Text).label("error"),
                columns.attempts,
                columns.starts,
            )
            .where(past, waits)
            .order_by(columns.expires_at)
            .limit(limit)
        )
        return len(await self.transact(lambda connection: self.bury(connection, chosen, {})))

    def _ago(self, keep: timedelta) -> ColumnElement[Any]:
        return self.later(self.now(), literal(-as_seconds(keep), Float))

    async def _delete(self, statement: Any) -> int:
        return await self.apply(lambda connection: connection.execute(statement).rowcount)

    # Looking.

    async def backlog(self) -> Backlog:
        return await self.look(lambda connection: looks.backlog(self, connection))

    async def list_messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]:
        return await self.look(lambda connection: looks.messages(self, connection, state, queue, limit, after))

    async def find(self, message_id: str) -> list[StoredMessage]:
        return await self.look(lambda connection: looks.find(self, connection, message_id))

    # Shared by the claims and the statements above.

    @cached_property
    def _insert(self) -> Insert:
        return insert(self.messages).values(**self._times()).inline().execution_options(preserve_rowcount=True)

    @cached_property
    def _insert_timer(self) -> Insert:
        timer = self.ignoring(self.messages).values(**self._times()).inline()
        return timer.execution_options(preserve_rowcount=True)

    def _times(self) -> dict[str, ColumnElement[Any]]:
        given = bindparam("due", type_=DateTime(timezone=True))
        due = self._either(given, self.later(self.clock(), bindparam("delay", type_=Float)))
        return {"due_at": due, "expires_at": self.later(due, bindparam("expiration", type_=Float))}

    def _either(self, first: ColumnElement[Any], second: ColumnElement[Any]) -> ColumnElement[Any]:
        return case((first.is_not(None), first), else_=second)

    def appended_history(self, line: ColumnElement[str]) -> ColumnElement[str]:
        """The history with a further line, its beginning forgotten when it grows too long."""
        history = self.messages.c.history
        return self.ending(case((history.is_(None), line), else_=history + line), LONGEST_HISTORY)

    def held(self, token: UUID | None = None) -> ColumnElement[bool]:
        """The fence: the lease is still this claim's, by the database's clock at this very moment."""
        columns = self.messages.c
        own = bindparam("token", type_=Uuid) if token is None else literal(token, Uuid)
        return (columns.lease_token == own) & (columns.lease_until > self.clock())

    @staticmethod
    def json(rows: Rows) -> str:
        """Rows for `records`."""
        return json.dumps(rows)

    @staticmethod
    def new_token() -> UUID:
        return uuid4()
