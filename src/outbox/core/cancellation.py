"""Cancellation: telling our own end from somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What a worker says when it cancels a listener, so that a listener's own cancellation differs.
ABANDONED = "abandoned"
LOST = "its delivery was lost"

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


def cut(task: asyncio.Task[Any]) -> None:
    """Cancel a run whose delivery is lost, unless it commits."""
    if task not in _uncut:
        task.cancel(LOST)


def cancelled_from_outside() -> bool:
    """Whether the CancelledError at hand is meant for this task, and not thrown by something it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def was_abandoned(error: BaseException) -> bool:
    """Whether an error was raised instead of the cancellation by which a worker gives up on a listener."""
    behind = error.__context__
    return isinstance(behind, asyncio.CancelledError) and ABANDONED in behind.args
