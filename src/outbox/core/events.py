"""Events: what happened, told to observers after the write landed. They choose the words and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from outbox.core.attempt import Attempt, Outcome
from outbox.core.binding import Binding
from outbox.core.message import Message


@dataclass(frozen=True, slots=True)
class Emitted:
    """Messages were written in the caller's transaction, which may still roll back."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Bound:
    """A worker declared what its queue asks for."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class Unbound:
    """A queue gets no further messages by this key, because its listener or route does not ask for it any more."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class Routed:
    """Messages got their destinations."""

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class Unroutable:
    """Messages wait because no binding matches them."""

    routing_key: str
    count: int


@dataclass(frozen=True, slots=True)
class Received:
    """Messages from outside were stored in a queue of the database."""

    queue: str
    stored: int
    duplicates: int = 0  # they had been stored or handled before
    unwanted: int = 0  # no listener has the queue: they are dead letters
    expired: int = 0  # they are older than the inbox: dead letters as well


@dataclass(frozen=True, slots=True)
class Relayed:
    """A relay's attempt ended."""

    attempt: Attempt
    outcome: Outcome
    destination: str | None = None  # the route, where there are several


@dataclass(frozen=True, slots=True)
class RequestDeclined:
    """`http_app` did not take a request, and told its sender why."""

    status: int
    why: str


@dataclass(frozen=True, slots=True)
class CircuitOpened:
    """A destination does not answer: no relay asks it before the pause is over, and no message loses an attempt."""

    destination: str | None
    error: str
    pause: timedelta


@dataclass(frozen=True, slots=True)
class CircuitClosed:
    """It answers again."""

    destination: str | None


@dataclass(frozen=True, slots=True)
class Handled:
    """A worker's attempt ended."""

    queue: str
    attempt: Attempt
    outcome: Outcome
    duration: timedelta
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Conflicted:
    """The database could not fit a listener's transaction between others; it runs again, which is no new attempt."""

    queue: str
    attempt: Attempt
    run: int
    error: BaseException
    pause: timedelta


@dataclass(frozen=True, slots=True)
class StillRunning:
    """A listener has been at one message for very long."""

    queue: str
    attempt: Attempt
    duration: timedelta


@dataclass(frozen=True, slots=True)
class LeaseWasLost:
    """A worker whose lease had expired was fenced: another one may have the message now."""

    phase: str  # terminal, retry or completion
    row_id: int
    queue: str | None
    deliveries_count: int


@dataclass(frozen=True, slots=True)
class Unsettled:
    """How an attempt ended could not be written, as when the connection to a broker broke: its message comes again."""

    queue: str
    attempt: Attempt
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CleanedUp:
    """Rows left by retention."""

    what: str  # sent, inbox or expired
    count: int


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """A relay reads the write-ahead log: it has the replication slot now."""

    slot: str
    retained_bytes: int | None = None  # of the log, that the server has kept for it


@dataclass(frozen=True, slots=True)
class SlotInUse:
    """A relay waits for the replication slot, which another one has."""

    slot: str
    holder: str


@dataclass(frozen=True, slots=True)
class Started:
    """A relay or worker is at work."""

    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A relay or worker ended; `abandoned` listeners did not end within the grace."""

    what: str
    abandoned: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A relay or worker ended by itself, for good: nothing in this process does its work until it is started again."""

    what: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class HookFailed:
    """What was to be done after a commit failed. The commit stands, and it is not tried again."""

    what: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Advised:
    """Something works, and would be safer if it were otherwise."""

    where: str
    advice: str


@dataclass(frozen=True, slots=True)
class Troubled:
    """Something outside went wrong; the work goes on or starts again after a pause."""

    where: str
    error: BaseException
    pause: timedelta
    # If `Recovered` follows: the database, the transport or a route; `where` itself if that answers and refuses.
    outage_of: str | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was `Troubled` works again."""

    where: str
    error: BaseException  # the last one
    after: timedelta  # since the first one
    outage_of: str | None = None


Event = (
    Emitted
    | Bound
    | Unbound
    | Routed
    | Unroutable
    | Received
    | RequestDeclined
    | Relayed
    | CircuitOpened
    | CircuitClosed
    | Handled
    | Conflicted
    | StillRunning
    | LeaseWasLost
    | Unsettled
    | CleanedUp
    | SlotTaken
    | SlotInUse
    | Started
    | Stopped
    | Failed
    | HookFailed
    | Advised
    | Troubled
    | Recovered
)


class Observer(Protocol):
    """Gets every event. Must not block and may raise: an observer's error is logged, and nothing else."""

    def __call__(self, event: Event, /) -> None: ...
