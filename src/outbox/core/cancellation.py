"""Cancellation: telling our own end from somebody else's."""

from __future__ import annotations

import asyncio


def cancelled_from_outside() -> bool:
    """Whether the CancelledError at hand is meant for this task, and not thrown by something it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
