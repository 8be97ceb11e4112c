"""Cancellation: telling our own end from somebody else's."""

from __future__ import annotations

import asyncio

ABANDONED = "abandoned"  # what a worker says when it cancels a listener, so that a listener's own cancellation differs


def cancelled_from_outside() -> bool:
    """Whether the CancelledError at hand is meant for this task, and not thrown by something it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
