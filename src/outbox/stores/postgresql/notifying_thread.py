"""NotifyingThread: an event loop in a daemon thread, from which commits of callers without a loop are notified.

There is one in a process, started by the first commit that needs it. Nothing waits for it, and what goes wrong in it is
logged at the level DEBUG: without a notification the next poll finds the message.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from outbox.core.forks import forget_after_fork, never_collect

logger = logging.getLogger("outbox")

END_WITHIN = 2.0  # seconds that the end of the process, or a fork, waits for a notification under way


class Notifying(Protocol):
    """What notifies from whatever event loop runs."""

    def notify_here(self, destinations: set[str]) -> None: ...


class NotifyingThread:
    """Lets outboxes notify in its event loop. What several commits want notified is told once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pending: dict[Notifying, set[str]] = {}
        self._left: asyncio.AbstractEventLoop | None = None  # by a thread that may not have ended in time
        self._forks = 0  # under way: another thread may commit meanwhile
        atexit.register(self.end)
        forget_after_fork(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork)

    def notify(self, wakeup: Notifying, destinations: set[str]) -> None:
        """Wake other processes soon. It never raises: the caller has committed, and must not be told otherwise."""
        try:
            with self._lock:
                loop = None if self._forks else self._loop or self._started()
                is_first = not self._pending
                self._pending.setdefault(wakeup, set()).update(destinations)
            if loop is not None and is_first:
                loop.call_soon_threadsafe(self._notify)
        except Exception as error:  # noqa: BLE001 - a wake-up is a hint; threads may be forbidden, or the process ends
            logger.debug("no worker was notified: %s", type(error).__name__)

    def _started(self) -> asyncio.AbstractEventLoop:
        if _threads_are_greenlets():
            raise RuntimeError("an event loop in a greenlet would be taken for that of all others")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=[loop], name="outbox notify", daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _notify(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for wakeup, destinations in pending.items():
            wakeup.notify_here(destinations)

    async def run(self, work: Callable[[], Awaitable[None]], within: float) -> None:
        """Run work in this loop, if there is one, for a caller in another; it goes on if the time is over."""

        async def run() -> None:
            await work()

        loop = self._loop
        if loop is not None and loop is not asyncio.get_running_loop() and not loop.is_closed():
            running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
            await asyncio.wait([running], timeout=within)

    def end(self) -> None:
        """Tell what is pending, close connections and end the thread; the next commit starts another one."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(END_WITHIN)
            _leave(thread)
            self._left = loop

    def _before_fork(self) -> None:
        """End it, and let none begin until the process has forked.

        One that begins connects, and a child of that moment may inherit OpenSSL's locks as they are held for it.
        """
        with self._lock:
            self._forks += 1
        self.end()

    def _after_fork(self) -> None:
        """Tell what was committed meanwhile."""
        try:
            with self._lock:
                self._forks -= 1
                loop = (self._loop or self._started()) if self._pending and not self._forks else None
            if loop is not None:
                loop.call_soon_threadsafe(self._notify)
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("no worker was notified: %s", type(error).__name__)

    def forked(self) -> None:
        """In a child process: a thread that did not end in time is the parent's, and so is its loop."""
        never_collect([self._left, self._pending])
        self._lock, self._pending, self._left, self._forks = threading.Lock(), {}, None, 0


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())  # closes what stores keep for this loop
    finally:
        loop.close()


def _leave(thread: threading.Thread) -> None:
    """Wait until the system has no such thread any more, where it tells: `join` returns earlier, up to Python 3.12.

    OpenSSL cleans up at the very end of a thread, and a child that is forked meanwhile inherits its locks as they are.
    """
    task, latest = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + END_WITHIN
    while not thread.is_alive() and task.exists() and time.monotonic() < latest:
        time.sleep(0.0005)


def _threads_are_greenlets() -> bool:
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched("threading"))
        or (eventlet is not None and eventlet.is_monkey_patched("thread"))
    )


thread = NotifyingThread()
