"""Pace: how long to wait before looking again."""

from __future__ import annotations

SHORTEST = 0.05  # seconds: what follows something often follows it closely


class Pace:
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
