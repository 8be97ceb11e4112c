"""Shutdown: SIGINT and SIGTERM as two events, for relay and worker alike."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_listening: list[Shutdown] = []
_before: dict[signal.Signals, Any] = {}


@dataclass(frozen=True, eq=False)
class Shutdown:
    """`begun`: start nothing new, let the running end. `forced`: do not wait for them either."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    forced: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self) -> None:
        """The first one begins the shutdown, a second one forces it."""
        if self.begun.is_set():
            self.forced.set()
        self.begun.set()


@contextmanager
def on_signals() -> Iterator[Shutdown]:
    """A shutdown that the process's signals begin. Outside of the main thread signals belong to the application.

    Several may be open at once, a relay's and a worker's: each gets every signal, and the last one to leave puts back
    the handlers that were there before the first.
    """
    shutdown = Shutdown()
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    loop = asyncio.get_running_loop()
    if not _listening:
        _before.update({number: signal.getsignal(number) for number in SIGNALS})
        for number in SIGNALS:
            loop.add_signal_handler(number, _tell_all)
    _listening.append(shutdown)
    try:
        yield shutdown
    finally:
        _listening.remove(shutdown)
        if not _listening:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, _before.pop(number))


def _tell_all() -> None:
    for shutdown in _listening:
        shutdown.signal()
