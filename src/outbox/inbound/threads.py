"""Threads: where plain functions run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from outbox.inbound.transaction_guard import ENDED_ON_DRIVER, TransactionEnded, TransactionGuard

P = ParamSpec("P")
Result = TypeVar("Result")


class ThreadTimeout(TimeoutError):
    """A plain function ran out of time. Its thread cannot be stopped: the slot stays taken until it ends."""

    def __init__(self, limit: timedelta | None, thread: asyncio.Future[None]) -> None:
        super().__init__(f"no end within {limit}")
        self._thread = thread

    async def end(self) -> None:
        """Wait for the thread; how it ends is of no interest any more."""
        self._thread.add_done_callback(_seen)
        await asyncio.wait([self._thread])


class ThreadTransactionEnded(ThreadTimeout, TransactionEnded):
    """The same, and it had ended its transaction before: a retry would repeat what it has committed."""

    def __init__(self, limit: timedelta | None, thread: asyncio.Future[None]) -> None:
        super().__init__(limit, thread)
        self.args = (f"no end within {limit}, and {ENDED_ON_DRIVER}",)


class Fence:
    """Between a thread's work and its commit: the first to come, the thread or the end of its time, has it."""

    def __init__(self, started: Callable[[], object]) -> None:
        self.started = started  # the thread says that its clock may start
        self.guard: TransactionGuard | None = None  # of the thread's transaction, if it has one
        self._first = threading.Lock()

    def close(self) -> bool:
        """The thread's time is over; says whether it was kept from committing."""
        return self._first.acquire(blocking=False)

    def is_ended(self) -> bool:
        """Once it is closed: whether the listener has ended its transaction by itself."""
        return self.guard is not None and self.guard.is_ended_when_late()

    def pass_through(self) -> None:
        """The thread is about to commit."""
        if not self._first.acquire(blocking=False):
            raise TimeoutError("its time was over before it could commit")


async def run_in_thread(executor: Executor, work: Callable[[Fence], None], limit: timedelta | None) -> None:
    """Run a function that says when its clock starts. One that takes too long goes on, but commits nothing."""
    loop = asyncio.get_running_loop()
    started = asyncio.Event()
    fence = Fence(lambda: loop.call_soon_threadsafe(started.set))
    thread = loop.run_in_executor(executor, copy_context().run, work, fence)
    try:
        beginning: list[asyncio.Future[Any]] = [thread, asyncio.ensure_future(started.wait())]
        try:
            await asyncio.wait(beginning, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning[1].cancel()
        done, _ = await asyncio.wait([thread], timeout=None if limit is None else limit.total_seconds())
        if not done and fence.close():
            raise (ThreadTransactionEnded if fence.is_ended() else ThreadTimeout)(limit, thread)
        await asyncio.wait([thread])  # it commits: only the thread knows how that ends
    except asyncio.CancelledError as cancelled:
        thread.add_done_callback(_seen)
        if fence.close() and fence.is_ended():
            raise TransactionEnded(ENDED_ON_DRIVER) from cancelled
        raise
    thread.result()


class Threads(Executor):
    """A pool of daemon threads: one that never ends cannot keep the process from ending, as a standard pool's would."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        future: Future[Result] = Future()
        self._work.put(lambda: _run(future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._count < self._most:
            self._count += 1
            threading.Thread(target=self._serve, name=f"outbox-listener-{self._count}", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let each thread end when it has nothing to do. One that does not end is not waited for."""
        for _ in range(self._count):
            self._work.put(None)

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            work()
            self._idle.release()


def _seen(ended: asyncio.Future[None]) -> None:
    """It is not waited for any more, and asyncio complains of errors that were not retrieved."""
    if not ended.cancelled():
        ended.exception()


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - handed to the task that waits for the future
        future.set_exception(error)
