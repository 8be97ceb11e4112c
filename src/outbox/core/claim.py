"""Claim: messages that no other process attempts while it is held, and where they are claimed from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Connection, Executable

from outbox.core.attempt import Attempt, Outcome

Rows = list[dict[str, Any]]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to claim: up to `limit` due messages of one destination.

    Of the `limit` oldest it takes those that are not suspected, and as many suspected poison messages as it is told.
    With `NONE` the suspected ones are passed over, and do not count towards the limit.
    One that crashed `isolated_at` times is leased without counting a start: its attempt is isolated, and
    `QueueClaim.start` counts it.
    """

    limit: int
    lease: timedelta
    destination: str | None = None  # none: those that were not routed
    suspected: Suspected = Suspected.ALL
    isolated_at: int | None = None
    largest_bytes: int | None = None  # of bodies, all together; the store knows how much is fetched in time
    since: datetime | None = None  # nothing that was due before; the store knows where the live rows begin


class Claim(Protocol):
    """Attempts that no other process makes while this is held. Renewed while it is open."""

    @property
    def attempts(self) -> Sequence[Attempt]: ...

    async def settle(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        """Write how attempts ended, by their ids; returns the ids whose lease was lost, which wrote nothing."""
        ...


class QueueClaim(Claim, Protocol):
    """What a worker needs besides: attempts that end inside a listener's transaction."""

    def completion(self, attempt: Attempt) -> tuple[Executable, Rows]:
        """The statement that completes an attempt inside a listener's transaction; no row = lease lost, roll back."""
        ...

    def conclude(self, connection: Connection, attempt: Attempt, outcome: Outcome) -> bool:
        """Write how an attempt ended inside a caller's transaction; False = lease lost, roll back."""
        ...

    def lease_on(self, attempt: Attempt) -> Lease:
        """What many of them are completed by at once, with `Queues.complete`."""
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


class Leased(QueueClaim, AbstractAsyncContextManager[QueueClaim], Protocol):
    """A claim that holds its attempts already; it is renewed from when it is entered."""


class Feed(Protocol):
    """Where messages are claimed from."""

    def claim(self, selection: Selection) -> AbstractAsyncContextManager[Claim]:
        """Lease what is selected. Several claims may be open at once; what is not settled at the end is given back."""
        ...

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        """Sleep until something may be due for the destination; never longer than `longest` seconds."""
        ...


class QueueFeed(Feed, Protocol):
    """Where the messages of queues are claimed from."""

    def claim(self, selection: Selection) -> AbstractAsyncContextManager[QueueClaim]: ...
