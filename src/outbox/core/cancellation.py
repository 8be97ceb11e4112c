"""Cancellation: telling our own end from somebody else's."""

from __future__ import annotations

import asyncio

# What a worker says when it cancels a listener, so that a listener's own cancellation differs.
ABANDONED = "abandoned"
LOST = "its delivery was lost"


def cancelled_from_outside() -> bool:
    """Whether the CancelledError at hand is meant for this task, and not thrown by something it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def was_abandoned(error: BaseException) -> bool:
    """Whether an error was raised instead of the cancellation by which a worker gives up on a listener."""
    behind = error.__context__
    return isinstance(behind, asyncio.CancelledError) and ABANDONED in behind.args
