"""Backoff: how long to wait before looking again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from outbox.core.durations import Seconds, as_delay, configured
from outbox.core.errors import ConfigurationError

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
    """Pauses after errors, each twice as long as the one before; or those that somebody chose."""

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
    """The pause that somebody chose after so many errors in a row, in seconds."""
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
