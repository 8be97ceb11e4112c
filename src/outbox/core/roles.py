"""Roles: what the library asks of a database, in parts that each fit on a page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Protocol

from sqlalchemy import Connection, Executable

from outbox.core.backlog import Backlog, Circuit, StoredMessage
from outbox.core.binding import Binding
from outbox.core.claim import Lease, Rows
from outbox.core.diagnosis import Claimable, Examination
from outbox.core.errors import TransactionError
from outbox.core.message import Message, Schedule
from outbox.core.routing import Receipt, Reception, Routing, Seal, Wanted
from outbox.core.transaction_state import TransactionState


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which the tables of a database are not as this version needs them."""

    table: str
    what: str  # one line
    mend: str  # the SQL; differences that are mended together have the same
    breaks: bool  # statements fail, or promises; otherwise things are only slower than they could be


class Setback(Enum):
    """What stops a transaction whose statements are not to blame."""

    CONFLICT = auto()  # it did not fit between others (serialization failure, deadlock, lock): run again, it may well
    READ_ONLY = auto()  # the server takes no writes at all, as a replica


class Writing(Protocol):
    """What is written on the caller's own connection: the caller's transaction is safe by type."""

    def emit(self, connection: Connection, messages: Sequence[Message], schedule: Schedule) -> bool:
        """Write messages in the transaction of a caller's connection; False if the timer already waits.

        Warns where they would be stored at once, and refuses a transaction of which the database would keep nothing.
        """
        ...

    def cancel_timer(self, connection: Connection, timer_id: str) -> bool:
        """Delete the timer there if it still waits; says whether it did. Warns and refuses as `emit` does."""
        ...

    # The statements alone, for connections of drivers.

    def insert(self, messages: Sequence[Message], schedule: Schedule) -> tuple[Executable, Rows]: ...

    def cancel(self, timer_id: str) -> tuple[Executable, Rows]:
        """Deletes the timer if it still waits: one row or none."""
        ...

    def reception(self, queue: str, message: Message) -> Reception:
        """Stores a message from outside in a queue once, by its id."""
        ...

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute one of these on the caller's connection; how many rows it wrote. Makes missing tables first."""
        ...

    def is_already_there(self, error: BaseException) -> bool:
        """Whether a driver's own error for one of these says that the row is there, so that nothing was written."""
        ...

    def explained(self, error: BaseException) -> TransactionError | None:
        """What a driver's own error for one of these means to the caller, if there is something to be done about it."""
        ...


class CallerTransactions(Protocol):
    """What is known of a transaction on a caller's connection."""

    @property
    def writes_side_by_side(self) -> bool:
        """Whether a lease can be renewed while its listener's own transaction is open."""
        ...

    def setback(self, error: BaseException) -> Setback | None:
        """What stopped a transaction whose statements are not to blame; of the error or of what it was raised from."""
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

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        """Held around a listener's transaction where the database lets only one write at a time.

        And around a caller's, where both would use the very same connection.
        """
        ...


class Queues(Protocol):
    """Bindings, messages on their way into queues, and the end of many of them at once."""

    async def bind(self, bindings: Sequence[Binding]) -> None:
        """Add bindings; messages that were unroutable are looked at again."""
        ...

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        """Remove a queue's bindings, or one of them; its messages stay. Returns how many there were."""
        ...

    async def bindings(self) -> list[Binding]: ...

    async def route(
        self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted] | None = None
    ) -> Routing:
        """Give due, unrouted messages their destinations, by the bindings of the same moment.

        What is wanted from a queue is leased by the same statement; the caller that gets such a claim enters it.
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

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        """Complete many attempts in a listener's transaction; the ids of those whose lease still held."""
        ...

    def announce(self, *destinations: str | None) -> None:
        """Wake tasks that sleep in `wait`, here or in other processes: there may be work. Never fails."""
        ...


class InboxTable(Protocol):
    """Which messages were handled."""

    def remember(self, queue: str, message_id: str, *, also: str | None = None) -> tuple[Executable, Rows]:
        """Enters a message in the inbox: one row the first time, then none.

        With `also`, an entry under that name of the queue counts as well.
        """
        ...

    def remember_all(
        self, connection: Connection, queue: str, message_ids: Sequence[str], *, also: str | None = None
    ) -> set[str]:
        """Enter many messages in the inbox, in a listener's transaction; which of them are new."""
        ...

    def forget(self, connection: Connection, queue: str, message_ids: Sequence[str]) -> None:
        """Take entries out again, in the transaction that made them."""
        ...

    async def purge(self, keep: timedelta, limit: int) -> int:
        """Forget up to `limit` inbox entries older than `keep`."""
        ...


class CircuitTable(Protocol):
    """How destinations are that once did not answer, for all relays."""

    async def all(self) -> list[Circuit]:
        """What is known of destinations that once did not answer."""
        ...

    async def open(
        self, destination: str | None, pause: timedelta, error: str, *, probe: int | None = None, refusing: bool = False
    ) -> bool:
        """No answer came: no relay is to ask again before the pause is over. Says whether that is news.

        Without `probe` it opens a circuit that was closed; with it, one that this very probe was to find out about.
        `refusing`: answers came, and all were refusals. Since when is kept until the destination takes something.
        """
        ...

    async def probe(self, destination: str | None, lease: timedelta) -> int | None:
        """Be the one relay that asks a destination whose pause is over; None if another one does, or none needs to.

        Returns what `open` wants to hear if no answer comes. Who gives no word within the lease is replaced.
        """
        ...

    async def close(self, destination: str | None, *, refusing: bool = False) -> bool:
        """An answer came. Says whether that is news. `refusing`: it took nothing, so since when it refuses is kept."""
        ...


class OwnersTable(Protocol):
    """Which service each queue belongs to, and what workers declared at a broker."""

    async def record(self, owners: Mapping[str, str]) -> dict[str, str]:
        """Record which service each queue belongs to, unless that is recorded; says whose each of them is.

        Under the name TRANSPORT it is the address to which the transport leads.
        """
        ...

    async def all(self) -> dict[str, str]:
        """What is recorded of all queues."""
        ...

    async def release(self, queue: str) -> str | None:
        """Forget the owner of a queue, so that the next service can record it; returns the owner it had."""
        ...

    async def feeds(self) -> list[str]:
        """The servers from whose log relays have read the messages of the table; none: they are polled."""
        ...

    async def declare(self, bindings: Collection[Binding]) -> None:
        """Record bindings that workers make at a broker, which may not tell them. No router follows them."""
        ...

    async def declared(self) -> list[Binding]:
        """The bindings that were recorded by `declare`."""
        ...

    async def retract(self, binding: Binding) -> None:
        """Forget a binding that was recorded by `declare`."""
        ...


class Inspection(Protocol):
    """What is in a store. It changes nothing."""

    async def backlog(self) -> Backlog: ...

    async def list_messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]: ...

    async def find(self, message_id: str) -> list[StoredMessage]:
        """Every place where the message is now, dead letters included."""
        ...

    async def claimable(self) -> list[Claimable]:
        """The messages for each destination that could be claimed, and those that are leased."""
        ...

    async def examine(self) -> Examination:
        """What the database says of itself. It needs no tables."""
        ...


class Maintenance(Protocol):
    """The tables themselves, whose they are, and what is removed from them."""

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

    async def record_transport(self, name: str, *, switch: bool = False) -> str:
        """Write the transport's name down if none is; returns the one that is recorded.

        A switch writes it in any case. What the transport before refused or had no queue for is due at once then, and
        an outage of its destination is forgotten.
        """
        ...

    async def purge(self, keep: timedelta, limit: int) -> int:
        """Delete up to `limit` messages that were done longer ago than `keep`."""
        ...

    async def expire(self, limit: int) -> int:
        """Move up to `limit` messages whose expiration has passed to the dead letters."""
        ...
