"""Store: the database side. Keeps messages until they are relayed, and remembers which were handled."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.backlog import (
    IN_DATABASE,
    IN_ROUTES,
    UNKNOWN,
    Backlog,
    Circuit,
    CircuitState,
    QueueBacklog,
    StoredMessage,
)
from outbox.core.claim import Claim, Feed, Lease, Leased, QueueClaim, QueueFeed, Rows, Selection, Suspected
from outbox.core.dead_letter import DeadLetters
from outbox.core.durations import Retention
from outbox.core.roles import (
    CallerTransactions,
    CircuitTable,
    Difference,
    InboxTable,
    Inspection,
    Maintenance,
    OwnersTable,
    Queues,
    Writing,
)
from outbox.core.routing import DISCARD, Receipt, Reception, Routing, Seal, Statement, Wanted

__all__ = [
    "DISCARD",
    "IN_DATABASE",
    "IN_ROUTES",
    "TRANSPORT",
    "UNKNOWN",
    "AnyEngine",
    "Backlog",
    "CallerTransactions",
    "Circuit",
    "CircuitState",
    "CircuitTable",
    "Claim",
    "Difference",
    "Feed",
    "InboxTable",
    "Inspection",
    "Lease",
    "Leased",
    "Locatable",
    "Maintenance",
    "OwnersTable",
    "QueueBacklog",
    "QueueClaim",
    "QueueFeed",
    "Queues",
    "Receipt",
    "Reception",
    "Routing",
    "Rows",
    "Seal",
    "Selection",
    "Statement",
    "Store",
    "StoreClass",
    "StoredMessage",
    "Suspected",
    "ThreadNotifying",
    "Wanted",
    "Writing",
]

AnyEngine = TypeVar("AnyEngine", AsyncEngine, Engine)

TRANSPORT = ""  # in place of a queue's name, where it is recorded whose queues are


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

    def tables_named(self, table_name: str, schema: str | None = None) -> Any:
        """The tables as this database makes them, all named after one."""
        ...

    def roles_sql(self, tables: Any, prefix: str) -> str | None:
        """The SQL that makes roles for producers, relays, workers and operators; None where there are no roles."""
        ...

    def safe_engine(self, given: AnyEngine) -> AnyEngine:
        """The given engine if its transactions are safe by themselves, otherwise a sibling whose are."""
        ...


@runtime_checkable
class ThreadNotifying(Protocol):
    """A store that wakes other processes from a thread of its own, for callers without an event loop."""

    notifies_in_thread: bool


@runtime_checkable
class Locatable(Protocol):
    """A store that can be told by a plain engine which database is the outbox's, if it has no other."""

    def locate(self, engine: Engine) -> None: ...


class Store(Protocol):
    """Everything the library asks of a database: its roles, and when its connections come and go."""

    @property
    def writing(self) -> Writing: ...

    @property
    def transactions(self) -> CallerTransactions: ...

    @property
    def feed(self) -> QueueFeed: ...

    @property
    def queues(self) -> Queues: ...

    @property
    def inbox(self) -> InboxTable: ...

    @property
    def circuits(self) -> CircuitTable: ...

    @property
    def owners(self) -> OwnersTable: ...

    @property
    def inspection(self) -> Inspection: ...

    @property
    def maintenance(self) -> Maintenance: ...

    @property
    def dead_letters(self) -> DeadLetters: ...

    async def open(self) -> None:
        """Get ready; tables are made if they are missing."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
