"""Routing: messages on their way into queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import Executable

from outbox.core.attempt import Reason
from outbox.core.claim import Leased, Rows

Statement = tuple[Executable, Rows]

DISCARD = "discard"


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
    discarded: int = 0  # messages that no queue needs, by the `unroutable` setting
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
