"""Loops: what belongs to one event loop, work in it that must not be cut in the middle, and whose a cancellation is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from outbox.core.errors import DatabaseSilent

Value = TypeVar("Value")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    ending: AsyncGenerator[None, None]


class LoopLocal(Generic[Value]):
    """A value for each event loop: made when it is first needed there, closed there.

    `asyncio.run` and `asyncio.Runner` finalize a loop's asynchronous generators just before they close it, and a loop
    says nothing else about its end. So each value is closed by such a generator, unless `close` comes first. Values of
    loops that were closed without that are forgotten: nothing of theirs can be reached through a closed loop.
    """

    def __init__(self, make: Callable[[], Value], close: Callable[[Value], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._kept: dict[asyncio.AbstractEventLoop, _Kept[Value]] = {}

    def here(self) -> Value:
        """The running loop's value."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            for other in [other for other in list(self._kept) if other.is_closed()]:
                self._kept.pop(other, None)
            kept = self._kept[loop] = _Kept(self._make(), self._until_the_end(loop))
            first: Any = kept.ending.__anext__()
            with suppress(StopIteration):  # it has begun: nothing in it waits before its `yield`
                first.send(None)
        return kept.value

    def elsewhere(self) -> dict[asyncio.AbstractEventLoop, Value]:
        """The values of the other loops that are still open."""
        here = running_loop()
        return {
            loop: kept.value for loop, kept in list(self._kept.items()) if loop is not here and not loop.is_closed()
        }

    def __contains__(self, loop: asyncio.AbstractEventLoop) -> bool:
        return loop in self._kept

    async def close(self) -> None:
        """Close the running loop's value, if there is one. Until that is done it is still the loop's."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            return
        await self._close(kept.value)  # if this is cancelled, the next close finds it
        self._kept.pop(loop, None)
        await kept.ending.aclose()

    async def _until_the_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            kept = self._kept.get(loop)
            if kept is not None:
                await self._close(kept.value)
                self._kept.pop(loop, None)


Result = TypeVar("Result")

CANCELLED_WITHIN = 5.0  # seconds that a caller who wants to leave waits for an answer
GIVEN_UP_ENDS_WITHIN = 2.0  # seconds that work which is given up has to let go of its connection


async def finish(work: Coroutine[Any, Any, Result], within: float) -> Result:
    """Wait for the work whatever happens to the caller; a cancellation is raised once it is over.

    A statement that is cut leaves its outcome unknown and its connection unusable. All of ours are short. A database
    that has not answered within so many seconds is given up, and the connection with it.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[bool] = loop.create_future()
    task = loop.create_task(_work(work, over))
    deadline = loop.call_later(within, _set, over, False)
    try:
        answered = await over
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=min(within, CANCELLED_WITHIN))
        await _give_up(task)
        raise
    finally:
        deadline.cancel()
    if not answered:
        await _give_up(task)
        raise DatabaseSilent(f"the database did not answer within {within:g} s")
    return await task


async def _work(work: Coroutine[Any, Any, Result], over: asyncio.Future[bool]) -> Result:
    """Notifies its waiter itself when it is over: the task goes on in the next iteration of the loop."""
    try:
        return await work
    finally:
        _set(over, True)


def _set(over: asyncio.Future[bool], answered: bool) -> None:
    if not over.done():
        over.set_result(answered)


async def _give_up(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=GIVEN_UP_ENDS_WITHIN)
    if task.done() and not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it later


# What a worker says when it cancels a listener, so that a listener's own cancellation differs.
ABANDONED = "abandoned"
LOST = "its delivery was lost"

_uncut: set[asyncio.Task[Any]] = set()
_cut: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()


@contextmanager
def uncut() -> Iterator[None]:
    """Around a COMMIT on the event loop: a run whose delivery is lost ends it, and calls what waits for it."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - listeners run in tasks
    _uncut.add(task)
    try:
        yield
    finally:
        _uncut.discard(task)


def cut(task: asyncio.Task[Any], why: str) -> None:
    """Cancel a task, unless it commits."""
    if task not in _uncut:
        give_up(task, why)


def give_up(task: asyncio.Task[Any], why: str) -> None:
    """Cancel a listener's task; what it does after that is not committed."""
    _cut[task] = why
    task.cancel(why)


def check_not_cut() -> None:
    """Raise the cancellation again that this task did not heed: it may have left out half of its work."""
    task = asyncio.current_task()
    why = None if task is None else _cut.get(task)
    if why is not None:
        raise asyncio.CancelledError(why)


def cancelled_from_outside() -> bool:
    """Whether the CancelledError at hand is meant for this task, and not thrown by something it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def was_abandoned(error: BaseException) -> bool:
    """Whether an error was raised instead of the cancellation by which a worker gives up on a listener."""
    behind = error.__context__
    return isinstance(behind, asyncio.CancelledError) and ABANDONED in behind.args
