"""Shutdown: SIGINT and SIGTERM as two events, for relay and worker alike."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
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
    """A shutdown that the process's signals begin. Outside of the main thread signals are somebody else's."""
    shutdown = Shutdown()
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, shutdown.signal)
    try:
        yield shutdown
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
