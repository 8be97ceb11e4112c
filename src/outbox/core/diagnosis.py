"""Diagnosis: what a doctor finds, and the facts it is found from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from outbox.core.dead_letter import DeadLetters, Deaths
from outbox.core.durations import in_words
from outbox.core.errors import ClosedForGood, ConfigurationError, TransportUnavailable


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # it works, and may not for long
    ERROR = "error"  # messages do not get where they should


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a database says of itself, without a look at the messages in it."""

    server: str  # its name and version
    skew: timedelta  # by how much, at least, its clock is ahead of this process's; negative if it is behind
    findings: tuple[Finding, ...] = ()
    largest_body: int | None = None  # in bytes, that its server takes; None: as large as one likes


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """The messages for one destination: due, leased, expired, retried."""

    queue: str | None  # None: not routed yet
    due: int  # no process holds them and they could be claimed now
    overdue: timedelta | None  # for how long the oldest of them has been due
    leased: int  # held by a process
    next_end: timedelta | None  # when the first of these leases ends unless it is renewed
    expired: int  # their lease ran out, and no process has claimed them since
    expired_for: timedelta | None  # since when, at most
    retried: int = 0  # their last attempt failed, or their destination refused them
    retried_for: timedelta | None = None  # since the first of these was first due


async def fresh_dead_letters(
    letters: DeadLetters, queues: Sequence[str] | None, within: timedelta, where: str, *, known: bool = False
) -> list[Finding]:
    """Those of these queues, which may have some, and do if that is `known`; None: of all queues that are known.

    A queue of a broker can only be read by taking messages out of it: those without dead letters are left alone.
    """
    deaths: Sequence[Deaths] = ()
    try:
        if within and (queues or queues is None):
            deaths = await letters.deaths(within, known=queues or ())
    except (TransportUnavailable, ConfigurationError, ClosedForGood) as error:
        what = f"{where} {', '.join(queues or ())}".rstrip() + f": not looked at: {error}"
        level = Level.ERROR if known else Level.WARNING  # they are there, and may be fresh
        return [Finding(level, "dead letters", what, "outbox dead-letters list --queue QUEUE shows them")]
    return list(dead_letter_findings(deaths, within, where))


def dead_letter_findings(deaths: Sequence[Deaths], within: timedelta, where: str = "") -> Iterator[Finding]:
    """Those that died lately: a person has to see them, because nothing tries them again."""
    if not within:
        yield Finding(Level.OK, "dead letters", "not looked at: fresh_dead_letters is 0")
    elif not deaths:
        yield Finding(Level.OK, "dead letters", " ".join(["none", *where.split(), f"in the last {in_words(within)}"]))
    for queue in dict.fromkeys(each.queue for each in deaths):
        found = [each for each in deaths if each.queue == queue]
        reasons = ", ".join(f"{each.count} {each.reason}" for each in found)
        place = "before they reached a queue" if queue is None else place_of(queue)
        what = f"{sum(each.count for each in found)} {place}, in the last {in_words(within)}: {reasons}"
        if any(each.reason is None for each in found):
            what = f"{sum(each.count for each in found)} {place}, too many to read when they died"
        advice = f"see why, then replay or discard them: outbox dead-letters list --queue {shlex.quote(queue or '')}"
        yield Finding(Level.ERROR, "dead letters", what, advice)


def place_of(queue: str | None) -> str:
    """Where messages are, for people."""
    return "not routed or sent yet" if queue is None else f"in the queue {queue!r}"
