"""Outages: which of many errors are lines of the log. One when an outage begins, one a minute, one when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.core.backoff import DATABASE
from outbox.core.events import Recovered, Troubled
from outbox.core.reaching import is_unreachable

AGAIN_AFTER = 60.0  # seconds between two lines about the same outage
AFTERMATH = 10.0  # seconds in which a late error of an outage that has ended is no new one


@dataclass(slots=True)
class _Open:
    began: float
    logged: float
    parts: set[str] = field(default_factory=set)


class Outages:
    """What is away at the moment. All parts of a process that miss the same thing share one outage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def strikes(self, what: str, where: str) -> timedelta | None:
        """How long it has lasted, if that is to be logged now."""
        now = self._clock()
        if now - self._ended.get(what, float("-inf")) < AFTERMATH:
            return None
        outage = self._open.get(what)
        if outage is None:
            self._ended.pop(what, None)
            outage = self._open[what] = _Open(began=now, logged=now - AGAIN_AFTER)
        outage.parts.add(where)
        if now - outage.logged < AGAIN_AFTER:
            return None
        outage.logged = now
        return timedelta(seconds=now - outage.began)

    def ends(self, what: str, where: str) -> timedelta | None:
        """How long it lasted, if this is its end: the first success of a part that missed it."""
        refused = self._ends(where, where)  # what refused this part before it went away does so no more
        lasted = refused if what == where else self._ends(what, where)
        return refused if lasted is None else lasted

    def _ends(self, what: str, where: str) -> timedelta | None:
        outage = self._open.get(what)
        if outage is None or where not in outage.parts:
            return None
        del self._open[what]
        self._ended[what] = now = self._clock()
        return timedelta(seconds=now - outage.began)


def missing(event: Troubled | Recovered) -> str:
    """What an error is about. What answers and refuses is another matter for each part that it refuses.

    Of a database the error tells; a transport says so by `outage_of`.
    """
    if event.outage_of is None or (event.outage_of == DATABASE and not is_unreachable(event.error)):
        return event.where
    return event.outage_of
