"""DeadLetter: a message that is no longer tried, with the reason, until it is replayed or discarded."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from outbox.core.attempt import Reason
from outbox.core.errors import TimeInvalid
from outbox.core.message import Message

LARGEST_ERROR = 8 * 1024  # bytes
READ_AT_ONCE = 1000  # letters

# The ids of a store's dead letters are below, those of a transport's queues above: one number names one letter.
FIRST_OF_QUEUES = 1 << 53

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """The unchanged message and why it is dead. `queue` is none if it had not reached a queue."""

    id: int
    message: Message
    queue: str | None
    reason: Reason
    error: str
    attempt_count: int
    crash_count: int
    history: str  # one line for each failed attempt
    died_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters a list is about."""

    queue: str | None = None  # an empty one: those that died before they reached any
    reason: Reason | None = None
    error: str | None = None  # a part of the error's text
    routing_key: str | None = None
    since: datetime | None = None  # died then or later
    before: datetime | None = None  # died earlier
    limit: int = 100
    after: int = 0  # an id

    def __post_init__(self) -> None:
        for name in ("since", "before"):
            time: datetime | None = getattr(self, name)
            if time is not None and time.tzinfo is None:
                raise TimeInvalid(f"{name}={time}: a time with a time zone, for example datetime.now(UTC)")

    def lets_through(self, letter: DeadLetter) -> bool:
        return (
            letter.id > self.after
            and self.queue in (None, letter.queue or "")
            and self.reason in (None, letter.reason)
            and (self.error is None or self.error in letter.error)
            and self.routing_key in (None, letter.message.routing_key)
            and (self.since is None or letter.died_at >= self.since)
            and (self.before is None or letter.died_at < self.before)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """How many dead letters of one queue have one reason."""

    queue: str | None  # none: they died before they reached one
    reason: str | None  # none: there are too many to read, so that their age is not known either
    count: int


class DeadLetters(Protocol):
    """Where dead letters are kept. Listing one changes nothing about it."""

    async def list(
        self,
        *,
        queue: str | None = None,
        reason: Reason | None = None,
        error: str | None = None,
        routing_key: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> list[DeadLetter]:
        """Dead letters in the order of their ids, those behind `after`; `error` is a part of the error's text.

        An empty `queue` chooses those that died before they reached one; `since` and `before` are about when they died.
        """
        filter = Filter(
            queue=queue,
            reason=reason,
            error=error,
            routing_key=routing_key,
            since=since,
            before=before,
            limit=limit,
            after=after,
        )
        return await self.chosen(filter)

    async def chosen(self, filter: Filter) -> builtins.list[DeadLetter]:
        """What `list` returns."""
        ...

    async def deaths(self, within: timedelta, *, known: Collection[str] = ()) -> builtins.list[Deaths]:
        """How many died within that time until now, by queue and reason.

        `known` are queues with dead letters, for those who cannot list them. This one reads the letters.
        """
        since, counted, after = datetime.now(UTC) - within, Counter[tuple[str | None, str]](), 0
        while letters := await self.chosen(Filter(since=since, limit=READ_AT_ONCE, after=after)):
            counted.update((letter.queue, letter.reason) for letter in letters)
            after = letters[-1].id
        return [Deaths(queue=queue, reason=reason, count=count) for (queue, reason), count in counted.items()]

    async def show(self, id: int) -> DeadLetter:
        """One dead letter; NotFound if there is none with that id."""
        ...

    async def replay(self, ids: Sequence[int]) -> int:
        """Try these again, each where it died, with fresh attempts and without its expiration; how many there were."""
        ...

    async def discard(self, ids: Sequence[int]) -> int:
        """Delete these for good; how many there were."""
        ...


class AllDeadLetters(DeadLetters):
    """Those of the relay, which a store keeps, and those of queues, which a transport keeps."""

    def __init__(self, of_relay: DeadLetters, of_queues: DeadLetters) -> None:
        self._of_relay = of_relay
        self._of_queues = of_queues

    async def chosen(self, filter: Filter) -> list[DeadLetter]:
        found = await self._of_relay.chosen(filter) if filter.after < FIRST_OF_QUEUES else []
        if len(found) < filter.limit and filter.queue != "":
            found += await self._of_queues.chosen(replace(filter, limit=filter.limit - len(found)))
        return found

    async def deaths(self, within: timedelta, *, known: Collection[str] = ()) -> list[Deaths]:
        return [*await self._of_relay.deaths(within), *await self._of_queues.deaths(within, known=known)]

    async def show(self, id: int) -> DeadLetter:
        return await (self._of_relay if id < FIRST_OF_QUEUES else self._of_queues).show(id)

    async def replay(self, ids: Sequence[int]) -> int:
        of_relay, of_queues = self._shared_out(ids)
        replayed = await self._of_relay.replay(of_relay) if of_relay else 0
        return replayed + (await self._of_queues.replay(of_queues) if of_queues else 0)

    async def discard(self, ids: Sequence[int]) -> int:
        of_relay, of_queues = self._shared_out(ids)
        discarded = await self._of_relay.discard(of_relay) if of_relay else 0
        return discarded + (await self._of_queues.discard(of_queues) if of_queues else 0)

    def _shared_out(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        return [id for id in ids if id < FIRST_OF_QUEUES], [id for id in ids if id >= FIRST_OF_QUEUES]


def clean(error: str) -> str:
    """An error text that every database can store: no control characters, at most 8 KiB."""
    text = _CONTROL.sub("�", error).encode(errors="replace")
    if len(text) > LARGEST_ERROR:
        text = text[: LARGEST_ERROR - len("…[cut]".encode())] + "…[cut]".encode()
    return text.decode(errors="ignore")
