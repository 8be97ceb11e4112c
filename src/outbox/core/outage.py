"""Outage: from the first error of something outside to the first success after it, as one part of a process sees it."""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.core.events import Observer, Recovered, Troubled

DATABASE = "the database"
TRANSPORT = "the transport"  # where there are no routes; each of these has a name of its own


class Outage:
    """Tells observers of each error, and of the first success after it."""

    __slots__ = ("_began", "_error", "_last_of", "_observe", "_of", "_where")

    def __init__(self, where: str, of: str, observe: Observer) -> None:
        self._where = where
        self._of = self._last_of = of
        self._observe = observe
        self._error: BaseException | None = None
        self._began = 0.0

    def struck(self, error: BaseException, pause: timedelta, *, answered: bool = False) -> None:
        """An error came; the next try is after the pause. `answered`: it is not away, it refuses this part."""
        if self._error is None:
            self._began = time.monotonic()
        self._error = error
        self._last_of = self._where if answered else self._of
        self._observe(Troubled(self._where, error, pause, self._last_of))

    def over(self) -> None:
        """It worked. Costs nothing where it worked before."""
        if self._error is not None:
            error, self._error = self._error, None
            after = timedelta(seconds=time.monotonic() - self._began)
            self._observe(Recovered(self._where, error, after, self._last_of))
