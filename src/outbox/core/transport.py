"""Transport: the broker side. Publishes messages and delivers them from queues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, runtime_checkable

from sqlalchemy import Connection, Executable

from outbox.core.attempt import Attempt, Outcome
from outbox.core.binding import Binding
from outbox.core.dead_letter import DeadLetters
from outbox.core.events import Observer
from outbox.core.landing import Landing
from outbox.core.listener import Listener
from outbox.core.message import LARGEST_BODY, Message
from outbox.core.retry import RetryPolicy, as_retry_policy
from outbox.core.store import Lease, Leased, QueueBacklog, Rows, Wanted
from outbox.core.webhooks import Secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a transport can do. What it cannot is declared here, not discovered."""

    consumes: bool = True  # a worker can take deliveries from it
    delays: bool = True  # RetryIn comes back after its delay, not at once
    keeps_dead_letters: bool = True
    completes_in_transaction: bool = False  # deliveries offer a completion() for the listener's transaction
    shares_outages: bool = False  # that its destination does not answer is written down, for all relays at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the settings of an outbox say to the transport that is made from a URL."""

    exchange_name: str = "outbox"
    queue_prefix: str = ""
    management_url: str = field(default="", repr=False)  # it may hold a password
    source: str = "/outbox"
    webhook_secrets: Secrets | None = None
    retry_policy: RetryPolicy = field(default_factory=lambda: as_retry_policy((1, 10, 60, 300)))
    observe: Observer = field(default=lambda event: None)
    max_body_size: int = LARGEST_BODY  # bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """The destination's answer that it does not take a message."""

    error: str
    permanent: bool = False  # it never will
    retry_after: timedelta | None = None  # how long it asks to be left alone
    unspecific: bool = False  # it may refuse everything for now, and not this message: no such path, no access


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a batch, by message id. One in neither is in doubt, and is published again with the same id."""

    confirmed: frozenset[str] = frozenset()  # the transport's positive confirmation of that very message
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    silence: str = ""  # why nothing is known of the others, for people
    asked: bool = True  # whether the destination was asked about any of them; if not, its silence means nothing

    @property
    def answered(self) -> bool:
        """Whether the destination said anything at all."""
        return bool(self.confirmed or self.refused)


Report = Callable[[Published], None]  # takes what is known of some messages of a batch; each is told once


class Delivery(Protocol):
    """An attempt that a worker holds."""

    @property
    def attempt(self) -> Attempt: ...

    @property
    def raw(self) -> object:
        """The client library's own object, for listeners that ask for `message`."""
        ...

    def completion(self) -> tuple[Executable, Rows] | None:
        """Goes into the listener's transaction: no row = lease lost, roll back. None: the inbox is needed."""
        ...

    def settle(self, outcome: Outcome) -> Landing:
        """Say how it ended, once. Written in batches, nobody waits; False = the lease was lost and nothing written."""
        ...


@runtime_checkable
class Concludable(Protocol):
    """A delivery whose failure, too, can be written in a transaction of the worker's database."""

    def conclude(self, connection: Connection, outcome: Outcome) -> bool:
        """Write it on this connection, once; False = lease lost, roll back. `settle` is told afterwards."""
        ...


@runtime_checkable
class UnderLease(Protocol):
    """A delivery that the database holds: many of them are completed by one statement."""

    @property
    def lease(self) -> Lease: ...


@runtime_checkable
class Isolable(Delivery, Protocol):
    """A delivery whose attempt may be isolated. Its start is counted only when nothing runs beside it."""

    async def start(self) -> Delivery | None:
        """Count the start; what its listener is to be called for now. None: this worker has lost it."""
        ...

    async def settled(self) -> None:
        """Wait until its outcome is written."""
        ...


@runtime_checkable
class AtHand(Protocol):
    """Deliveries that can be had without waiting, for listeners that take lists. Without it such a list has one."""

    def take(self) -> Delivery | None:
        """The next one, if it is there at this moment."""
        ...


class Offer(Protocol):
    """What the queues of this process would take at this moment, reserved for them until the offer is left."""

    @property
    def wanted(self) -> Mapping[str, Wanted]: ...

    def take(self, queue: str, claim: Leased) -> int:
        """Hand over what was leased for a queue; how much it was."""
        ...


class Takers(Protocol):
    """The queues that a worker of this process consumes: they may take messages straight from the router."""

    @property
    def consuming(self) -> bool: ...

    def offer(self) -> AbstractContextManager[Offer]: ...

    async def room(self, longest: float) -> None:
        """Sleep until some queue may want more; never longer than `longest` seconds."""
        ...


Trouble = Callable[[], Awaitable[str | None]]  # asks why the destination takes no messages now; None: it does


@runtime_checkable
class Watchable(Protocol):
    """A transport that can be asked how its destination is, by a process that neither publishes nor consumes."""

    def watched(self) -> AbstractAsyncContextManager[Trouble]: ...


@runtime_checkable
class Countable(Protocol):
    """A transport that can be asked what lies in its queues, by a process that does not consume them."""

    async def counted(self, recorded: Collection[str]) -> Sequence[QueueBacklog] | None:
        """What lies in each queue, while a `watched` is open over one connection. Never raises if it is away.

        `recorded` are the destination's names of queues that workers wrote down. None: no queue is known.
        """
        ...


@runtime_checkable
class Rebindable(Protocol):
    """A transport that can tell what its queues are bound to, and take a binding away."""

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> Collection[Binding] | None:
        """The bindings of these queues of listeners. None, at a start: they could not be told without more settings.

        ConfigurationError says why they cannot be told, and what to do.
        """
        ...

    async def unbind(self, binding: Binding) -> None:
        """Let a queue get no further messages by this key; what already lies in it stays."""
        ...


@runtime_checkable
class Naming(Protocol):
    """A transport whose queues have other names than their listeners say."""

    def queue_name(self, queue: str) -> str:
        """How the destination calls a listener's queue."""
        ...


@runtime_checkable
class OnRoute(Protocol):
    """A transport that says by itself what its route is called."""

    @property
    def route(self) -> str:
        """The destination of its messages in the table: it must outlive the process, and hold no secret."""
        ...


@runtime_checkable
class Addressed(Protocol):
    """A transport that says where it leads: recorded with the table, so that another place is noticed."""

    @property
    def address(self) -> str:
        """Without user, password and anything else that is secret or may change; empty if it is not known."""
        ...


@runtime_checkable
class Adopting(Protocol):
    """A transport that was made by the application, and takes what it was not given from the settings."""

    def adopt(self, defaults: Defaults) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """A transport that tells answers as they come: what it waits for delays nothing that was answered."""

    async def publish_and_report(self, messages: Sequence[Message], report: Report) -> Published:
        """As `publish`, which it is called instead of. The result holds what was reported, too."""
        ...


@runtime_checkable
class Awaited(Protocol):
    """A transport that knows when its destination is back. With any other one a relay finds out by claiming again."""

    async def back(self) -> None:
        """Wait until the destination would take messages."""
        ...


class Transport(Protocol):
    """Everything the library asks of a broker."""

    @property
    def name(self) -> str:
        """One word, recorded with the table so that no other transport takes its messages."""
        ...

    @property
    def features(self) -> Features: ...

    @property
    def dead_letters(self) -> DeadLetters | None: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, messages: Sequence[Message]) -> Published:
        """Hand messages over. Raises TransportUnavailable only if nothing was sent."""
        ...

    async def declare(self, listeners: Sequence[Listener]) -> None:
        """Make the queues and bindings that the listeners need."""
        ...

    def consume(self, listener: Listener, prefetch: int) -> AsyncIterator[Delivery]:
        """Deliveries of the listener's queue, at most `prefetch` unsettled. Closing gives back what was not taken."""
        ...
