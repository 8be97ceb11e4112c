"""Store: the database side. Keeps messages until they are relayed, and remembers which were handled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable
from uuid import UUID

from sqlalchemy import URL, Connection, Engine, Executable
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Attempt, Outcome, Reason
from outbox.core.binding import Binding
from outbox.core.dead_letter import DeadLetters
from outbox.core.diagnosis import Claimable, Examination
from outbox.core.durations import NO_DELAY, Retention
from outbox.core.errors import TransactionError
from outbox.core.message import Message, Schedule
from outbox.core.transaction_state import TransactionState

AnyEngine = TypeVar("AnyEngine", AsyncEngine, Engine)

Rows = list[dict[str, Any]]

DISCARD = "discard"

Statement = tuple[Executable, Rows]

IN_DATABASE = "database"  # the transport whose queues are in the store itself
UNKNOWN = "unknown"  # in place of a reason that would have to be read at a broker

TRANSPORT = ""  # in place of a queue's name, where it is recorded whose queues are


@dataclass(frozen=True, slots=True)
class Lease:
    """What a claim holds one message by."""

    id: int
    token: UUID


class Suspected(Enum):
    """How many suspected poison messages, of which a start never ended, a claim may take."""

    ALL = "all"  # like any other: a relay runs no listener, so no message can have killed it
    ONE = "one"  # together with those that are not suspected
    NONE = "none"


class Claim(Protocol):
    """Attempts that nobody else makes while this is held. Renewed while it is open."""

    @property
    def attempts(self) -> Sequence[Attempt]: ...

    async def settle(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        """Write how attempts ended, by their ids; returns the ids whose lease was lost, which wrote nothing."""
        ...

    def completion(self, attempt: Attempt) -> tuple[Executable, Rows]:
        """The statement that completes an attempt inside a listener's transaction; no row = lease lost, roll back."""
        ...

    def conclude(self, connection: Connection, attempt: Attempt, outcome: Outcome) -> bool:
        """Write how an attempt ended inside a caller's transaction; False = lease lost, roll back."""
        ...

    def lease_on(self, attempt: Attempt) -> Lease:
        """What many of them are completed by at once, with `Store.complete`."""
        ...

    async def start(self, attempt: Attempt) -> bool:
        """Count the start of an isolated attempt, right before its listener is called; False = lease lost."""
        ...

    async def renew_once(self, ids: Collection[int], lease: timedelta) -> None:
        """Renew the leases on these attempts now, for that long or longer, and not before `renew_again`."""
        ...

    def renew_again(self, ids: Collection[int]) -> None:
        """Renew them with the others from now on."""
        ...


class Leased(Claim, AbstractAsyncContextManager[Claim], Protocol):
    """A claim that holds its attempts already; it is renewed from when it is entered."""


class Feed(Protocol):
    """Where messages are claimed from."""

    def claim(
        self,
        limit: int,
        *,
        lease: timedelta,
        destination: str | None = None,
        suspected: Suspected = Suspected.ALL,
        isolated_at: int | None = None,
    ) -> AbstractAsyncContextManager[Claim]:
        """Take up to `limit` due messages of one destination (none: those that were not routed).

        Of the `limit` oldest it takes those that are not suspected, and as many suspected poison messages as it is
        told. With `NONE` the suspected ones are passed over, and do not count towards the limit.
        One that crashed `isolated_at` times is leased without counting a start: its attempt is isolated, and
        `Claim.start` counts it.
        Several claims may be open at once. What is not settled when one closes is given back.
        """
        ...

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        """Sleep until something may be due for the destination; never longer than `longest` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker of this process would take from a queue at this moment."""

    limit: int
    lease: timedelta


@dataclass(frozen=True, slots=True)
class Routing:
    """What one round of routing did."""

    taken: int = 0  # messages looked at
    routed: Mapping[str, int] = field(default_factory=dict)  # copies written, by queue
    unroutable: Mapping[str, int] = field(default_factory=dict)  # by routing key: no binding matches, they wait
    discarded: int = 0  # messages that nobody needs, by the `unroutable` setting
    claims: Mapping[str, Leased] = field(default_factory=dict)  # leased at once, by queue


@dataclass(frozen=True, slots=True)
class Seal:
    """By what a request is known, and how it was read: its messages are stored only if it never was in another way."""

    marks: tuple[str, ...]
    reading: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of messages for a queue, by their ids. One in neither was there before."""

    stored: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)  # the database cannot hold it, and why
    broken: frozenset[Seal] = frozenset()  # if there are any, nothing was stored: try again without their messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """The statements that store one message in a queue once. Each writes one row or none."""

    enter: Statement  # none: it was there before, and nothing more is to be written
    place: Statement  # in its queue
    place_if_bound: Statement  # none: nothing is bound to the queue
    bury: Callable[[Reason, str], Statement]  # among the dead letters, because of this


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """What lies in one queue. None is a number that cannot be told, which happens at a broker alone."""

    queue: str
    transport: str = IN_DATABASE  # where the queue is
    binding_keys: tuple[str, ...] | None = ()
    delivered: int | None = 0  # not attempted yet; at a broker: in the queue itself, retries that came back included
    retrying: int | None = 0  # attempted and waiting for the next attempt
    leased: int | None = 0  # in flight: held by a worker, and counted in delivered or retrying as well
    dead: int | None = 0
    oldest: timedelta | None = None  # for how long the oldest due message has been due; never told at a broker
    consumers: int | None = None  # at a broker: how many workers consume it, once for each of their connections

    @property
    def open(self) -> int:
        """How many are known to wait here, or to be in flight."""
        return (self.delivered or 0) + (self.retrying or 0)


class CircuitState(StrEnum):
    """How a destination is."""

    CLOSED = "closed"  # it answers
    OPEN = "open"  # it does not: nobody asks it for a while
    PROBING = "probing"  # one relay asks it with one message


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """What all relays know of a destination that once did not answer."""

    destination: str | None  # none: the transport's only one
    state: CircuitState
    failures: int = 0  # times in a row that no answer came
    remaining: timedelta = NO_DELAY  # of the pause, or of the time that a probe has
    error: str = ""
    refusing: timedelta | None = None  # for how long it has taken nothing although it answers; none: it does not do so


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What lies in a store at one moment."""

    waiting: int = 0  # emitted and not yet sent or routed, the unroutable ones not counted
    due: int = 0  # of those: could be sent now
    oldest: timedelta | None = None  # for how long the oldest due message, waiting or in a queue, has been due
    leased: int = 0  # in the hands of a relay or worker, queues included
    unroutable: int = 0  # no binding matches them
    sent: int = 0  # kept by clean_up_after
    dead: int | None = 0  # those in a broker's queues included; none: they cannot be counted
    dead_by_reason: Mapping[str, int] = field(default_factory=dict)  # `unknown`: those in a broker's queues
    rows_written: int = 0  # since the table was made: the difference of two looks tells a rate
    queues: tuple[QueueBacklog, ...] = ()
    circuits: tuple[Circuit, ...] = ()  # of destinations that once did not answer, and still get messages or have some

    def beside(self, queues: Sequence[QueueBacklog] | None) -> Backlog:
        """Together with what lies in the queues of a broker; none: nothing is known of them."""
        if queues is None:
            return replace(self, dead=None)
        elsewhere = {found.queue for found in queues}
        # A binding in the database says nothing about a queue that the broker has, unless messages were left there.
        here = [found for found in self.queues if found.open or found.dead or found.queue not in elsewhere]
        counts = [found.dead for found in queues]
        known = sum(count for count in counts if count is not None)
        return replace(
            self,
            dead=None if self.dead is None or None in counts else self.dead + known,
            dead_by_reason={**self.dead_by_reason, **({UNKNOWN: known} if known else {})},
            queues=tuple(sorted((*here, *queues), key=lambda found: (found.queue, found.transport))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message where it is now, with its walk so far."""

    row_id: int
    message: Message
    state: str  # waiting, unroutable, delivered, retrying, sent or dead
    queue: str | None
    due_at: datetime
    routed_at: datetime | None
    leased_until: datetime | None
    done_at: datetime | None
    attempt_count: int  # attempts that ended
    crash_count: int  # attempts that never ended
    history: str  # one line for each failed attempt
    timer_id: str | None = None
    reason: str | None = None  # why it is dead
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which the tables of a database are not as this version needs them."""

    table: str
    what: str  # one line
    mend: str  # the SQL; differences that are mended together have the same
    breaks: bool  # statements fail, or promises; otherwise things are only slower than they could be


class StoreClass(Protocol):
    """What a database's entry point in the group `outbox.stores` names: the class of its store."""

    async_drivers: ClassVar[
        tuple[str, ...]
    ]  # SQLAlchemy's drivers that work with an event loop, the preferred one first
    sync_drivers: ClassVar[tuple[str, ...]]  # those that work in threads

    def __call__(self, tables: Any, engine: AsyncEngine | None, clean_up_after: Retention) -> Store: ...

    def make_engine(self, url: URL) -> AsyncEngine:
        """An engine of our own, with what the database needs to be safe."""
        ...

    def make_sync_engine(self, url: URL) -> Engine:
        """The same for threads; ConfigurationError where the database cannot be shared with them."""
        ...

    def safe_engine(self, given: AnyEngine) -> AnyEngine:
        """The given engine if its transactions are safe by themselves, otherwise a sibling whose are."""
        ...


@runtime_checkable
class ThreadNotifying(Protocol):
    """A store that wakes other processes from a thread of its own, for callers without an event loop."""

    notifies_in_thread: bool


class Store(Feed, Protocol):
    """Everything the library asks of a database."""

    @property
    def dead_letters(self) -> DeadLetters: ...

    @property
    def writes_side_by_side(self) -> bool:
        """Whether a lease can be renewed while its listener's own transaction is open."""
        ...

    # Statements for the caller's own connection to execute: the caller's transaction is safe by type.

    def insert(self, messages: Sequence[Message], schedule: Schedule) -> tuple[Executable, Rows]: ...

    def cancel(self, timer_id: str) -> tuple[Executable, Rows]:
        """Deletes the timer if it still waits: one row or none."""
        ...

    def remember(self, queue: str, message_id: str, *, also: str | None = None) -> tuple[Executable, Rows]:
        """Enters a message in the inbox: one row the first time, then none.

        With `also`, an entry under that name of the queue counts as well.
        """
        ...

    def reception(self, queue: str, message: Message) -> Reception:
        """Stores a message from outside in a queue once, by its id."""
        ...

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute one of these on the caller's connection; how many rows it wrote. Makes missing tables first."""
        ...

    def remember_all(
        self, connection: Connection, queue: str, message_ids: Sequence[str], *, also: str | None = None
    ) -> set[str]:
        """Enter many messages in the inbox, in a listener's transaction; which of them are new."""
        ...

    def forget(self, connection: Connection, queue: str, message_ids: Sequence[str]) -> None:
        """Take entries out again, in the transaction that made them."""
        ...

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        """Complete many attempts in a listener's transaction; the ids of those whose lease still held."""
        ...

    def explained(self, error: BaseException) -> TransactionError | None:
        """What a driver's own error for one of these means to the caller, if there is something to be done about it."""
        ...

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the database could not fit a transaction between others: run again, it may well succeed.

        A serialization failure, a deadlock, a lock that somebody holds; of the error or of what it was raised from.
        """
        ...

    def keeps_snapshot(self, connection: Connection) -> bool:
        """Whether the connection's transaction, about to begin, cannot complete an attempt whose lease is renewed then.

        It sees what its first statement saw, and a row that was written since makes it fail.
        """
        ...

    def state_of(self, connection: Connection) -> TransactionState:
        """What the driver knows of the transaction on a caller's connection. Costs no round trip."""
        ...

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        """Tells how many queries the driver has sent on a caller's connection; none if it does not count them."""
        ...

    def aborted(self, connection: Connection, *, in_doubt: bool = False) -> TransactionError | None:
        """Why COMMIT would keep nothing of a caller's transaction, if it would not.

        Costs a round trip only if a statement has failed in it, or may have, and the driver does not know what became
        of it.
        """
        ...

    def isolation(self, level: str) -> Mapping[str, Any]:
        """What to tell a caller's connection, before it begins, to have a transaction isolated like this."""
        ...

    # Everything below runs on connections of the store's own.

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        """Held around a listener's transaction where the database lets only one write at a time.

        And around a caller's, where both would use the very same connection.
        """
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def create_tables(self) -> None: ...

    async def has_tables(self) -> bool: ...

    async def check_tables(self) -> list[Difference]:
        """How the tables differ from those that this version needs; what others added to them does not count.

        Reads the database's catalogs, writes nothing, and needs no right on the tables.
        """
        ...

    async def recorded_transport(self) -> str | None:
        """The transport that the table belongs to; None if none was recorded yet."""
        ...

    async def record_owners(self, owners: Mapping[str, str]) -> dict[str, str]:
        """Record which service each queue belongs to, unless that is recorded; says whose each of them is.

        Under the name TRANSPORT it is the address to which the transport leads.
        """
        ...

    async def owners(self) -> dict[str, str]:
        """What is recorded of all queues."""
        ...

    async def release(self, queue: str) -> str | None:
        """Forget the owner of a queue, so that the next service can record it; returns the owner it had."""
        ...

    async def record_transport(self, name: str, *, switch: bool = False) -> str:
        """Write the transport's name down if none is; returns the one that is recorded.

        A switch writes it in any case. What the transport before refused or had no queue for is due at once then, and
        an outage of its destination is forgotten.
        """
        ...

    async def bind(self, bindings: Sequence[Binding]) -> None:
        """Add bindings; messages that were unroutable are looked at again."""
        ...

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        """Remove a queue's bindings, or one of them; what already lies in it stays. Returns how many there were."""
        ...

    async def bindings(self) -> list[Binding]: ...

    async def route(
        self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted] | None = None
    ) -> Routing:
        """Give due, unrouted messages their destinations, by the bindings of the same moment.

        What is wanted from a queue is leased by the same statement; whoever gets such a claim enters it.
        """
        ...

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        """Store messages, by their ids, straight in the queues named."""
        ...

    async def receive(
        self, queue: str, messages: Sequence[Message], *, also: str | None = None, seals: Sequence[Seal] = ()
    ) -> Receipt:
        """Store those messages in a queue that were not there before, by their ids, all in one transaction.

        One that the database cannot hold fails alone. If this raises, whether anything was stored is unknown: storing
        the same messages again does no harm.
        """
        ...

    def announce(self, *destinations: str | None) -> None:
        """Tell whoever sleeps in `wait`, here or in other processes, that there may be work. Never fails."""
        ...

    async def circuits(self) -> list[Circuit]:
        """What is known of destinations that once did not answer."""
        ...

    async def open_circuit(
        self, destination: str | None, pause: timedelta, error: str, *, probe: int | None = None, refusing: bool = False
    ) -> bool:
        """No answer came: nobody is to ask again before the pause is over. Says whether that is news.

        Without `probe` it opens a circuit that was closed; with it, one that this very probe was to find out about.
        `refusing`: answers came, and all were refusals. Since when is kept until the destination takes something.
        """
        ...

    async def probe_circuit(self, destination: str | None, lease: timedelta) -> int | None:
        """Be the one who asks a destination whose pause is over; None if somebody else does, or nobody needs to.

        Returns what `open_circuit` wants to hear if no answer comes. Who gives no word within the lease is replaced.
        """
        ...

    async def close_circuit(self, destination: str | None, *, refusing: bool = False) -> bool:
        """An answer came. Says whether that is news. `refusing`: it took nothing, so since when it refuses is kept."""
        ...

    async def purge(self, keep: timedelta, limit: int) -> int:
        """Delete up to `limit` messages that were done longer ago than `keep`."""
        ...

    async def purge_inbox(self, keep: timedelta, limit: int) -> int:
        """Forget up to `limit` inbox entries older than `keep`."""
        ...

    async def expire(self, limit: int) -> int:
        """Move up to `limit` messages whose expiration has passed to the dead letters."""
        ...

    async def backlog(self) -> Backlog: ...

    async def list_messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]: ...

    async def find(self, message_id: str) -> list[StoredMessage]:
        """Every place where the message is now, dead letters included."""
        ...

    async def claimable(self) -> list[Claimable]:
        """What lies for each destination and could be claimed, and what is held."""
        ...

    async def examine(self) -> Examination:
        """What the database says of itself. It needs no tables."""
        ...
