"""Progress: how far a long command has come, on stderr."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from outbox.cli import words

QUIET_FOR = 1.0  # seconds: what ends sooner says nothing
ON_TERMINAL, IN_FILE = 0.2, 10.0  # seconds between two updates: of one line, or a line each


class Progress:
    """One line that changes on a terminal, and a line now and then elsewhere."""

    def __init__(self, total: int, done: str) -> None:
        self._total = total
        self._done = done
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._began + QUIET_FOR
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)

    def show(self, count: int) -> None:
        """So many of them are done."""
        now = time.monotonic()
        if now < self._next or not count:
            return
        self._next, self._shown = now + (ON_TERMINAL if self._terminal else IN_FILE), True
        left = timedelta(seconds=(now - self._began) * (self._total - count) / count)
        text = f"{self._done} {count} of {self._total}, {words.duration(left)} left"
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
