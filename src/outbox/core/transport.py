"""Transport: the broker side. Publishes messages and delivers them from queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Protocol, Self, TypeVar

from sqlalchemy import Connection, Executable

from outbox.core.attempt import Attempt, Outcome
from outbox.core.binding import Binding
from outbox.core.dead_letter import DeadLetters
from outbox.core.diagnosis import Finding, fresh_dead_letters
from outbox.core.errors import ConfigurationError
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import LARGEST_BODY, Message
from outbox.core.retry import RetryPolicy, as_retry_policy
from outbox.core.settlement import Settlement
from outbox.core.store import Lease, Leased, QueueBacklog, Rows, Wanted

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a transport can do. What it cannot is declared here, not discovered."""

    # Queues.
    consumes: bool = True  # a worker can take deliveries from it
    wildcards: bool = True  # binding keys may hold * and #; without, a listener names each routing key
    keeps_order: bool = False  # messages of one key are delivered in the order in which they were published
    acknowledges_individually: bool = True  # settling one delivery settles no other; without, listeners store first
    delays: bool = True  # RetryIn comes back after its delay, not at once
    keeps_dead_letters: bool = True  # Dead deliveries are kept, and `dead_letters` lists them
    largest_message: int | None = None  # bytes of a body; a larger one is refused for good. None: no limit of its own
    in_store: bool = False  # its queues are rows of the store itself: nothing is published, and `takers` is there
    completes_in_transaction: bool = False  # deliveries offer a completion() for the listener's transaction

    # Publishing.
    reports_answers: bool = False  # publish() reports the answers of a batch as they come
    shares_outages: bool = False  # that its destination does not answer is written down, for all relays at once

    # For operators.
    knows_health: bool = False  # watched() tells why it takes no messages
    counts_queues: bool = False  # counted() tells how many messages its queues hold
    changes_bindings: bool = False  # bindings() and unbind() are there
    describes_topology: bool = False  # topology() says what to provision

    # For tests.
    movable_clock: bool = False  # advance() lets its delays pass at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the settings of an outbox say to a transport."""

    retry_policy: RetryPolicy = field(default_factory=lambda: as_retry_policy((1, 10, 60, 300)))
    observe: Observer = field(default=lambda event: None)
    max_body_size: int = LARGEST_BODY  # bytes
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # all, by name; some hold a password

    def chosen(self, options: type[Options]) -> Options:
        """Those settings that the fields of a dataclass name; where one is not set, the dataclass has a default."""
        names = {each.name for each in fields(options)}  # type: ignore[arg-type]
        return options(**{name: value for name, value in self.settings.items() if name in names})


@dataclass(frozen=True, slots=True)
class Refusal:
    """The destination's answer that it does not take a message."""

    error: str
    permanent: bool = False  # it never will
    retry_after: timedelta | None = None  # how long it asks to be left alone
    unspecific: bool = False  # it may refuse everything for now, and not this message: no such path, no access
    unanswered: bool = False  # the destination said nothing: it cannot be written for it, or got no answer again


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
        return bool(self.confirmed) or any(not refusal.unanswered for refusal in self.refused.values())


Report = Callable[[Published], None]  # takes what is known of some messages of a batch; each is reported once


def unreported(published: Published) -> None:
    """For callers that wait for the whole batch."""


class Delivery(ABC):
    """An attempt that a worker holds."""

    __slots__ = ("attempt",)

    attempt: Attempt

    @property
    def raw(self) -> object:
        """The client library's own object, for listeners that ask for `message`."""
        return self.attempt.message

    @abstractmethod
    def settle(self, outcome: Outcome) -> Settlement:
        """Say how it ended, once. Written in batches, without waiting; False = nothing was written: it comes again."""

    @property
    def is_lost(self) -> bool:
        """Whether the hold on it is gone: it comes again, and nothing that is said of its end is written."""
        return False

    # What the database's deliveries can do besides.

    def completion(self) -> tuple[Executable, Rows] | None:
        """Goes into the listener's transaction: no row = lease lost, roll back. None: the inbox is needed."""
        return None

    def conclude(self, connection: Connection, outcome: Outcome) -> bool | None:
        """Write a failure on this connection, once; False = lease lost, roll back. `settle` is told afterwards.

        None: it cannot be written in a transaction of the worker's database.
        """
        return None

    @property
    def lease(self) -> Lease | None:
        """What the database holds it by: many deliveries are completed by one statement. None: no lease."""
        return None

    # An attempt may be isolated: its start is counted only when nothing runs beside it.

    async def start(self) -> Delivery | None:
        """Count the start; what its listener is to be called for now. None: this worker has lost it."""
        return self

    async def settled(self) -> None:
        """Wait until its outcome is written."""


class Consumer(ABC, AsyncIterator[Delivery]):
    """The deliveries of one queue."""

    # Called when deliveries that were taken are lost. The worker that sets it says how each of them ended all the same.
    on_lost: Callable[[], object] | None = None

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Delivery:
        """Wait for the next one."""

    def take(self) -> Delivery | None:
        """The next one, if it is there at this moment; without it, a listener that takes lists gets lists of one."""
        return None

    async def aclose(self) -> None:
        """Take no more, and give back what was not taken."""


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


@dataclass(frozen=True)
class Route:
    """One destination of several. Its name is that of a queue in the table, from which a relay of its own takes."""

    name: str
    transport: Transport
    binding_keys: tuple[str, ...]

    @property
    def bindings(self) -> list[Binding]:
        return [Binding(self.name, binding_key) for binding_key in self.binding_keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """What listeners need at a broker, in the three forms that `outbox topology` prints."""

    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]  # headings and rows, for people
    definitions: object  # what the broker itself can import, as JSON
    terraform: str


Health = Callable[[], Awaitable[str | None]]  # asks why the destination takes no messages now; None: it does


class Transport(ABC):
    """Everything the library asks of a broker. What is not overridden is not there, and `features` says so."""

    name: str  # one word, recorded with the table so that no other transport takes its messages
    features: Features = Features()
    dead_letters: DeadLetters | None = None  # of its queues
    address: str = ""  # where it leads, recorded with the table; without user, password and what may change
    route: str | None = None  # how its messages are called in the table, if it is one of several; default: its URL
    routes: tuple[Route, ...] = ()  # the destinations that it stands for, if it publishes nothing itself

    async def open(self) -> None:
        """Connect, or count one more that uses the connection. Without it there is nothing to connect to."""

    async def close(self) -> None:
        """Write the outcomes that are known, give back the rest, and disconnect."""

    def adopt(self, defaults: Defaults) -> None:
        """Take from the settings what an object that was given as the transport was not given."""

    # Publishing.

    @abstractmethod
    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        """Hand messages over. Raises TransportUnavailable only if nothing was sent.

        `report` takes answers as they come, so that no answered message waits for the slowest of its batch. The result
        holds what was reported, too.
        """

    async def back(self) -> None:
        """Wait until a destination that was away would take messages. Without it a relay finds out by claiming."""

    # Consuming.

    async def declare(self, listeners: Sequence[Listener]) -> None:
        """Make the queues and bindings that the listeners need."""
        raise self._only_publishes()

    def consume(self, listener: Listener, prefetch: int) -> Consumer:
        """Deliveries of the listener's queue, at most `prefetch` unsettled. Closing gives back what was not taken."""
        raise self._only_publishes()

    def queue_name(self, queue: str) -> str:
        """How the destination calls a listener's queue."""
        return queue

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> Collection[Binding] | None:
        """The bindings of these queues of listeners. None, at a start: they could not be told without more settings.

        Then what workers recorded in the database is taken, if there is one.

        ConfigurationError says why they cannot be told, and what to do.
        """
        return None

    async def unbind(self, binding: Binding) -> None:
        """Let a queue get no further messages by this key; those that it holds stay."""
        raise ConfigurationError(f"the transport {self.name!r} has no queues that could be bound")

    @property
    def takers(self) -> Takers | None:
        """The queues of this process that take messages straight from the router, if they are in the store."""
        return None

    # For operators.

    def watched(self) -> AbstractAsyncContextManager[Health | None]:
        """Around questions about its health, by a process that neither publishes nor consumes. None: it cannot tell."""
        return nullcontext(None)

    async def counted(self, recorded: Collection[str]) -> Sequence[QueueBacklog] | None:
        """The backlog of each queue, while a `watched` is open over one connection. Never raises if it is away.

        `recorded` are the destination's names of queues that workers wrote down. None: no queue is known.
        """
        return None

    async def examine(
        self,
        listeners: Sequence[Listener] = (),
        *,
        recorded: Collection[str] = (),
        stale: Collection[Binding] | None = None,
        fresh: timedelta = timedelta(0),
        admin_url: str = "",
    ) -> Sequence[Finding]:
        """What `outbox doctor` should say of it, beside what these listeners need. Nothing is made or changed.

        Without listeners it is about `recorded` queues. `stale` are bindings that workers made and none of these
        listeners asks for, for a broker that does not tell its own; None: they were not recorded. Dead letters younger
        than `fresh` are counted. `admin_url` is that of the broker's administration interface, if it was named.
        """
        if self.dead_letters is None:
            return ()
        counted = await self.counted(recorded)
        known = None if counted is None else [found.queue for found in counted if found.dead != 0]
        return await fresh_dead_letters(self.dead_letters, known, fresh, f"in the queues of {self.name}")

    async def server_version(self) -> str:
        """What the broker says that it is, for `topology`. Empty: it does not tell, or must not be asked."""
        return ""

    def topology(
        self,
        listeners: Sequence[Listener],
        *,
        virtual_host: str = "",  # default: that of its own URL
        server_version: str = "",
        users: Mapping[str, str] | None = None,  # the names of those that exist, by role: relay, worker
    ) -> Provisioning:
        """What listeners need at the broker, for `outbox topology`. Nothing is connected to."""
        raise ConfigurationError(f"the transport {self.name!r} needs nothing that could be provisioned")

    # For tests.

    def advance(self, by: timedelta) -> None:
        """Let time pass for everything in its queues."""

    def until_next_due(self, queues: Collection[str]) -> timedelta | None:
        """How long until the first delayed message of these queues is due; None if nothing is delayed."""
        return None

    def waiting(self, queue: str | None = None) -> int:
        """How many messages a queue or all of them hold, delayed ones included, those in flight not."""
        return 0

    def _only_publishes(self) -> ConfigurationError:
        return ConfigurationError(
            f"the transport {self.name!r} only publishes: a worker cannot take from it. What comes in over HTTP is "
            "served by http_app(listeners)"
        )


def countable(transport: Transport) -> list[Transport]:
    """Those with queues of their own that can be counted: itself, or the destinations of its routes."""
    each = [route.transport for route in transport.routes] or [transport]
    return [transport for transport in each if transport.features.counts_queues]


def check_features(transport: Transport, listeners: Sequence[Listener]) -> None:
    """Refuse listeners that ask for what their transport cannot do."""
    features = transport.features
    for listener in listeners:
        if not features.wildcards and {"*", "#"} & set(listener.binding_key.split(".")):
            raise ConfigurationError(
                f"{listener.queue} listens to {listener.binding_key!r}, and the transport {transport.name!r} knows no "
                "wildcards: write a listener for each routing key"
            )
        if not features.acknowledges_individually and not listener.store_first:
            raise ConfigurationError(
                f"{listener.queue}: the transport {transport.name!r} acknowledges no single message, so that its "
                "deliveries must be stored first: give the listener store_first=True"
            )
