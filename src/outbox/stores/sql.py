"""SqlStore: what every SQL database does alike. Each database's file says what it does differently."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, TypeVar
from uuid import UUID, uuid4

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    Executable,
    Float,
    Insert,
    Integer,
    Row,
    Select,
    String,
    Table,
    Text,
    Uuid,
    bindparam,
    case,
    cast,
    create_engine,
    delete,
    func,
    insert,
    literal,
    not_,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.core.attempt import Reason
from outbox.core.binding import Binding
from outbox.core.diagnosis import Claimable, Examination, Finding
from outbox.core.durations import EARLIEST, Retention
from outbox.core.errors import TablesMissing, TransactionError, causes
from outbox.core.finish import finish
from outbox.core.message import Message, Schedule
from outbox.core.store import (
    TRANSPORT,
    AnyEngine,
    Backlog,
    Circuit,
    Difference,
    Lease,
    Receipt,
    Reception,
    Routing,
    Rows,
    Seal,
    StoredMessage,
    Suspected,
    Wanted,
)
from outbox.core.transaction_state import TransactionState
from outbox.stores import circuits, examination, looks, owners
from outbox.stores.claims import BURIAL, SettleStatements, SqlClaim, executed, one_more
from outbox.stores.dead_letters import SqlDeadLetters
from outbox.stores.entering import SqlEntering
from outbox.stores.failures import failure_in, nothing_is_kept
from outbox.stores.idle import ask_the_doubtful
from outbox.stores.lost_claims import LostClaims
from outbox.stores.receiving import SqlReceiving
from outbox.stores.routing import SqlRouting
from outbox.stores.rows import CLAIMED, EXPIRATION_PASSED, LONGEST_HISTORY, as_seconds, history_line, message_row
from outbox.stores.sockets import cut_in_children
from outbox.stores.spelling import Spelling
from outbox.stores.tables import MESSAGE_COLUMNS, NOT_ROUTED, Tables
from outbox.stores.texts import as_text
from outbox.stores.wakeup import Wakeup
from outbox.stores.weights import Weight, how_many_fit

Result = TypeVar("Result")

WORK_WITHIN = 40.0  # seconds for a statement of ours: longer than SQLite waits for its turn, shorter than a lease
LOOK_WITHIN = 300.0  # seconds for looking, which may have to count millions


class SqlStore(Spelling):
    """Messages in tables. Statements are built here, the few words that databases spell differently are methods."""

    async_drivers: ClassVar[tuple[str, ...]]
    sync_drivers: ClassVar[tuple[str, ...]]
    writes_side_by_side = True
    connections_can_die: ClassVar[bool] = True  # while they lie in a pool

    @classmethod
    def make_engine(cls, url: URL) -> AsyncEngine:
        # Error texts go to logs: the parameters of a statement are somebody's data.
        engine = create_async_engine(url, hide_parameters=True, connect_args=cls.connect_args(url))
        if cls.connections_can_die:
            ask_the_doubtful(engine.sync_engine)
            cut_in_children(engine.sync_engine)
        return engine

    @classmethod
    def make_sync_engine(cls, url: URL) -> Engine:
        engine = create_engine(url, hide_parameters=True, connect_args=cls.connect_args(url))
        if cls.connections_can_die:
            ask_the_doubtful(engine)
            cut_in_children(engine)
        return engine

    @classmethod
    def connect_args(cls, url: URL) -> dict[str, Any]:
        """What the driver is told when an engine of our own connects."""
        return {}

    @classmethod
    def safe_engine(cls, given: AnyEngine) -> AnyEngine:
        return given

    def __init__(self, tables: Tables, clean_up_after: Retention) -> None:
        self.tables = tables
        self.messages: Table = tables.messages
        self.clean_up_after = clean_up_after
        self.dead_letters = SqlDeadLetters(self)
        self.settling = SettleStatements(self)
        self.weights: defaultdict[str, Weight] = defaultdict(Weight)  # by destination
        self.routing = SqlRouting(self)
        self.receiving = SqlReceiving(self)
        self.lost_claims = LostClaims(self)
        self.entering = SqlEntering(self)
        self._wakeup = Wakeup()
        self._ready = False

    # How a database does it.

    @abstractmethod
    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work on a connection of the store's own, in one transaction."""

    @abstractmethod
    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together: one round trip each where the database can."""

    async def _renew(self, work: Callable[[Connection], Result]) -> Result:
        """Run what renews leases. Where one writes at a time, it comes first."""
        return await self._apply(work)

    @abstractmethod
    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""

    async def _survey(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, and sees one moment however many statements it takes."""
        return await self._look(work)

    async def _glance(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, on a connection that leaves everything as it finds it."""
        return await self._look(work)

    @abstractmethod
    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute a statement on the caller's connection, in the caller's transaction; how many rows it wrote."""

    def on(self, connection: Connection) -> Connection:
        """A caller's connection, for statements on our own tables whatever the caller set it to."""
        return connection

    @staticmethod
    def execute(connection: Connection, statement: Executable, rows: Rows | None) -> int:
        """One row goes as a plain statement, several as one batch."""
        return connection.execute(statement, rows[0] if rows and len(rows) == 1 else rows).rowcount

    @abstractmethod
    def create(self, connection: Connection) -> None:
        """Make what is missing."""

    @abstractmethod
    def differences(self, connection: Connection) -> list[Difference]:
        """How the tables differ from those that are needed."""

    @abstractmethod
    def server(self, connection: Connection) -> str:
        """The database's name and version."""

    @abstractmethod
    def findings(self, connection: Connection) -> Iterable[Finding]:
        """What a doctor should know of the database itself."""

    @abstractmethod
    def rows_written(self, connection: Connection) -> int:
        """How many rows the messages table was ever given."""

    async def open(self) -> None:
        """Get ready; tables are made if they are missing."""
        if not self._ready and await self.has_tables():
            self._ready = True
        if not self._ready:
            await self.create_tables()

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""

    async def create_tables(self) -> None:
        await finish(self._transact(self.create), WORK_WITHIN)
        self._ready = True

    async def has_tables(self) -> bool:
        """Whether the tables are there. Looking does not make them, and waits for nobody who writes."""
        return not await finish(self._look(self.missing), WORK_WITHIN)

    async def check_tables(self) -> list[Difference]:
        return await finish(self._glance(self.differences), WORK_WITHIN)

    def missing(self, connection: Connection, schema: str | None = None) -> list[Table]:
        """The tables that are not there; in a schema, or where statements look for them."""
        tables, has_table = self.tables.metadata.sorted_tables, connection.dialect.has_table
        return [each for each in tables if not has_table(connection, each.name, schema=each.schema or schema)]

    # How the store's own work runs: on tables that exist, and to its end whatever happens to the caller.

    async def transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work in one transaction."""
        await self.open()
        return await finish(self._transact(work), WORK_WITHIN)

    async def apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together."""
        await self.open()
        return await finish(self._apply(work), WORK_WITHIN)

    async def renew(self, work: Callable[[Connection], Result]) -> Result:
        """Run what renews leases, before anything else that waits to write."""
        await self.open()
        return await finish(self._renew(work), WORK_WITHIN)

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""
        await self.open()
        return await finish(self._look(work), LOOK_WITHIN)

    async def survey(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads: a message that moves meanwhile is seen in one place."""
        await self.open()
        return await finish(self._survey(work), LOOK_WITHIN)

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

    def cancel(self, timer_id: str) -> tuple[Executable, Rows]:
        return self._cancel, [{"timer_id": timer_id}]

    def remember(self, queue: str, message_id: str, *, also: str | None = None) -> tuple[Executable, Rows]:
        return self.entering.one(queue, message_id, also)

    def reception(self, queue: str, message: Message) -> Reception:
        return self.receiving.reception(queue, message)

    def remember_all(
        self, connection: Connection, queue: str, message_ids: Sequence[str], *, also: str | None = None
    ) -> set[str]:
        return self.entering.many(self.on(connection), queue, message_ids, also)

    def forget(self, connection: Connection, queue: str, message_ids: Sequence[str]) -> None:
        self.entering.forget(self.on(connection), queue, message_ids)

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        rows = self.json([{"id": lease.id, "token": lease.token.hex} for lease in leases])
        return set(self.on(connection).execute(self.settling.completions, {"rows": rows}).scalars())

    @abstractmethod
    def explained(self, error: BaseException) -> TransactionError | None:
        """What a driver's own error means to the caller, if there is something to be done about it."""

    def is_conflict(self, error: BaseException) -> bool:
        return any(map(self.is_own_conflict, causes(error)))

    def is_own_conflict(self, error: BaseException) -> bool:
        """Whether a driver's own error says that a transaction could not be fitted between others."""
        return False

    def keeps_snapshot(self, connection: Connection) -> bool:
        return False

    def state_of(self, connection: Connection) -> TransactionState:
        if connection.closed or connection.invalidated:
            return TransactionState.UNKNOWN
        level = connection.get_execution_options().get("isolation_level")
        if level is None:
            level = getattr(connection.dialect, "_on_connect_isolation_level", None)
        return TransactionState.AUTOCOMMIT if level == "AUTOCOMMIT" else self.driver_state_of(connection)

    def driver_state_of(self, connection: Connection) -> TransactionState:
        """What the driver itself says of a connection."""
        return TransactionState.UNKNOWN

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        return None

    def aborted(self, connection: Connection, *, in_doubt: bool = False) -> TransactionError | None:
        if connection.closed or connection.invalidated:
            return None
        in_doubt = in_doubt or failure_in(connection) is not None
        return nothing_is_kept(connection) if self.is_aborted(connection, in_doubt=in_doubt) else None

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        """Whether the database keeps nothing of a connection's transaction, in which a statement may have failed."""
        return False

    def isolation(self, level: str) -> Mapping[str, Any]:
        return {"isolation_level": level}

    def tables_missing(self) -> TablesMissing:
        return TablesMissing(
            f"there is no table {self.messages.fullname!r}, and none is made on a driver's own connection: run `outbox "
            "tables create`, or call create_tables(), before you emit"
        )

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
        kept = [name for name in MESSAGE_COLUMNS if name not in BURIAL]
        source = select(
            self.clock(), *(chosen.c[name] for name in BURIAL if name != "id"), *(columns[name] for name in kept)
        ).where(columns.id == chosen.c.id)
        names = ["died_at", *(name for name in BURIAL if name != "id"), *kept]
        return insert(self.tables.dead_letters).from_select(names, source)

    # Claiming.

    async def anything_due(self, wanted: Mapping[str, Any]) -> bool:
        """Whether a claim is worth its locks. Where looking costs as much as claiming, it always is."""
        return True

    def claim(
        self,
        limit: int,
        *,
        lease: timedelta,
        destination: str | None = None,
        suspected: Suspected = Suspected.ALL,
        isolated_at: int | None = None,
    ) -> SqlClaim:
        weight = self.weights[destination or NOT_ROUTED]
        due = {
            "wanted": destination or NOT_ROUTED,
            "limit": weight.limit(limit),
            "suspected": suspected is not Suspected.NONE,
            "most": weight.most,
        }
        return SqlClaim(self, lease, weight, due, suspected, isolated_at)

    def search(self, connection: Connection, statement: Any, parameters: Mapping[str, Any]) -> list[Row[Any]]:
        """Run a statement that is built on `due` and answers with `due_at` first."""
        return list(connection.execute(statement, {**parameters, "since": None}).all())

    def fetched(
        self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Many rows of a statement, on a connection of the store's own for work whose statements stand alone."""
        return executed(connection, statement, parameters)

    def take(
        self, connection: Connection, wanted: Mapping[str, Any], terms: Mapping[str, Any], suspected: Suspected
    ) -> Sequence[Sequence[Any]]:
        """Lease due messages: choose, then lease, for databases whose `apply` is a transaction."""
        chosen = found = self.search(connection, self.due, wanted)
        if suspected is not Suspected.ALL:
            first = next((row.id for row in found if row.suspected), None)
            chosen = [row for row in found if not row.suspected or row.id == first]
        chosen = chosen[: how_many_fit((row.size for row in chosen), wanted["most"])]
        if not chosen:
            return []
        ids = {"ids": self.listed([row.id for row in chosen])}
        return list(connection.execute(self._lease, {**terms, **ids}).all())

    async def route_straight(
        self, parameters: Mapping[str, Any], hold: Callable[[Sequence[Sequence[Any]]], None]
    ) -> None:
        """Route and lease due messages whose queues are known, for databases that can in one statement.

        Each row that is to be held has CLAIMED, its queue, and how many messages were due.
        """

    @cached_property
    def due(self) -> Select[Any]:
        """Due messages of a destination in the order in which they are claimed, locked as they are found."""
        columns = self.messages.c
        suspected = columns.starts > columns.attempts  # some start of it never ended
        return self.skipping_locked(
            select(
                self.readable(columns.due_at, EARLIEST).label("due_at"),
                columns.id,
                suspected.label("suspected"),
                columns.routing_key,
                self.size(columns.body).label("size"),
            )
            .where(
                columns.destination == bindparam("wanted"),
                columns.done_at.is_(None),
                columns.due_at >= func.coalesce(bindparam("since", type_=DateTime(timezone=True)), self.before_all()),
                columns.due_at <= self.now(),
                self._unleased(self.now()),
                bindparam("suspected", type_=Boolean) | not_(suspected),
            )
            .order_by(columns.due_at, columns.id)
            .limit(bindparam("limit"))
        )

    @cached_property
    def _lease(self) -> Any:
        return self.leasing_some_apart(self.among(self.messages.c.id, "ids"))

    def leasing(self, chosen: ColumnElement[bool], isolated: ColumnElement[bool] | None = None, **further: Any) -> Any:
        """The statement that leases rows, writes what else it is given, and tells what they hold."""
        columns = self.messages.c
        told: dict[str, ColumnElement[Any]] = {
            "due_at": self.readable(columns.due_at, EARLIEST),
            "expired": columns.expires_at <= self.now(),
            "isolated": literal(0) if isolated is None else isolated,
        }
        leased = {
            "lease_token": bindparam("token", type_=Uuid),
            "lease_until": self.later(self.now(), bindparam("lease", type_=Float)),
        }
        return (
            update(self.messages)
            .where(chosen)
            .values({**leased, **further})
            .returning(
                *((told[name] if name in told else self.readable(columns[name])).label(name) for name in CLAIMED)
            )
        )

    def leasing_some_apart(self, chosen: ColumnElement[bool]) -> Any:
        """The same; isolated attempts are leased by a token of their own, and their start is not counted yet."""
        columns, apart = self.messages.c, bindparam("apart", type_=Uuid)
        in_time = columns.expires_at.is_(None) | (columns.expires_at > self.now())
        crashes = cast(columns.starts, BigInteger) - columns.attempts  # a row may hold whatever fits into its columns
        isolated = (crashes == bindparam("isolated_at", type_=Integer)) & in_time
        return self.leasing(
            chosen,
            isolated=columns.lease_token == apart,
            lease_token=case((isolated, apart), else_=bindparam("token", type_=Uuid)),
            starts=case((isolated, columns.starts), else_=one_more(columns.starts)),
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

    def ring(self, destination: str) -> None:
        """End the waits of this process for a destination."""
        self._wakeup.ring(destination)

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _until_next_due(self, destination: str, at_most: float) -> float:
        found = await self.glance(self._next_due, {"wanted": destination})
        return max(0.0, float(found[0][0])) if found else at_most

    @cached_property
    def _next_due(self) -> Executable:
        columns = self.messages.c
        later = columns.destination == bindparam("wanted", type_=String), columns.done_at.is_(None)
        found = select(self.seconds_until(columns.due_at)).where(*later, columns.due_at > self.now())
        return found.order_by(columns.due_at).limit(1)

    async def glance(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The few rows of a question that is asked again and again while nothing happens."""
        return await self.look(lambda connection: connection.execute(statement, parameters).all())

    # Routing.

    async def bind(self, bindings: Sequence[Binding]) -> None:
        await self.routing.bind(bindings)

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        return await self.routing.unbind(queue, binding_key)

    async def bindings(self) -> list[Binding]:
        return await self.look(self.routing.read)

    async def route(
        self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted] | None = None
    ) -> Routing:
        return await self.routing.route(limit, unroutable, wanted or {})

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        await self.routing.deliver(messages, destinations)

    async def receive(
        self, queue: str, messages: Sequence[Message], *, also: str | None = None, seals: Sequence[Seal] = ()
    ) -> Receipt:
        return await self.receiving.receive(queue, messages, also, seals)

    def place(self, connection: Connection, rows: Rows) -> None:
        """Write messages that have their queues, as one batch."""
        connection.execute(self.receiving.place, rows)

    # State.

    def make_state(self, connection: Connection) -> None:
        """Make the first row of the state table if it is missing: migrations make tables, not rows."""
        connection.execute(self.ignoring(self.tables.state), {"id": 1, "bindings_version": 0})

    async def record_owners(self, recorded: Mapping[str, str]) -> dict[str, str]:
        return await self.transact(lambda connection: owners.record(self, connection, recorded))

    async def owners(self) -> dict[str, str]:
        return await self.look(lambda connection: owners.read(self, connection))

    async def release(self, queue: str) -> str | None:
        return await self.transact(lambda connection: owners.release(self, connection, queue))

    async def record_transport(self, name: str, *, switch: bool = False) -> str:
        def work(connection: Connection) -> str:
            self.make_state(connection)
            state = self.tables.state
            ours = update(state).where(state.c.id == 1)
            connection.execute((ours if switch else ours.where(state.c.transport.is_(None))).values(transport=name))
            if switch:
                circuits.close_circuit(self, connection, NOT_ROUTED)
                owners.release(self, connection, TRANSPORT)
            return str(connection.scalar(select(state.c.transport).where(state.c.id == 1)))

        if switch:
            await self.routing.begin_anew()
        return await self.transact(work)

    # Circuits.

    async def circuits(self) -> list[Circuit]:
        return await self.look(lambda connection: circuits.read(self, connection))

    async def open_circuit(
        self, destination: str | None, pause: timedelta, error: str, *, probe: int | None = None, refusing: bool = False
    ) -> bool:
        return await self.transact(
            lambda connection: circuits.open_circuit(
                self, connection, destination or NOT_ROUTED, pause, error, probe, refusing=refusing
            )
        )

    async def probe_circuit(self, destination: str | None, lease: timedelta) -> int | None:
        return await self.apply(
            lambda connection: circuits.probe_circuit(self, connection, destination or NOT_ROUTED, lease)
        )

    async def close_circuit(self, destination: str | None, *, refusing: bool = False) -> bool:
        return await self.apply(
            lambda connection: circuits.close_circuit(self, connection, destination or NOT_ROUTED, refusing=refusing)
        )

    # Cleaning up.

    async def purge(self, keep: timedelta, limit: int) -> int:
        columns = self.messages.c
        old = select(columns.id).where(columns.done_at < self._ago(keep)).order_by(columns.done_at).limit(limit)
        return await self._delete(delete(self.messages).where(columns.id.in_(self.skipping_locked(old))))

    async def purge_inbox(self, keep: timedelta, limit: int) -> int:
        table = self.tables.inbox
        entry = as_text(table.c.queue), as_text(table.c.message_id)
        old = select(*entry).where(table.c.entered_at < self._ago(keep)).order_by(table.c.entered_at).limit(limit)
        return await self._delete(delete(table).where(tuple_(*entry).in_(self.skipping_locked(old))))

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
                self.appended_history(literal(history_line("given up", EXPIRATION_PASSED), Text)).label("history"),
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
        return await self.survey(lambda connection: looks.backlog(self, connection))

    async def list_messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]:
        return await self.look(lambda connection: looks.messages(self, connection, state, queue, limit, after))

    async def find(self, message_id: str) -> list[StoredMessage]:
        return await self.survey(lambda connection: looks.find(self, connection, message_id))

    async def recorded_transport(self) -> str | None:
        return await self.look(lambda connection: examination.recorded_transport(self, connection))

    async def claimable(self) -> list[Claimable]:
        return await self.look(lambda connection: examination.claimable(self, connection))

    async def examine(self) -> Examination:
        return await finish(self._glance(lambda connection: examination.examine(self, connection)), WORK_WITHIN)

    # Shared by the claims and the statements above.

    @cached_property
    def _insert(self) -> Insert:
        return insert(self.messages).values(**self._times()).inline().execution_options(preserve_rowcount=True)

    @cached_property
    def _insert_timer(self) -> Insert:
        timer = self.ignoring(self.messages).values(**self._times()).inline()
        return timer.execution_options(preserve_rowcount=True)

    @cached_property
    def _cancel(self) -> Executable:
        return delete(self.messages).where(
            self.messages.c.timer_id == bindparam("timer_id"),
            self.messages.c.destination == NOT_ROUTED,
            self.messages.c.done_at.is_(None),
            self._unleased(self.clock()),
        )

    def _times(self) -> dict[str, ColumnElement[Any]]:
        given = bindparam("due", type_=DateTime(timezone=True))
        due = case((given.is_not(None), given), else_=self.later(self.clock(), bindparam("delay", type_=Float)))
        return {"due_at": due, "expires_at": self.later(due, bindparam("expiration", type_=Float))}

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
