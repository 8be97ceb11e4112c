"""Background: work beside a block, and the task that entered the block, which learns when the work ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from outbox.shutdown import Shutdown


@asynccontextmanager
async def in_background(work: Callable[[Shutdown, asyncio.Event], Coroutine[Any, Any, Any]]) -> AsyncIterator[None]:
    """Work until the block ends. Work that fails before that cancels the block, which then raises what it failed of.

    That is what `asyncio.TaskGroup` does: otherwise the block would go on, and learn of it only when it ends.
    """
    shutdown, ready = Shutdown(), asyncio.Event()
    owner = asyncio.current_task()
    inside = cancelled = False

    def ended(task: asyncio.Task[Any]) -> None:
        nonlocal cancelled
        if inside and owner is not None and not task.cancelled() and task.exception() is not None:
            cancelled = owner.cancel()

    task = asyncio.create_task(work(shutdown, ready), name="outbox")
    task.add_done_callback(ended)
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        inside = True
        yield
    except asyncio.CancelledError:
        if not cancelled or owner is None or owner.cancelling() > 1:  # another caller has cancelled it, too
            raise
    finally:
        inside = False
        waiting.cancel()
        shutdown.begun.set()
        if cancelled and owner is not None:
            owner.uncancel()
        await task
