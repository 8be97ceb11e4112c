"""Finish: database work that must not be cut in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from outbox.core.errors import DatabaseSilent

Result = TypeVar("Result")

CANCELLED_WITHIN = 5.0  # seconds that a caller who wants to leave waits for an answer
GIVEN_UP_ENDS_WITHIN = 2.0  # seconds that work which is given up has to let go of its connection

_uncut: set[asyncio.Task[Any]] = set()


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
        task.cancel(why)


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
    """Says by itself when it is over: whoever waits goes on in the very next turn of the loop."""
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
        task.exception()  # looked at, so that nobody is told about it later
