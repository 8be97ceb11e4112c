"""Finish: database work that must not be cut in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the work whatever happens; a cancellation is raised once it is over.

    A statement that is cut leaves its outcome unknown and its connection unusable. All of ours are short.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is told about it later: the cancellation says more
        raise
