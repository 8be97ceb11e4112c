"""Backlog: what is in a store, and how its destinations are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from outbox.core.callers_line import CallersLine
from outbox.core.durations import NO_DELAY
from outbox.core.message import Message

IN_DATABASE = "database"  # the transport whose queues are in the store itself
IN_ROUTES = "routes"  # the transport whose queues are emptied by relays, one for each route
UNKNOWN = "unknown"  # in place of a reason that would have to be read at a broker


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """How many messages are in one queue. None is a number that is not known, which happens at a broker only."""

    queue: str
    transport: str = IN_DATABASE  # where the queue is
    binding_keys: tuple[str, ...] | None = ()
    queued: int | None = 0  # not attempted yet; at a broker: in the queue itself, retries that came back included
    retrying: int | None = 0  # attempted and waiting for the next attempt
    leased: int | None = 0  # in flight: held by a worker, and counted in queued or retrying as well
    dead: int | None = 0
    oldest: timedelta | None = None  # for how long the oldest due message has been due; never told at a broker
    consumers: int | None = None  # at a broker: how many workers consume it, once for each of their connections

    @property
    def open(self) -> int:
        """How many are known to wait here, or to be in flight."""
        return (self.queued or 0) + (self.retrying or 0)

    @property
    def delivered(self) -> int | None:
        """The name that `queued` had in 0.1."""
        CallersLine.here().warn("QueueBacklog.delivered is deprecated: it is called queued", DeprecationWarning)
        return self.queued


class CircuitState(StrEnum):
    """How a destination is."""

    CLOSED = "closed"  # it answers
    OPEN = "open"  # it does not answer: no relay asks it for a while
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
    """How many messages a store has at one moment."""

    waiting: int = 0  # emitted and not yet sent or routed, the unroutable ones not counted
    due: int = 0  # of those: could be sent now
    refused: int = 0  # of those: their destination has refused them before; they are tried again
    refused_for: timedelta | None = None  # for how long the oldest of the refused has waited since it was first due
    oldest: timedelta | None = None  # for how long the oldest due message, waiting or in a queue, has been due
    leased: int | None = 0  # held by a relay or a worker, queues included; none: a broker does not tell its workers'
    unroutable: int = 0  # no binding matches them
    sent: int = 0  # kept by clean_up_after: those that relays sent
    handled: int = 0  # kept by clean_up_after: those that listeners handled
    dead: int | None = 0  # those in a broker's queues included; none: they cannot be counted
    dead_by_reason: Mapping[str, int] = field(default_factory=dict)  # `unknown`: those in a broker's queues
    rows_written: int = 0  # since the table was made: the difference of two looks tells a rate
    queues: tuple[QueueBacklog, ...] = ()
    circuits: tuple[Circuit, ...] = ()  # of destinations that once did not answer, and still get messages or have some

    def beside(self, queues: Sequence[QueueBacklog] | None) -> Backlog:
        """Together with the numbers of a broker's queues; none: nothing is known of them."""
        if queues is None:
            return replace(self, leased=None, dead=None)
        elsewhere = {found.queue for found in queues}
        # A binding in the database says nothing about a queue that the broker has, unless messages were left there.
        here = [found for found in self.queues if found.open or found.dead or found.queue not in elsewhere]
        known = sum(found.dead for found in queues if found.dead is not None)
        return replace(
            self,
            leased=_sum([self.leased, *(found.leased for found in queues)]),
            dead=_sum([self.dead, *(found.dead for found in queues)]),
            dead_by_reason={**self.dead_by_reason, **({UNKNOWN: known} if known else {})},
            queues=tuple(sorted((*here, *queues), key=lambda found: (found.queue, found.transport))),
        )


def _sum(counts: Sequence[int | None]) -> int | None:
    """None as soon as one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message where it is now, with its walk so far."""

    row_id: int
    message: Message
    state: str  # waiting, unroutable, queued, retrying, sent, handled or dead
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
