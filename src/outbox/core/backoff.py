"""Backoff: how long to wait and how much to take next, by what happened last; and what is told of errors meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from outbox.core.durations import Seconds, as_delay, configured
from outbox.core.errors import ConfigurationError
from outbox.core.events import Observer, Recovered, Troubled

RestartDelay = Seconds | Callable[[int, BaseException], Seconds | None]

SHORTEST = 0.05  # seconds: what follows something often follows it closely


class Backoff:
    """Short pauses after activity, growing to the longest one while nothing happens."""

    def __init__(self, longest: float, shortest: float = SHORTEST) -> None:
        self._longest = longest
        self._shortest = min(shortest, longest)
        self._next = self._shortest

    def reset(self) -> None:
        """Something happened."""
        self._next = self._shortest

    def pause(self) -> float:
        """The next pause, in seconds; the one after it is twice as long."""
        pause = self._next
        self._next = min(self._longest, self._next * 2)
        return pause


class ErrorBackoff:
    """Pauses after errors, each twice as long as the one before; or those that the user chose."""

    def __init__(self, longest: float, shortest: float, chosen: RestartDelay | None) -> None:
        self._pace = Backoff(longest, shortest)
        self._chosen = chosen
        self._count = 0

    def reset(self) -> None:
        """It works again."""
        self._count = 0
        self._pace.reset()

    def pause(self, error: BaseException, at_most: float | None = None) -> float:
        """The pause after this error, in seconds; one that was chosen has no limit."""
        self._count += 1
        growing = self._pace.pause()
        said = chosen_pause(self._chosen, self._count, error)
        if said is not None:
            return said
        return growing if at_most is None else min(growing, at_most)


def chosen_pause(chosen: RestartDelay | None, count: int, error: BaseException) -> float | None:
    """The pause that the user chose after so many errors in a row, in seconds."""
    with suppress(Exception):  # a function that cannot say leaves it to us
        said = chosen(count, error) if callable(chosen) else chosen
        return None if said is None else as_delay(said).total_seconds()
    return None


def check_restart_delay(chosen: RestartDelay) -> None:
    """Refuse what is neither a duration nor a function."""
    if callable(chosen):
        return
    if configured(as_delay, chosen, what="restart_delay").total_seconds() < SHORTEST:
        raise ConfigurationError(f"restart_delay={chosen!r}: at least {SHORTEST:g} s, or errors come without a pause")


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


# How many messages to have at once: more while they are used up quickly, less while they last.
# Messages in flight in one worker are out of reach of all others, so a slow listener takes few.

SHORT_WORK, LONG_WORK = 0.1, 1.0  # seconds that messages last before the next are more, or fewer


class Prefetch:
    """A number that adapts."""

    __slots__ = ("_growth", "_least", "_most", "_since", "settled", "size")

    def __init__(self, least: int, most: int, *, growth: int, now: float | None = None) -> None:
        self._least = min(least, most)
        self._most = most
        self._growth = growth  # so many times more
        self.size = self._least
        self.settled = 0  # since it was adapted the last time
        self._since = time.monotonic() if now is None else now

    def adapt(self, now: float, *, grows: bool) -> bool:
        """So long did those of the last time last; whether the number has changed. It grows only if it may."""
        lasted, self._since, self.settled = now - self._since, now, 0
        before = self.size
        if lasted < SHORT_WORK and grows:
            self.size = min(self._most, self.size * self._growth)
        elif lasted > LONG_WORK:
            self.size = max(self._least, self.size // 2)
        return self.size != before
